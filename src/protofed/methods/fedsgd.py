"""FedSGD: in each round clients send the gradient over all of their examples, and the server takes one step.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized
Data, AISTATS 2017. With privacy in a secure sum it is DP-SGD (Abadi et al., CCS 2016) whose batch is all examples of
all clients.

Sends: the sum of the gradients of its examples, and the statistics of BatchNorm. Keeps: the weights that it was sent
last, by which it is judged. Server: one step of SGD along the mean gradient.

Departures:
1. The server may use momentum, which the paper does not mention; by default it does not.
2. A gradient is that of one batch with all examples, in training mode and augmented, as in all other training here.
3. The statistics of BatchNorm, which the paper does not consider, are averaged.
4. Clients that count alike send mean gradients.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Interval

from protofed import tree
from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import Positive
from protofed.api.requests import Objective
from protofed.api.roles import Count
from protofed.api.task import ClientId
from protofed.methods._shared.control_variates import zeros
from protofed.methods._shared.losses import cross_entropy
from protofed.methods.families import Averages, OwnWeights, Summands, SumMethod, Totals, Weights
from protofed.tree import Nothing, Params, record


@record
class Moving(Weights):
    """The global weights, and the server's velocity."""

    velocity: Params  # of the parameters


@record
class GradientUpload:
    gradient: Params  # of the parameters; summed over examples, or their mean where clients count alike
    statistics: Params  # of BatchNorm
    num_examples: Annotated[torch.Tensor, Count()]  # ()


@dataclass(frozen=True)
class FedSGD(Averages, SumMethod[Moving, Weights, OwnWeights, GradientUpload]):
    tags = ("global",)
    server_lr: Positive = 0.1
    """η, the server's learning rate. `training.schedule` holds for it."""
    momentum: Annotated[float, Interval(ge=0, lt=1)] = 0.0
    """How much of the server's velocity is kept from round to round."""

    releases_gradient_sums = True

    @property
    def needs_fresh_optimizer(self) -> str:
        return "clients take no steps"

    def init_server(self, server: ServerContext) -> Moving:
        params = server.initial_params()
        return Moving(params, zeros(params, server.networks.trainable))

    def message_for(self, state: Moving, client: ClientId) -> Weights:
        return Weights(state.params)

    def public(self, state: Moving) -> tuple[Params, Weights]:
        return state.params, Weights(state.params)

    def upload_spec(self, state: Moving, server: ServerContext) -> GradientUpload:
        statistics = tree.select(state.params, list(server.networks.statistics))
        return GradientUpload(state.velocity, statistics, torch.tensor(0))

    def init_memory(self, client: ClientContext, message: Weights) -> OwnWeights:
        return OwnWeights(message.params)

    def local_weights(self, message: Weights, memory: OwnWeights) -> Params:
        return message.params

    def trained_weights(self, upload: GradientUpload, memory: OwnWeights) -> Params:
        return memory.params

    async def train(
        self, client: ClientContext, message: Weights, memory: OwnWeights
    ) -> Reply[GradientUpload, OwnWeights]:
        gradient, statistics = await client.gradient_sum(Objective(cross_entropy), message.params)
        if self.is_uniform:
            gradient = {name: leaf / len(client.data) for name, leaf in gradient.items()}
        return Reply(GradientUpload(gradient, statistics, client.num_examples), OwnWeights(message.params))

    def unchanged(self, upload: GradientUpload, message: Weights) -> GradientUpload:
        return tree.map(torch.zeros_like, upload)

    def summand(self, upload: GradientUpload, message: Weights) -> Summands:
        weight = self.weight_of(upload.num_examples)
        own: Summands = {"gradient": (upload.gradient, 1.0), "examples": (Nothing(), weight)}
        return {**own, "statistics": (upload.statistics, weight)} if upload.statistics else own

    def from_sum(self, state: Moving, totals: Totals, server: ServerContext) -> Moving:
        """One step along Σ of the gradients over Σ of the examples."""
        total, count, params, velocity = totals["gradient"].total, totals["examples"].weight, {}, {}
        for name, old in state.velocity.items():
            moved = self.momentum * old.double() + total[name] / count
            step = self.server_lr * server.rate_share * moved
            params[name] = (state.params[name].double() - step).to(old.dtype)
            velocity[name] = moved.to(old.dtype)
        statistics = totals["statistics"].value() if "statistics" in totals else {}
        return Moving({**state.params, **params, **statistics}, velocity)
