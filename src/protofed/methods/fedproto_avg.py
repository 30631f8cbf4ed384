"""FedProto with averaged weights: FedAvg whose clients also pull features to the global class prototypes.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang: FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022,
in the form that FPL (CVPR 2023) and FedSeProto (ECAI 2024) compare against.

Sends: weights, class prototypes, and which classes it has. Keeps: nothing. Server: mean of the weights by the
number of examples; unweighted mean of each class's prototypes over the clients that own it.

Departures:
1. Prototypes are averaged without weights, as all public code does; Eq. (6) of the paper weights by examples.
2. The distance of Eq. (7) is the squared error averaged over the dimensions of the feature, as in public code.
3. A client's prototypes are the running means of its last epoch by default, as in the authors' code; the paper reads as
   recomputed after training (a setting).
4. A class that no reply of a round holds keeps its prototype.
5. An example whose class has no prototype is not pulled but counts in the mean over the batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from protofed.api.method import NonNegative
from protofed.api.views import Points
from protofed.data.batches import Batch
from protofed.methods._shared.one_step import PrototypesOneStep
from protofed.methods.families import WeightsAndPrototypes
from protofed.prototypes import class_means, contrast
from protofed.prototypes.class_means import ClassSums, PrototypeMode, Prototypes


@dataclass(frozen=True)
class FedProtoAvg(PrototypesOneStep[Prototypes]):
    tags = ("global", "prototype")
    pull_weight: NonNegative = 1.0
    """λ in Eq. (7): how strongly features are pulled to the prototype of their class."""
    prototype_mode: PrototypeMode = "running"
    """Whether a client's prototypes are the running means of its last epoch or recomputed after training."""

    def no_prototypes(self, num_classes: int, dim: int) -> Prototypes:
        return class_means.no_prototypes(num_classes, dim)

    def prototype_sets(self, state: WeightsAndPrototypes[Prototypes]) -> Mapping[str, Points]:
        return {"global prototypes": class_means.points(state.prototypes)}

    def combine(self, sums: ClassSums, previous: Prototypes) -> Prototypes:
        """Global prototypes, Eq. (6) without weights."""
        return class_means.mean_of(sums, previous)

    def prototype_loss(self, z: Tensor, batch: Batch, targets: Prototypes) -> Tensor:
        """The regulariser of Eq. (7)."""
        return self.pull_weight * contrast.pull(z, batch.y, targets.mean, targets.is_known)
