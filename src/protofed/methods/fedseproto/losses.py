"""The terms of FedSeProto's objective."""

import torch.nn.functional as F
from torch import Tensor

from protofed.data.batches import Batch
from protofed.prototypes import class_means
from protofed.prototypes.class_means import Prototypes
from protofed.prototypes.contrast import pull


def shared_information(semantic: Tensor, domain: Tensor, x: Tensor, rebuilt: Tensor) -> Tensor:
    """A bound of the mutual information of semantic and domain features, per example, (B,), Eq. (10)."""
    lengths = semantic.square().mean(-1) / 2 + domain.square().mean(-1) / 2
    return lengths + (x - rebuilt).square().flatten(1).mean(-1)


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """s₁ or s₂ of Eq. (11): KL(teacher ‖ student) of two (B, C) of logits, per example; no gradient to the teacher."""
    target = teacher.detach().log_softmax(-1)
    return F.kl_div(student.log_softmax(-1), target, reduction="none", log_target=True).sum(-1)


def preference(kept: Tensor, lost: Tensor) -> Tensor:
    """Small where the first divergence is below the second, Eq. (11) with its sign turned."""
    return F.softplus(kept - lost)


def balanced_pull(z: Tensor, batch: Batch, prototypes: Prototypes) -> Tensor:
    """The squared distance to the own class's prototype, every class of the batch counting alike, Eq. (13)."""
    distance = pull(z, batch.y, prototypes.mean, prototypes.is_known)  # (B,)
    of_class = class_means.class_sums(distance[:, None], batch.y, batch.weight, len(prototypes.count)).prototypes()
    counts = of_class.is_known & prototypes.is_known  # (C,)
    return (of_class.mean[:, 0] * counts).sum() / counts.sum().clamp(min=1)
