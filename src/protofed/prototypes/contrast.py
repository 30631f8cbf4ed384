"""Losses between features and prototypes, per example, (B,): no exp that can overflow, no gradient into prototypes."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.nn.precision import product

EPS = 1e-8
ABSENT = -1e9
"""The logit of a prototype that is not there: finite, so that gradients are; far below any real one."""


def cluster_contrast(z: Tensor, y: Tensor, means: Tensor, label: Tensor, temperature: float) -> Tensor:
    """−log of the share of the own class's prototypes among all, of which a class may have several, (M, D).

    `label` (M,) is the class of each prototype, −1 where there is none. Zero for an example whose class has none.
    """
    unit = F.normalize(z.float(), dim=-1, eps=EPS)
    targets = F.normalize(means.detach().float(), dim=-1, eps=EPS)
    logits = torch.where(label >= 0, product(unit, targets.T) / temperature, ABSENT)  # (B, M)
    is_own = y[:, None] == label
    own = torch.where(is_own, logits, ABSENT)
    return torch.where(is_own.any(-1), logits.logsumexp(-1) - own.logsumexp(-1), 0.0)


def pull(z: Tensor, y: Tensor, means: Tensor, is_known: Tensor, reduction: Literal["mean", "sum"] = "mean") -> Tensor:
    """The squared distance to the prototype of the own class, its mean or sum over the dimensions of the feature.

    Zero for an example whose class has no prototype.
    """
    squares = (z - means.detach()[y]).square()
    return (squares.mean(-1) if reduction == "mean" else squares.sum(-1)) * is_known[y]


def nearest(z: Tensor, means: Tensor, is_known: Tensor) -> Tensor:
    """Scores by which the nearest prototype wins, (B, C); a class without one never does."""
    distance = (z[:, None, :] - means).square().mean(-1)
    return torch.where(is_known, -distance, -torch.inf)
