"""FPL for secure sums: clients find the clusters of their prototypes together, and the server reads sums alone.

Huang, Ye, Shi, Li, Du: Rethinking Federated Learning with Domain Shift: A Prototype View, CVPR 2023. In the paper the
server clusters prototypes that it sees; here nobody but the client sees them.

Sends: weights, class prototypes, and which classes it has; after training, in several exchanges, its prototypes once
more, added to the sums of the nearest centres. Keeps: the prototypes of its last training. Server: mean of the weights
by the number of examples; moves the centres, which are the cluster prototypes in the end, and the mean of those of a
class is the unbiased prototype.

Departures:
1. All of FPL from the second on. K-means takes the place of FINCH: `num_clusters` of each class at most, by Euclidean
   distance, by Lloyd's algorithm from random starts in so many steps.
2. A client that drops out while clusters are found is missing in the steps after it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from protofed import tree
from protofed.api.contexts import ClientContext, Reply
from protofed.api.method import Clients, SettingErrors
from protofed.api.roles import Count
from protofed.api.sums import Summand
from protofed.api.task import ClientId, TaskSpec
from protofed.methods._shared.sums import sums_over
from protofed.methods._shared.targets import AgainstClusters, Targets, kept, of_all_classes
from protofed.methods.families import PrototypeUpload, Summands, WeightsAndPrototypes
from protofed.optim.optimizers import Optimizer
from protofed.prototypes import class_means
from protofed.prototypes.class_means import Prototypes
from protofed.prototypes.kmeans_sums import Clustered, ClusterSums, added, first_centres, lloyd, memberships
from protofed.tree import Tree, record


@record
class Centres:
    """What every client is sent in a step of k-means by sums."""

    values: Tensor  # (S, J, C, D)


@record
class Joined:
    """What a client says in it."""

    prototypes: Prototypes
    member: Annotated[Tensor, Count(of_examples=False)]  # (S, J, C), 1 at the nearest centre of each prototype


@dataclass(frozen=True)
class FPLSums(AgainstClusters):
    tags = ("global", "prototype", "server-side")
    num_clusters: Annotated[int, Ge(1)] = 3
    """The most clusters of a class."""
    starts: Annotated[int, Ge(1)] = 1
    """So many random starts are made side by side, and the tightest partition is kept. Each tells the server more."""
    lloyd_steps: Annotated[int, Ge(1)] = 4
    """Exchanges in which centres move, in every round."""

    has_more_exchanges = True

    def validate(self, optimizer: Optimizer, batch_size: int, spec: TaskSpec | None) -> SettingErrors:
        if self.is_global:
            yield (
                "contrast_with",
                'with contrast_with = "global" and consistent_with = "global" nothing reads the clusters: set one of '
                "them to its default, or take fpl",
            )

    def round(self, state: WeightsAndPrototypes[Targets], clients: Clients) -> WeightsAndPrototypes[Targets]:
        after = super().round(state, clients)
        plain = after.prototypes.consistent  # Eq. (3)
        start = first_centres(plain.mean, self.num_clusters, self.starts, clients.server.generator)
        found = lloyd(self.exchange(plain, clients), start, self.lloyd_steps)
        return replace(after, prototypes=self.clustered(found, plain, state.prototypes))

    def exchange(self, plain: Prototypes, clients: Clients) -> Callable[[Tensor], ClusterSums]:
        """A step of k-means by sums."""

        def step(centres: Tensor) -> ClusterSums:
            message = Centres(centres.to(plain.mean))
            like = Joined(class_means.no_prototypes(*plain.mean.shape), torch.zeros(centres.shape[:3]))
            sums: ClusterSums = sums_over(clients, self.join, lambda _: message, like, self.joined)["clusters"].total
            return tree.map(lambda leaf: leaf.to(centres.device), sums)

        return step

    async def join(self, client: ClientContext, message: Centres, memory: Prototypes) -> Reply[Joined, Prototypes]:
        """Which centres the client's prototypes are nearest to."""
        return Reply(Joined(memory, memberships(memory.mean, message.values)), memory)

    def joined(self, upload: Joined, message: Centres) -> Summands:
        """The client's prototypes, in the sums of the nearest centres."""
        return {"clusters": (added(upload.prototypes.mean, upload.prototypes.count, upload.member), 1.0)}

    def summand_of(self, step: str) -> Summand:
        return self.joined if step == "join" else super().summand_of(step)

    def clustered(self, found: Clustered, plain: Prototypes, previous: Targets) -> Targets:
        """The prototypes of every class, Eq. (4) to (6)."""
        device = previous.label.device
        with torch.device("cpu"):
            found, plain, previous = tree.map(Tensor.cpu, (found, plain, previous))
            of_classes = [self.of_class(found, plain, previous, c) for c in range(len(plain.mean))]
            targets = of_all_classes(of_classes, plain.count)
        return tree.map(lambda leaf: leaf.to(device), targets)

    def of_class(self, found: Clustered, plain: Prototypes, previous: Targets, c: int) -> tuple[Tensor, Tensor]:
        """What a class is contrasted with (J, D) and consistent with (D,)."""
        there = found.count[:, c] > 0
        if not there.any():
            return kept(previous, c)
        return self.of_clusters(found.centres[there, c].to(plain.mean.dtype), plain.mean[c])

    # ---- what a client keeps, and what it is sent

    def init_memory(self, client: ClientContext, message: WeightsAndPrototypes[Targets]) -> Prototypes:
        return class_means.no_prototypes(*message.prototypes.consistent.mean.shape)

    async def train(
        self, client: ClientContext, message: WeightsAndPrototypes[Targets], memory: Tree
    ) -> Reply[PrototypeUpload, Tree]:
        reply = await super().train(client, message, memory)
        return Reply(reply.upload, reply.upload.prototypes)

    def message_spec(
        self, step: str, state: WeightsAndPrototypes[Targets], client: ClientId
    ) -> WeightsAndPrototypes[Targets] | Centres:
        return Centres(state.prototypes.clusters) if step == "join" else state
