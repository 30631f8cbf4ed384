"""FPL: clients learn against prototypes that the server clustered, and that speak for every domain equally.

Huang, Ye, Shi, Li, Du: Rethinking Federated Learning with Domain Shift: A Prototype View, CVPR 2023.

Sends: weights and class prototypes. Keeps: nothing. Server: mean of the weights by the number of examples; for each
class FINCH clusters the clients' prototypes, the clusters' means are the cluster prototypes, and the mean of these is
the unbiased prototype.

Departures:
1. FINCH's coarsest partition is the default, as in the authors' code; Eq. (4) describes the first one (a setting).
2. The squared error of Eq. (10) is averaged over the dimensions of the feature by default, as in the authors' code; the
   paper prints the sum (a setting).
3. A client's prototypes are the running means of its last epoch by default, as in the authors' code; Eq. (2) reads as
   recomputed after training (a setting).
4. Eq. (3) divides by the number of clients; the mean here is over the clients that own the class.
5. A class that no reply of a round holds keeps its prototypes.
6. Eq. (8) is computed with logsumexp, so that small temperatures (0.01) train.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from protofed.data import Batch
from protofed.method import Positive
from protofed.methods.families import PrototypeSharing
from protofed.prototypes import class_means
from protofed.prototypes.class_means import PrototypeMode, Prototypes
from protofed.prototypes.clustering import cluster_means, finch
from protofed.prototypes.contrast import cluster_contrast, pull
from protofed.tree import record


@record
class Clustered:
    clusters: Tensor  # (C, J, D), zero where a class has fewer than J
    is_cluster: Tensor  # (C, J), bool
    unbiased: Prototypes  # the mean of each class's cluster prototypes
    plain: Prototypes  # the mean of each class's client prototypes


@dataclass(frozen=True)
class FPL(PrototypeSharing[Clustered]):
    temperature: Positive = 0.02
    """τ in Eq. (8)."""
    contrast: bool = True
    """Whether the cluster prototypes contrastive loss, Eq. (8), is on."""
    consistency: bool = True
    """Whether the unbiased prototypes consistent regularisation, Eq. (10), is on."""
    contrast_with: Literal["clusters", "global"] = "clusters"
    """Prototypes of the contrast: the cluster prototypes of Eq. (5), or the global ones of Eq. (3)."""
    consistent_with: Literal["unbiased", "global"] = "unbiased"
    """Prototypes of the consistency: the unbiased ones of Eq. (9), or the global ones of Eq. (3)."""
    consistency_reduction: Literal["mean", "sum"] = "mean"
    """Whether the squared error of Eq. (10) is averaged or summed over the dimensions of the feature."""
    finch_level: Literal["last", "first"] = "last"
    """FINCH's coarsest partition (of more than one cluster), or its first."""
    prototype_mode: PrototypeMode = "running"
    """Whether a client's prototypes are the running means of its last epoch or recomputed after training."""

    def no_prototypes(self, num_classes: int, dim: int) -> Clustered:
        empty = class_means.no_prototypes(num_classes, dim)
        is_cluster = torch.zeros(num_classes, 1, dtype=torch.bool)
        return Clustered(torch.zeros(num_classes, 1, dim), is_cluster, empty, empty)

    def combine(self, prototypes: list[Prototypes], previous: Clustered) -> Clustered:
        """Cluster and unbiased prototypes of every class, Eq. (3), (4), (5) and (9)."""
        by_class = [
            self.clustered(torch.stack([p.mean[c] for p in prototypes if p.count[c] > 0]))
            if any(p.count[c] > 0 for p in prototypes)
            else previous.clusters[c][previous.is_cluster[c]]
            for c in range(len(previous.clusters))
        ]
        plain = class_means.mean_over_owners(prototypes, previous.plain)
        clusters, is_cluster = padded(by_class)
        unbiased = clusters.double().sum(1) / is_cluster.sum(1, keepdim=True).clamp(min=1)
        return Clustered(clusters, is_cluster, Prototypes(unbiased.float(), plain.count), plain)

    def clustered(self, means: Tensor) -> Tensor:
        """The means of the clusters that FINCH finds among one class's prototypes, (J, D), Eq. (4) and (5)."""
        partitions = finch(means)
        return cluster_means(means, partitions[-1 if self.finch_level == "last" else 0]).to(means.dtype)

    def prototype_loss(self, z: Tensor, batch: Batch, known: Clustered) -> Tensor:
        """What the prototypes add to the objective of Eq. (12)."""
        loss = torch.zeros_like(batch.weight)
        if self.contrast:
            clusters, is_cluster = known.clusters, known.is_cluster
            if self.contrast_with == "global":
                clusters, is_cluster = known.plain.mean[:, None], known.plain.is_known[:, None]
            loss = loss + cluster_contrast(z, batch.y, clusters, is_cluster, self.temperature)
        if self.consistency:
            target = known.unbiased if self.consistent_with == "unbiased" else known.plain
            loss = loss + pull(z, batch.y, target.mean, target.is_known, self.consistency_reduction)
        return loss


def padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Lists of vectors as one tensor (C, J, D) and a mask (C, J) of what is real."""
    most = max(1, *(len(row) for row in rows)) if rows else 1
    clusters = torch.zeros(len(rows), most, rows[0].shape[-1])
    is_cluster = torch.zeros(len(rows), most, dtype=torch.bool)
    for c, row in enumerate(rows):
        clusters[c, : len(row)] = row
        is_cluster[c, : len(row)] = True
    return clusters, is_cluster
