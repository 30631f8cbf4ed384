"""FedNova: FedAvg that averages the clients' mean gradients, so that clients with more steps do not count more.

Wang, Liu, Liang, Joshi, Poor: Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization,
NeurIPS 2020.

Sends: weights, its effective number of local steps, and how many it took. Keeps: nothing. Server: mean of the
normalised updates, weighted by the number of examples, and as many steps along it as clients took on average; with
momentum it also keeps a running sum of these updates.

Departures:
1. The paper leaves the effective number of steps open; it is the mean of the clients' ‖a‖₁ weighted by examples, and
   with a proximal term that of their numbers of steps, as in the authors' code. When all clients take equally many
   steps and there is no such term, the method is FedAvg but for rounding.
2. Every client trains for the configured number of epochs, so that numbers of steps differ as numbers of examples do;
   the paper also lets the epochs differ.
3. Nesterov's momentum, and momentum together with a proximal term, have the vector a that follows from their steps; for
   the latter the authors' code has another number. Weight decay and clipping are part of the gradient.
4. The paper's variant with variance reduction is left out.
5. The statistics of BatchNorm, which the paper does not consider, are averaged, without momentum.
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from annotated_types import Interval
from torch import Tensor

from protofed import tree
from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import NonNegative, SettingErrors
from protofed.api.private import PrivateClient
from protofed.api.requests import Objective
from protofed.api.task import ClientId, TaskSpec
from protofed.data.batches import Batch
from protofed.methods._shared.control_variates import (
    OWN_GRADIENTS,
    Trainer,
    effective_steps,
    needs_sgd,
    num_steps,
    rate_in_round,
    zeros,
)
from protofed.methods._shared.losses import cross_entropy
from protofed.methods.families import Summands, Totals, Weights, WeightSharing, WeightUpload
from protofed.nn.networks import Model
from protofed.optim.optimizers import Optimizer
from protofed.tree import Nothing, Params, record


@record
class WithVelocity(Weights):
    velocity: Params  # of the parameters, as a gradient, float64; empty without momentum


@record
class NormalisedUpload(WeightUpload):
    steps: Tensor  # (), float64, ‖a‖₁, the effective number of local steps
    taken: Tensor  # (), float64, τ, how many steps these were


@dataclass(frozen=True)
class FedNova(WeightSharing[WithVelocity, Weights, Nothing, NormalisedUpload]):
    tags = ("global",)
    proximal_weight: NonNegative = 0.0
    """μ, how strongly a client is held to the received weights, as in FedProx. The learning rate times it must be
    below 1."""
    server_momentum: Annotated[float, Interval(ge=0, lt=1)] = 0.0
    """γ, how much of the server's last update is taken once more."""

    needs_fresh_optimizer = OWN_GRADIENTS

    def validate(self, optimizer: Optimizer, batch_size: int, spec: TaskSpec | None) -> SettingErrors:
        return needs_sgd("FedNova", optimizer)

    def init_server(self, server: ServerContext) -> WithVelocity:
        params = server.initial_params()
        names = server.networks.trainable if self.server_momentum else ()
        return WithVelocity(params, tree.map(torch.Tensor.double, zeros(params, names)))

    def message_for(self, state: WithVelocity, client: ClientId) -> Weights:
        return Weights(state.params)

    def public(self, state: WithVelocity) -> tuple[Params, Weights] | None:
        return state.params, Weights(state.params)

    def upload_spec(self, state: WithVelocity, server: ServerContext) -> NormalisedUpload:
        number = torch.tensor(0.0, dtype=torch.float64)
        return NormalisedUpload(state.params, torch.tensor(0), number, number)

    def summand(self, upload: NormalisedUpload, message: Weights) -> Summands:
        """The upload, and its update divided by the effective number of steps."""
        steps = upload.steps.clamp(min=1)
        direction = {name: (leaf.double() - message.params[name]) / steps for name, leaf in upload.params.items()}
        return {**super().summand(upload, message), "direction": (direction, self.weight_of(upload.num_examples))}

    def from_sum(self, state: WithVelocity, totals: Totals, server: ServerContext) -> WithVelocity:
        mean: NormalisedUpload = totals["upload"].value()
        direction, velocity = totals["direction"].value(), state.velocity
        steps = mean.taken if self.proximal_weight else mean.steps
        delta = {name: steps * direction[name] for name in server.networks.trainable}
        if self.server_momentum:
            lr = rate_in_round(server.optimizer, server.round, "FedNova") * server.rate_share
            velocity = {name: self.server_momentum * velocity[name] + leaf / lr for name, leaf in delta.items()}
            delta = {name: lr * leaf for name, leaf in velocity.items()}
        stepped = {name: (state.params[name] + leaf).to(state.params[name].dtype) for name, leaf in delta.items()}
        return WithVelocity({**mean.params, **stepped}, velocity)

    def loss(self, model: Model, batch: Batch, message: Weights, memory: Nothing) -> Tensor:
        """The local objective: cross-entropy, and the proximal term if there is one."""
        loss = super().loss(model, batch, message, memory)
        return loss + self.penalty(model, message, memory) if self.proximal_weight else loss

    def penalty(self, model: Model, message: Weights, memory: Nothing) -> Tensor:
        """The proximal term."""
        return self.proximal_weight / 2 * tree.squared_distance(model.trainable, message.params)

    async def train(self, client: ClientContext, message: Weights, memory: Nothing) -> Reply[NormalisedUpload, Nothing]:
        params = await self.trained(client, message, memory)
        return Reply(NormalisedUpload(params, client.num_examples, *self.steps(client)), memory)

    async def train_privately(
        self, client: PrivateClient, message: Weights, memory: Nothing
    ) -> Reply[NormalisedUpload, Nothing]:
        params = await self.trained_privately(client, message, memory)
        steps = client.post(partial(self.steps, client))
        return Reply(NormalisedUpload(params, client.num_examples, *steps), memory)

    async def trained_privately(self, client: PrivateClient, message: Weights, memory: Nothing) -> Params:
        penalty = self.penalty if self.proximal_weight else None
        context = (message, memory)
        return await client.fit(Objective(cross_entropy), params=message.params, context=context, penalty=penalty)

    def steps(self, client: Trainer) -> tuple[Tensor, Tensor]:
        """‖a‖₁ and τ, which follow from the client's number of examples."""
        numbers = effective_steps(client, "FedNova", self.proximal_weight), num_steps(client)
        effective, taken = (torch.tensor(number, dtype=torch.float64) for number in numbers)
        return effective, taken
