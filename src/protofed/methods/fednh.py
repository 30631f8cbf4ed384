"""FedNH: the classifier is a set of prototypes on the sphere that clients cannot train; the server turns them slowly.

Dai, Chen, Li, Heinecke, Sun, Xu: Tackling Data Heterogeneity in Federated Learning with Class Prototypes, AAAI 2023.

Sends: weights, with the prototypes as those of the classifier; own class prototypes, and how many examples are behind
each. Keeps: nothing. Server: mean of the weights; each class's prototype is turned towards the mean of the
clients' own ones, weighted by examples, and stays of length 1.

Departures:
1. Prototypes start as orthonormal rows, as in the authors' code, and scaled to length 1 where there are more classes
   than dimensions; the paper solves for directions that are far apart.
2. The sphere is that of what a classifier reads: the output of the projection if the network has one. The task's own
   classifier is left out, and the prototypes are in its place.
3. A class that no reply of a round holds keeps its prototype exactly, and so does one whose mean has no direction.
4. Clients count by their numbers of examples in the mean of the weights, as in all methods here; equally in the paper.
5. A client also sends back the prototypes that it received, as part of its weights, so that these are complete for
   methods that go around this one.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Interval
from torch import Tensor, nn

from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import Positive
from protofed.api.private import Function, PrivateClient
from protofed.api.requests import Objective
from protofed.api.task import ClientId, TaskSpec
from protofed.data.batches import Batch
from protofed.methods._shared.models import embedded, embedding_dim
from protofed.methods._shared.one_step import OneStep, SentSums
from protofed.methods.families import PublicWeights, Summands, Totals, Weights, WeightUpload
from protofed.nn.networks import Model, Parts
from protofed.prototypes import class_means
from protofed.prototypes.class_means import ClassSums, Prototypes
from protofed.prototypes.contrast import EPS
from protofed.tree import Nothing, Params, Tree, record

PROTOTYPES = "classifier.prototypes"


@record
class DirectedUpload(WeightUpload):
    prototypes: Prototypes  # rows of length 1, (C, P) with P the size of what the classifier reads


class SphereClassifier(nn.Module):
    """Scores are scaled cosines to the prototypes, which no gradient changes: they are a buffer."""

    prototypes: Tensor

    def __init__(self, num_classes: int, dim: int, scale: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))
        rows = nn.init.orthogonal_(torch.empty(num_classes, dim))
        self.register_buffer("prototypes", F.normalize(rows, dim=-1))  # (C, P)

    def forward(self, z: Tensor) -> Tensor:
        return self.scale * F.normalize(z, dim=-1, eps=EPS) @ self.prototypes.T


@dataclass(frozen=True)
class FedNH(PublicWeights[Weights, Nothing, DirectedUpload], OneStep):
    tags = ("global", "prototype", "server-side")
    releases_class_sums = True
    longest_feature = 1.0
    smoothing: Annotated[float, Interval(ge=0, le=1)] = 0.9
    """ρ, how much of a prototype stays when the server turns it."""
    initial_scale: Positive = 5.0
    """s, what cosines are multiplied by, before training; it is learnt. The authors' code has 1 for small networks,
    which learns slowly, and 20 for ResNets."""

    def networks(self, spec: TaskSpec, client: ClientId) -> Parts:
        parts = spec.model(client)
        return {
            **parts,
            "classifier": SphereClassifier(spec.num_classes, embedding_dim(spec, parts), self.initial_scale),
        }

    def init_server(self, server: ServerContext) -> Weights:
        return Weights(server.initial_params())

    def upload_spec(self, state: Weights, server: ServerContext) -> DirectedUpload:
        return DirectedUpload(state.params, torch.tensor(0), class_means.no_prototypes(*state.params[PROTOTYPES].shape))

    async def train(self, client: ClientContext, message: Weights, memory: Nothing) -> Reply[DirectedUpload, Nothing]:
        params = await self.trained(client, message, memory)
        sums = await client.total(direction_sums, params, (torch.zeros(client.num_classes),))
        prototypes = unit_length(Prototypes(sums.total, sums.count))
        return Reply(DirectedUpload(params, client.num_examples, prototypes), memory)

    async def train_privately(
        self, client: PrivateClient, message: Weights, memory: Nothing
    ) -> Reply[DirectedUpload, Nothing]:
        """Directions are those at the received weights; none is longer than 1."""
        params = await self.trained_privately(client, message, memory)
        prototypes = client.post(unit_length, await client.prototypes(message.params, directions, self.longest_feature))
        return Reply(DirectedUpload(params, client.num_examples, prototypes), memory)

    def summand(self, upload: DirectedUpload, message: Weights) -> Summands:
        return {
            "params": (upload.params, self.weight_of(upload.num_examples)),
            "prototypes": (class_means.by_count(upload.prototypes), 1.0),
        }

    def from_sum(self, state: Weights, totals: Totals, server: ServerContext) -> Weights:
        return self.after_step(state, totals["params"].value(), totals["prototypes"].total)

    @property
    def class_features(self) -> Function:
        return directions

    def record_loss(self, message: Weights, round: int, num_rounds: int) -> tuple[Objective, tuple[Tree, ...]]:
        return Objective(self.loss), (message, Nothing())

    def sums_spec(self, state: Weights, server: ServerContext) -> SentSums:
        rows = torch.zeros_like(state.params[PROTOTYPES])
        return SentSums(rows, rows.new_zeros(len(rows)))

    def after_step(self, state: Weights, params: Params, sums: ClassSums | None) -> Weights:
        assert sums is not None
        prototypes = state.params[PROTOTYPES]
        seen = class_means.mean_of(sums, class_means.no_prototypes(*prototypes.shape))
        return Weights({**params, PROTOTYPES: turned(prototypes, seen, self.smoothing)})


def directions(model: Model, batch: Batch) -> Tensor:
    """The directions of what the classifier reads, (B, P)."""
    return F.normalize(embedded(model, batch.x), dim=-1, eps=EPS)


def direction_sums(model: Model, batch: Batch, per_class: Tensor) -> ClassSums:
    """Σ of the directions of each class."""
    return class_means.class_sums(directions(model, batch), batch.y, batch.weight, len(per_class))


def unit_length(prototypes: Prototypes) -> Prototypes:
    return Prototypes(F.normalize(prototypes.mean, dim=-1, eps=EPS), prototypes.count)


def turned(prototypes: Tensor, seen: Prototypes, smoothing: float) -> Tensor:
    """The prototypes (C, P), each moved towards the direction of what was seen of its class, and of length 1 again."""
    aim = F.normalize(seen.mean.double(), dim=-1, eps=EPS)
    moved = smoothing * prototypes.double() + (1 - smoothing) * aim
    has_direction = aim.any(-1) & (moved.norm(dim=-1) > 1e-6)  # less is what rounding leaves of opposite directions
    moves = seen.is_known & has_direction
    return torch.where(moves[:, None], F.normalize(moved, dim=-1).to(prototypes.dtype), prototypes)
