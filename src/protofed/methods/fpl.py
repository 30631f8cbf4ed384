"""FPL: clients learn against prototypes that the server clustered, and that speak for every domain equally.

Huang, Ye, Shi, Li, Du: Rethinking Federated Learning with Domain Shift: A Prototype View, CVPR 2023.

Sends: weights, class prototypes, and which classes it has. Keeps: nothing. Server: mean of the weights by the number of
examples; for each class FINCH clusters the clients' prototypes, the clusters' means are the cluster prototypes, and the
mean of these is the unbiased prototype.

Departures:
1. FINCH's coarsest partition is the default, as in the authors' code; Eq. (4) describes the first one (a setting).
2. The squared error of Eq. (10) is averaged over the dimensions of the feature by default, as in the authors' code; the
   paper prints the sum (a setting).
3. A client's prototypes are the running means of its last epoch by default, as in the authors' code; Eq. (2) reads as
   recomputed after training (a setting).
4. Eq. (3) divides by the number of clients; the mean here is over the clients that own the class.
5. A class that no reply of a round holds keeps its prototypes.
6. Eq. (8) is computed with logsumexp, so that small temperatures (0.01) train.
7. An example whose class has no prototype adds nothing to Eq. (8) and (10) but counts in the mean over the batch, as in
   the authors' code.
8. Cosines are divided by τ, as in the authors' code; as Eq. (7) is printed, they would be multiplied by it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from protofed import tree
from protofed.api.contexts import ServerContext
from protofed.api.method import Positive, Uploads
from protofed.api.views import Points
from protofed.data.batches import Batch
from protofed.methods.families import PrototypeSharing, PrototypeUpload, WeightsAndPrototypes
from protofed.prototypes import class_means
from protofed.prototypes.class_means import ClassSums, PrototypeMode, Prototypes
from protofed.prototypes.contrast import cluster_contrast, pull
from protofed.prototypes.finch import cluster_means, finch
from protofed.tree import Mean, Ragged, record


@record
class Targets:
    """What clients learn against."""

    clusters: Annotated[Tensor, Ragged(fill=0)]  # (M, D), the prototypes of the contrast, M = Σ J_c
    label: Annotated[Tensor, Ragged(fill=-1)]  # (M,), their classes; −1 where there is none
    consistent: Prototypes  # the prototype of the consistency for each class


@dataclass(frozen=True)
class FPL(PrototypeSharing[Targets]):
    tags = ("core", "global", "prototype", "server-side")
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
    finch_level: Literal["last", "first"] = "last"
    """FINCH's coarsest partition (of more than one cluster), or its first."""
    prototype_mode: PrototypeMode = "running"
    """Whether a client's prototypes are the running means of its last epoch or recomputed after training."""

    def no_prototypes(self, num_classes: int, dim: int) -> Targets:
        empty = class_means.no_prototypes(num_classes, dim)
        return Targets(torch.zeros(1, dim), torch.tensor([-1]), empty)

    @property
    def sums(self) -> bool:
        """Clusters are made of single clients' prototypes; global prototypes are means over clients."""
        return self.contrast_with == self.consistent_with == "global"

    def aggregate(
        self, state: WeightsAndPrototypes[Targets], uploads: Uploads[PrototypeUpload], server: ServerContext
    ) -> WeightsAndPrototypes[Targets]:
        if self.sums:
            return super().aggregate(state, uploads, server)
        mean, sent = Mean(), []
        for _, upload in uploads:
            mean.add(upload.params, self.weight_of(upload.num_examples))
            sent.append(upload.prototypes)
        return WeightsAndPrototypes(mean.value(), self.clustered(sent, state.prototypes))

    def combine(self, sums: ClassSums, previous: Targets) -> Targets:
        """The global prototypes of every class, Eq. (3), in the place of all others."""
        plain = class_means.mean_of(sums, previous.consistent)
        known = class_means.points(plain)
        return Targets(known.values, known.label, plain)

    def clustered(self, prototypes: list[Prototypes], previous: Targets) -> Targets:
        """The prototypes of every class, Eq. (3) to (6)."""
        device = previous.label.device
        with torch.device("cpu"):  # a few prototypes are quicker there than the launches that a GPU would take
            found = self._clustered(tree.map(Tensor.cpu, prototypes), tree.map(Tensor.cpu, previous))
        return tree.map(lambda leaf: leaf.to(device), found)

    def _clustered(self, prototypes: list[Prototypes], previous: Targets) -> Targets:
        clusters, label, consistent = [], [], previous.consistent.mean.clone()
        means = torch.stack([p.mean for p in prototypes])  # (K, C, D)
        is_known = torch.stack([p.is_known for p in prototypes])  # (K, C)
        owners = is_known.sum(0)
        for c in range(len(owners)):
            if owners[c]:
                contrasted, consistent[c] = self.of_class(means[is_known[:, c], c])
            else:
                contrasted = previous.clusters[previous.label == c]
            clusters.append(contrasted)
            label += [c] * len(contrasted)
        count = torch.where(owners > 0, owners, previous.consistent.count)
        return Targets(torch.cat(clusters), torch.tensor(label, dtype=torch.int64), Prototypes(consistent, count))

    def of_class(self, prototypes: Tensor) -> tuple[Tensor, Tensor]:
        """What one class's client prototypes (N, D) are made into: contrasted (J, D) and consistent (D,)."""
        partition = finch(prototypes)[-1 if self.finch_level == "last" else 0]
        clusters = cluster_means(prototypes, partition)  # Eq. (4) and (5)
        plain = prototypes.double().mean(0)  # Eq. (3)
        contrasted = clusters if self.contrast_with == "clusters" else plain[None]
        consistent = clusters.mean(0) if self.consistent_with == "unbiased" else plain  # Eq. (6)
        return contrasted.to(prototypes.dtype), consistent.to(prototypes.dtype)

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
