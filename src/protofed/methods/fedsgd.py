"""FedSGD: in each round clients send the gradient over all of their examples, and the server takes one step.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized
Data, AISTATS 2017. With privacy in a secure sum it is DP-SGD (Abadi et al., CCS 2016) whose batch is all examples of
all clients.

Sends: the sum of the gradients of its examples, the statistics of BatchNorm, and the class sums that the base makes
prototypes of. Keeps: the weights that it was sent last, by which it is judged. Server: one step of SGD along the mean
gradient of the base's loss; the base's prototypes, made of class sums over all clients.

Departures:
1. The server may use momentum, which the paper does not mention; by default it does not.
2. A gradient is that of one batch with all examples, in training mode and augmented, as in all other training here.
3. The statistics of BatchNorm, which the paper does not consider, are averaged.
4. Clients that count alike send mean gradients.
5. Around a method with prototypes, which the paper does not have: they are means over all examples of a class, of
   features in evaluation mode at the weights that were sent. So each example counts once, not each client.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from annotated_types import Interval

from protofed import tree
from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import Method, Positive, SettingErrors, Uploads
from protofed.api.roles import Count
from protofed.api.task import TaskSpec
from protofed.methods._shared.control_variates import zeros
from protofed.methods._shared.one_step import OneStep, SentSums, why_not_one_step
from protofed.methods._shared.wrappers import StatefulWrapper, published
from protofed.methods.families import Averages, OwnWeights, Summands, SumMethod, Totals
from protofed.methods.fedavg import FedAvg
from protofed.optim.optimizers import Optimizer
from protofed.tree import Nothing, Params, Tree, record


@record
class Moving:
    """What the server of the base knows, and the velocity of its weights."""

    base: Tree
    velocity: Params  # of the parameters


@record
class GradientUpload:
    gradient: Params  # of the parameters; summed over examples, or their mean where clients count alike
    classes: SentSums | Nothing  # of the features that the base makes prototypes of, if it does
    statistics: Params  # of BatchNorm
    num_examples: Annotated[torch.Tensor, Count()]  # ()


@dataclass(frozen=True)
class FedSGD(Averages, StatefulWrapper):
    tags = ("global", "server-side", "wrapper")
    base: Method[Any, Any, Any, Any] = field(default_factory=FedAvg)
    """The method whose loss clients take the gradient of, and whose prototypes the server makes."""
    server_lr: Positive = 0.1
    """η, the server's learning rate. `training.schedule` holds for it."""
    momentum: Annotated[float, Interval(ge=0, lt=1)] = 0.0
    """How much of the server's velocity is kept from round to round."""

    releases_gradient_sums = True

    @property
    def releases_class_sums(self) -> bool:  # type: ignore[override]
        return self.base.releases_class_sums

    @property
    def not_by_record(self) -> str:  # type: ignore[override]
        return self.base.not_by_record

    @property
    def sums(self) -> bool:
        return True

    @property
    def adds_to_one(self) -> bool:
        return False

    @property
    def needs_fresh_optimizer(self) -> str:
        return "clients take no steps"

    @property
    def step(self) -> OneStep:
        """The base, as what it says of one step."""
        assert isinstance(self.base, OneStep)
        return self.base

    def validate(self, optimizer: Optimizer, batch_size: int, spec: TaskSpec | None) -> SettingErrors:
        found = [*super().validate(optimizer, batch_size, spec)]
        yield from found
        if not found and (why := why_not_one_step(self.base)):  # guard: one-step-bases
            yield "base", f"FedSGD takes one step a round over all examples, and {type(self.base).__name__} {why}"

    def init_server(self, server: ServerContext) -> Moving:
        base = self.base.init_server(server)
        return Moving(base, zeros(published(self.base, base)[0], server.networks.trainable))

    def upload_spec(self, state: Moving, server: ServerContext) -> GradientUpload:
        statistics = tree.select(published(self.base, state.base)[0], list(server.networks.statistics))
        return GradientUpload(state.velocity, self.step.sums_spec(state.base, server), statistics, torch.tensor(0))

    def init_memory(self, client: ClientContext, message: Any) -> OwnWeights:
        return OwnWeights(message.params)

    def local_weights(self, message: Any, memory: OwnWeights) -> Params:
        return self.base.local_weights(message, memory)

    def trained_weights(self, upload: GradientUpload, memory: OwnWeights) -> Params:
        return memory.params

    async def train(self, client: ClientContext, message: Any, memory: OwnWeights) -> Reply[GradientUpload, OwnWeights]:
        objective, context = self.step.record_loss(message, client.round, client.num_rounds)
        gradient, statistics = await client.gradient_sum(objective, message.params, context)
        if self.is_uniform:
            gradient = {name: leaf / len(client.data) for name, leaf in gradient.items()}
        classes: SentSums | Nothing = Nothing()
        if self.releases_class_sums:
            own = self.step.class_features, self.step.longest_feature
            classes = SentSums(*await client.class_sums(message.params, *own))
        return Reply(GradientUpload(gradient, classes, statistics, client.num_examples), OwnWeights(message.params))

    def unchanged(self, upload: GradientUpload, message: Any) -> GradientUpload:
        return tree.map(torch.zeros_like, upload)

    def summand(self, upload: GradientUpload, message: Any) -> Summands:
        weight = self.weight_of(upload.num_examples)
        own: Summands = {"gradient": (upload.gradient, 1.0), "examples": (Nothing(), weight)}
        if self.releases_class_sums:
            own = {**own, "classes": (upload.classes, 1.0)}
        return {**own, "statistics": (upload.statistics, weight)} if upload.statistics else own

    def aggregate(self, state: Moving, uploads: Uploads[GradientUpload], server: ServerContext) -> Moving:
        after: Moving = SumMethod.aggregate(self, state, uploads, server)
        return after

    def from_sum(self, state: Moving, totals: Totals, server: ServerContext) -> Moving:
        """One step along Σ of the gradients over Σ of the examples, and prototypes of the class sums."""
        total, count, params, velocity = totals["gradient"].total, totals["examples"].weight, {}, {}
        start = published(self.base, state.base)[0]
        for name, old in state.velocity.items():
            moved = self.momentum * old.double() + total[name] / count
            step = self.server_lr * server.rate_share * moved
            params[name] = (start[name].double() - step).to(old.dtype)
            velocity[name] = moved.to(old.dtype)
        statistics = totals["statistics"].value() if "statistics" in totals else {}
        sums = totals["classes"].total if "classes" in totals else None
        return Moving(self.step.after_step(state.base, {**start, **params, **statistics}, sums), velocity)
