"""pFedMe: each client has a model of its own, held near its copy of the global one, which moves towards it in turn.

Dinh, Tran, Nguyen: Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020.

Sends: weights, of its copy of the global model. Keeps: its own model. Server: goes towards the mean of the copies,
weighted by the number of examples.

Departures:
1. A client takes a step of its copy for every batch of the configured epochs; the paper counts steps, R in a round.
2. The inner problem is solved by a fixed number of steps of plain gradient descent on the batch, which go on from those
   of the last batch and begin at the received weights, as in the authors' code (`userpFedMe.py` and `fedoptimizer.py`
   of CharlieDinh/pFedMe). That code also has a weight decay of 0.001 there, which is left out.
3. Clients that are not sampled do not train; in the paper all train in every round, and some send.
4. Clients count by their numbers of examples, as in the authors' code; equally in the paper.
5. The copy has the parameters; the statistics of BatchNorm, which the paper does not consider, are those of the own
   model.
6. A client that has not taken part yet uses the received weights.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

import torch
from annotated_types import Ge

from protofed import tree
from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import NonNegative, Positive, SettingErrors
from protofed.api.requests import Objective
from protofed.api.task import ClientId, TaskSpec
from protofed.errors import BadInput
from protofed.methods._shared.losses import cross_entropy
from protofed.methods._shared.own_training import own_optimizer, own_optimizer_errors
from protofed.methods._shared.twins import as_twin, twin_of, with_twin, without_twin
from protofed.methods.families import OwnModels, OwnWeights, Totals, Weights, WeightUpload
from protofed.nn.networks import Parts
from protofed.optim.optimizers import Gradient, Optimizer, Sgd
from protofed.tree import Params


@dataclass(frozen=True)
class PFedMe(OwnModels):
    tags = ("global", "personal")
    has_plain_classifier = False
    attraction: Positive = 15.0
    """λ, how strongly the own model is held to the client's copy of the global one. The learning rate times it must be
    below 1."""
    inner_steps: Annotated[int, Ge(1)] = 5
    """K, steps of the own model on each batch."""
    copy_lr: Positive = 0.05
    """η, the learning rate of the copy, which goes η λ of the way to the own model in a step."""
    personal_lr: NonNegative = 0.0
    """The learning rate of the own model; 0: as configured."""
    server_lr: Positive = 1.0
    """β, how far the server goes towards the mean of the copies."""

    needs_fresh_optimizer = "its steps are not those of the configured optimiser, of which only the rate is taken"

    def validate(self, optimizer: Optimizer, batch_size: int, spec: TaskSpec | None) -> SettingErrors:
        yield from own_optimizer_errors("personal_lr", optimizer, self.personal_lr, "sgd")
        if self.copy_lr * self.attraction > 1:
            yield (
                "copy_lr",
                "copy_lr · attraction is above 1, so the copy would go past the own model: lower one of them",
            )

    def networks(self, spec: TaskSpec, client: ClientId) -> Parts:
        return with_twin(spec.model(client))

    def init_server(self, server: ServerContext) -> Weights:
        return Weights(without_twin(server.initial_params()))

    def from_sum(self, state: Weights, totals: Totals, server: ServerContext) -> Weights:
        """w ← (1 − β) w + β w̄."""
        mean: Params = totals["upload"].value().params
        names = [name for name in mean if name in server.networks.trainable]
        return Weights({**mean, **{n: torch.lerp(state.params[n], mean[n], self.server_lr) for n in names}})

    def local_weights(self, message: Weights, memory: OwnWeights) -> Params:
        return {**memory.params, **as_twin(message.params)}

    async def train(
        self, client: ClientContext, message: Weights, memory: OwnWeights
    ) -> Reply[WeightUpload, OwnWeights]:
        """The local rounds of Algorithm 1. The twin is the copy."""
        start = {**message.params, **as_twin(message.params)}
        client = replace(client, optimizer=self.descent(client))
        params = await client.fit(Objective(cross_entropy), params=start)
        own = without_twin(params)
        trainable = [name for name in own if name in client.networks.trainable]
        copy = {**own, **tree.select(twin_of(params), trainable)}
        return Reply(WeightUpload(copy, client.num_examples), OwnWeights(own))

    def descent(self, client: ClientContext) -> "MoreauDescent":
        base = own_optimizer(client.optimizer, self.personal_lr, "sgd", client.halvings)
        if not isinstance(base, Sgd):
            raise BadInput(f"{client.optimizer!r} has no learning rate that could be taken: configure another one")
        return MoreauDescent(base, self.attraction, self.inner_steps, self.copy_lr)


@dataclass(frozen=True)
class MoreauDescent:
    """An optimiser of two models at once: θ fits the batch near w, and w then moves towards θ."""

    base: Sgd
    attraction: float
    inner_steps: int
    copy_lr: float

    @property
    def lr(self) -> float:
        return self.base.lr

    def with_lr(self, lr: Any) -> Self:
        return replace(self, base=self.base.with_lr(lr))

    def for_round(self, round: int) -> Self:
        return replace(self, base=self.base.for_round(round))

    def init(self, params: Params) -> tuple[()]:
        return ()

    def step(self, gradient: Gradient, params: Params, state: tuple[()]) -> tuple[Params, tuple[()]]:
        """A local round of Algorithm 1: K steps of θ down f(θ) + λ/2 ‖θ − w‖², then w ← w − η λ (w − θ)."""
        own, copy = without_twin(params), twin_of(params)

        def slope(at: Params) -> Params:
            found = gradient({**at, **as_twin(copy)})
            return {name: found[name] + self.attraction * (leaf - copy[name]) for name, leaf in at.items()}

        for _ in range(self.inner_steps):
            own, _ = self.base.step(slope, own, ())
        share = self.copy_lr * self.attraction
        moved = {name: leaf - share * (leaf - own[name]) for name, leaf in copy.items()}
        return {**own, **as_twin(moved)}, state
