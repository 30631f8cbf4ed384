"""Losses that hold a batch of features to the shape of the prototypes: points, angles and distances.

All leave out rows of weight 0 and classes without a prototype, and give no gradient to prototypes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.prototypes.class_means import Prototypes
from protofed.prototypes.contrast import cluster_contrast

APART = 1e-6
"""Two points nearer than this have no direction between them."""


def node_loss(z: Tensor, y: Tensor, prototypes: Prototypes, temperature: float) -> Tensor:
    """−log of the share of the own prototype in the similarities to all, per example, (B,), Eq. (5)."""
    classes = torch.arange(len(prototypes.count), device=y.device)
    label = torch.where(prototypes.is_known, classes, -1)
    return cluster_contrast(z, y, prototypes.mean, label, temperature)


def angle_loss(z: Tensor, y: Tensor, weight: Tensor, prototypes: Prototypes) -> Tensor:
    """How much angles between three examples of different classes differ from their prototypes', mean, (), Eq. (6)."""
    towards, apart = _directions(z)  # (B, B, D), (B, B)
    expected, expected_apart = _directions(prototypes.mean.detach()[y])
    pair = _counted_pairs(y, weight, prototypes) * apart * expected_apart  # (B, B)
    triple = pair[:, :, None] * pair[:, None, :] * (y[:, None] != y)  # (B, B, B), the corner of the angle first
    cosines, expected_cosines = towards @ towards.mT, expected @ expected.mT  # (B, B, B), cosines
    return _mean((cosines - expected_cosines).abs(), triple)


def edge_loss(z: Tensor, y: Tensor, weight: Tensor, prototypes: Prototypes) -> Tensor:
    """How much distances between examples of different classes differ from their prototypes', mean, (), Eq. (7).

    Both kinds of distances are relative to their mean, and the difference is a smooth L1.
    """
    pair = _counted_pairs(y, weight, prototypes)
    distances, expected = _distances(z), _distances(prototypes.mean.detach()[y])  # (B, B)
    distances = distances / _mean(distances, pair).clamp(min=APART)
    expected = expected / _mean(expected, pair).clamp(min=APART)
    return _mean(F.smooth_l1_loss(distances, expected, reduction="none"), pair)


def _counted_pairs(y: Tensor, weight: Tensor, prototypes: Prototypes) -> Tensor:
    """1 for two rows of different classes that both count and whose classes have prototypes, else 0, (B, B)."""
    counts = (weight > 0) & prototypes.is_known[y]
    return (counts[:, None] & counts & (y[:, None] != y)).to(weight.dtype)


def _distances(points: Tensor) -> Tensor:
    """Between all pairs, (B, B); the gradient of this norm at 0 is 0, unlike a square root's."""
    distance: Tensor = torch.linalg.vector_norm(points[:, None] - points, dim=-1)
    return distance


def _directions(points: Tensor) -> tuple[Tensor, Tensor]:
    """Entry [i, j] is the unit vector from point i to point j, (B, B, D), and whether there is one, (B, B)."""
    difference = points - points[:, None]
    distance = torch.linalg.vector_norm(difference, dim=-1)
    apart = distance > APART
    length = torch.where(apart, distance, 1.0)  # a division by next to nothing would make gradients explode
    return difference * (apart / length)[..., None], apart


def _mean(values: Tensor, weight: Tensor) -> Tensor:
    return (values * weight).sum() / weight.sum().clamp(min=1)
