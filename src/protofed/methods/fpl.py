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

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from protofed import tree
from protofed.api.contexts import ServerContext
from protofed.api.method import Uploads
from protofed.methods._shared.one_step import PrototypesOneStep
from protofed.methods._shared.targets import AgainstClusters, Targets, kept, of_all_classes
from protofed.methods.families import PrototypeUpload, WeightsAndPrototypes
from protofed.prototypes.class_means import Prototypes
from protofed.prototypes.finch import cluster_means, finch
from protofed.tree import Mean


@dataclass(frozen=True)
class FPL(AgainstClusters, PrototypesOneStep[Targets]):
    tags = ("core", "global", "prototype", "server-side")
    finch_level: Literal["last", "first"] = "last"
    """FINCH's coarsest partition (of more than one cluster), or its first."""

    @property
    def sums(self) -> bool:
        """Clusters are made of single clients' prototypes; global prototypes are means over clients."""
        return self.is_global  # guard: sum-form-is-true

    def not_in_sums(self) -> str:
        return "" if self.is_global else 'clusters prototypes: set contrast_with and consistent_with to "global"'

    def aggregate(
        self, state: WeightsAndPrototypes[Targets], uploads: Uploads[PrototypeUpload], server: ServerContext
    ) -> WeightsAndPrototypes[Targets]:
        if self.is_global:
            return super().aggregate(state, uploads, server)
        mean, sent = Mean(), []
        for _, upload in uploads:
            mean.add(upload.params, self.weight_of(upload.num_examples))
            sent.append(upload.prototypes)
        return WeightsAndPrototypes(mean.value(), self.clustered(sent, state.prototypes))

    def clustered(self, prototypes: list[Prototypes], previous: Targets) -> Targets:
        """The prototypes of every class, Eq. (3) to (6)."""
        device = previous.label.device
        with torch.device("cpu"):  # a few prototypes are quicker there than the launches that a GPU would take
            found = self._clustered(tree.map(Tensor.cpu, prototypes), tree.map(Tensor.cpu, previous))
        return tree.map(lambda leaf: leaf.to(device), found)

    def _clustered(self, prototypes: list[Prototypes], previous: Targets) -> Targets:
        means = torch.stack([p.mean for p in prototypes])  # (K, C, D)
        is_known = torch.stack([p.is_known for p in prototypes])  # (K, C)
        owners = is_known.sum(0)
        of_classes = [
            self.of_class(means[is_known[:, c], c]) if owners[c] else kept(previous, c) for c in range(len(owners))
        ]
        return of_all_classes(of_classes, torch.where(owners > 0, owners, previous.consistent.count))

    def of_class(self, prototypes: Tensor) -> tuple[Tensor, Tensor]:
        """What one class's client prototypes (N, D) are made into: contrasted (J, D) and consistent (D,)."""
        partition = finch(prototypes)[-1 if self.finch_level == "last" else 0]
        clusters = cluster_means(prototypes, partition)  # Eq. (4) and (5)
        plain = prototypes.double().mean(0)  # Eq. (3)
        contrasted, consistent = self.of_clusters(clusters, plain)
        return contrasted.to(prototypes.dtype), consistent.to(prototypes.dtype)
