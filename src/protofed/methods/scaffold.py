"""SCAFFOLD: clients correct every gradient by how their mean gradient differed from everybody's in the last round.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for Federated Learning,
ICML 2020.

Sends: weights, and the change of its control variate. Keeps: its control variate, an estimate of its mean gradient.
Server: mean of the weights; the mean of all clients' control variates.

Departures:
1. A client's new control variate is the mean of the gradients of its steps (the paper's option II). With momentum,
   which the paper does not use, a gradient moves the weights more than once; the update is divided by how often,
   so that the estimate has no bias.
2. Weight decay and clipping are part of the gradient that is estimated.
3. Clients count by their numbers of examples in both means, as in all methods here; equally in the paper.
4. Only parameters have control variates; the statistics of BatchNorm, which the paper does not consider, are averaged.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import Positive, SettingErrors
from protofed.api.private import PrivateClient
from protofed.api.requests import Objective
from protofed.api.task import TaskSpec
from protofed.data.batches import Batch
from protofed.methods._shared.control_variates import (
    OWN_GRADIENTS,
    Trainer,
    added,
    inner_product,
    mean_gradient,
    needs_sgd,
    zeros,
)
from protofed.methods._shared.losses import cross_entropy
from protofed.methods.families import PublicWeights, Totals, Weights, WeightUpload
from protofed.nn.networks import Model
from protofed.optim.optimizers import Optimizer
from protofed.tree import Params, record


@record
class Controlled(Weights):
    """What the server knows and sends: the global weights, and the mean of all clients' control variates."""

    control: Params  # of the parameters


@record
class ControlVariate:
    control: Params  # of the parameters


@record
class ControlledUpload(WeightUpload):
    change: Params  # of the client's control variate


@dataclass(frozen=True)
class Scaffold(PublicWeights[Controlled, ControlVariate, ControlledUpload]):
    tags = ("global",)
    server_lr: Positive = 1.0
    """η_g, the global step size: how far the server goes towards the mean of the clients' weights."""

    needs_fresh_optimizer = OWN_GRADIENTS

    def validate(self, optimizer: Optimizer, batch_size: int, spec: TaskSpec | None) -> SettingErrors:
        return needs_sgd("SCAFFOLD", optimizer)

    def init_server(self, server: ServerContext) -> Controlled:
        params = server.initial_params()
        return Controlled(params, zeros(params, server.networks.trainable))

    def upload_spec(self, state: Controlled, server: ServerContext) -> ControlledUpload:
        return ControlledUpload(state.params, torch.tensor(0), state.control)

    def from_sum(self, state: Controlled, totals: Totals, server: ServerContext) -> Controlled:
        """x ← x + η_g Δx and c ← c + |S|/N Δc."""
        mean: ControlledUpload = totals["upload"].value()
        control = added(state.control, mean.change, self.share(totals, server))
        stepped = {name: torch.lerp(state.params[name], mean.params[name], self.server_lr) for name in control}
        return Controlled({**mean.params, **stepped}, control)

    def init_memory(self, client: ClientContext, message: Controlled) -> ControlVariate:
        return ControlVariate(zeros(message.params, client.networks.trainable))

    async def train(
        self, client: ClientContext, message: Controlled, memory: ControlVariate
    ) -> Reply[ControlledUpload, ControlVariate]:
        """cᵢ⁺ ← cᵢ − c + (x − yᵢ) / (K η_l), option II of the paper."""
        params = await self.trained(client, message, memory)
        change, control = self.changed(client, params, message, memory)
        return Reply(ControlledUpload(params, client.num_examples, change), control)

    async def train_privately(
        self, client: PrivateClient, message: Controlled, memory: ControlVariate
    ) -> Reply[ControlledUpload, ControlVariate]:
        params = await self.trained_privately(client, message, memory)
        change, control = client.post(partial(self.changed, client), params, message, memory)
        return Reply(ControlledUpload(params, client.num_examples, change), control)

    def changed(
        self, client: Trainer, params: Params, message: Controlled, memory: ControlVariate
    ) -> tuple[Params, ControlVariate]:
        """cᵢ⁺ − cᵢ and cᵢ⁺."""
        gradient = mean_gradient(client, message.params, params, "SCAFFOLD")
        change = {name: gradient[name] - c for name, c in message.control.items()}
        return change, ControlVariate(added(memory.control, change))

    async def trained_privately(self, client: PrivateClient, message: Controlled, memory: ControlVariate) -> Params:
        context = (message, memory)
        return await client.fit(Objective(cross_entropy), params=message.params, context=context, penalty=self.penalty)

    def loss(self, model: Model, batch: Batch, message: Controlled, memory: ControlVariate) -> Tensor:
        """Cross-entropy and the correction."""
        return cross_entropy(model, batch) + self.penalty(model, message, memory)

    def penalty(self, model: Model, message: Controlled, memory: ControlVariate) -> Tensor:
        """A linear term, whose gradient is the correction c − cᵢ."""
        correction = {name: message.control[name] - c_i for name, c_i in memory.control.items()}
        return inner_product(correction, model.params)
