"""What FPL's clients learn against, and how, whoever finds the clusters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from protofed.api.method import Positive
from protofed.api.views import Points
from protofed.data.batches import Batch
from protofed.methods.families import PrototypeSharing, WeightsAndPrototypes
from protofed.prototypes import class_means
from protofed.prototypes.class_means import ClassSums, PrototypeMode, Prototypes
from protofed.prototypes.contrast import cluster_contrast, pull
from protofed.tree import Ragged, record


@record
class Targets:
    """What clients learn against."""

    clusters: Annotated[Tensor, Ragged(fill=0)]  # (M, D), the prototypes of the contrast, M = Σ J_c
    label: Annotated[Tensor, Ragged(fill=-1)]  # (M,), their classes; −1 where there is none
    consistent: Prototypes  # the prototype of the consistency for each class


@dataclass(frozen=True)
class AgainstClusters(PrototypeSharing[Targets]):
    temperature: Positive = 0.02
    """τ in Eq. (7)."""
    contrast: bool = True
    """Whether the cluster prototypes contrastive loss, Eq. (8), is on."""
    consistency: bool = True
    """Whether the unbiased prototypes consistent regularisation, Eq. (10), is on."""
    contrast_with: Literal["clusters", "global"] = "clusters"
    """Prototypes of the contrast: the cluster prototypes of Eq. (5), or the global ones of Eq. (3)."""
    consistent_with: Literal["unbiased", "global"] = "unbiased"
    """Prototypes of the consistency: the unbiased ones of Eq. (6), or the global ones of Eq. (3)."""
    consistency_reduction: Literal["mean", "sum"] = "mean"
    """Whether the squared error of Eq. (10) is averaged or summed over the dimensions of the feature."""
    prototype_mode: PrototypeMode = "running"
    """Whether a client's prototypes are the running means of its last epoch or recomputed after training."""

    @property
    def is_global(self) -> bool:
        """Whether nothing is learnt against that is made of clusters."""
        return self.contrast_with == self.consistent_with == "global"

    def no_prototypes(self, num_classes: int, dim: int) -> Targets:
        empty = class_means.no_prototypes(num_classes, dim)
        return Targets(torch.zeros(1, dim), torch.tensor([-1]), empty)

    def combine(self, sums: ClassSums, previous: Targets) -> Targets:
        """The global prototypes of every class, Eq. (3), in the place of all others."""
        plain = class_means.mean_of(sums, previous.consistent)
        known = class_means.points(plain)
        return Targets(known.values, known.label, plain)

    def of_clusters(self, clusters: Tensor, plain: Tensor) -> tuple[Tensor, Tensor]:
        """What a class is contrasted with (J, D) and consistent with (D,), from its cluster prototypes, Eq. (5), and
        its global one."""
        contrasted = clusters if self.contrast_with == "clusters" else plain[None]
        return contrasted, clusters.mean(0) if self.consistent_with == "unbiased" else plain  # Eq. (6)

    def prototype_sets(self, state: WeightsAndPrototypes[Targets]) -> Mapping[str, Points]:
        targets = state.prototypes
        known = targets.label >= 0
        return {
            "cluster prototypes": Points(targets.clusters[known], targets.label[known]),
            "unbiased prototypes": class_means.points(targets.consistent),
        }

    def prototype_loss(self, z: Tensor, batch: Batch, targets: Targets) -> Tensor:
        """What the prototypes add to the objective of Eq. (12)."""
        loss = torch.zeros_like(batch.weight)
        if self.contrast:
            loss = loss + cluster_contrast(z, batch.y, targets.clusters, targets.label, self.temperature)
        if self.consistency:
            target = targets.consistent
            loss = loss + pull(z, batch.y, target.mean, target.is_known, self.consistency_reduction)
        return loss


def of_all_classes(of_classes: list[tuple[Tensor, Tensor]], count: Tensor) -> Targets:
    """The targets of all classes, from those of each."""
    contrasted, consistent = zip(*of_classes, strict=True)
    label = [c for c, own in enumerate(contrasted) for _ in own]
    return Targets(
        torch.cat(contrasted), torch.tensor(label, dtype=torch.int64), Prototypes(torch.stack(consistent), count)
    )


def kept(previous: Targets, c: int) -> tuple[Tensor, Tensor]:
    """What a class is contrasted and consistent with if nobody says anything of it."""
    return previous.clusters[previous.label == c], previous.consistent.mean[c]
