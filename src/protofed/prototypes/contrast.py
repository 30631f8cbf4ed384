"""Losses between features and prototypes, per example, (B,): no exp that can overflow, no gradient into prototypes."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-8
ABSENT = -1e9
"""The logit of a prototype that is not there: finite, so that gradients are; far below any real one."""


def cluster_contrast(z: Tensor, y: Tensor, clusters: Tensor, is_cluster: Tensor, temperature: float) -> Tensor:
    """−log of the share of the own class among all prototypes, of which a class may have several, (C, J, D).

    Zero for an example whose class has no prototype.
    """
    num_classes, num_clusters, _ = clusters.shape
    unit = F.normalize(z.float(), dim=-1, eps=EPS)
    targets = F.normalize(clusters.detach().float(), dim=-1, eps=EPS).flatten(0, 1)  # (C·J, D)
    logits = (unit @ targets.T / temperature).view(-1, num_classes, num_clusters)  # (B, C, J)
    logits = torch.where(is_cluster, logits, ABSENT)
    by_class = logits.logsumexp(-1)  # (B, C)
    own = by_class.gather(-1, y[:, None])[:, 0]
    return torch.where(is_cluster.any(-1)[y], by_class.logsumexp(-1) - own, 0.0)


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
