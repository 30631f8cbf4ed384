"""Class sums under differential privacy, wherever their noise comes from: what a record changes, and what is made of
them.

A record adds its feature vector to one row of the sums, and 1 to one of the counts. With R the longest vector, σ_S the
noise of the sums and σ_n that of the counts, that is one release with 1/m² = (R/σ_S)² + (1/σ_n)².
"""

from math import sqrt

import torch
from torch import Tensor, nn

from protofed.nn.networks import Networks
from protofed.privacy.noise import Query

ABSTAIN = 0.25
"""κ: a class is left out if noise is expected to move its prototype by more than κR."""


def class_queries(multiplier: float, longest: float, num_classes: int, dim: int) -> tuple[Query, Query]:
    """Of sums (C, D) and of counts (C,): a = √d / (1 + √d) of 1/m² is for the sums."""
    share = sqrt(dim) / (1 + sqrt(dim))
    sums = Query(num_classes * dim, longest, multiplier / sqrt(share))
    return sums, Query(num_classes, 1.0, multiplier / sqrt(1 - share), is_whole=True)


def whole_sums(z: Tensor, y: Tensor, sums: Query, counts: Query) -> tuple[Tensor, Tensor]:
    """Σ of the clipped features of each class (C, D), and how many there are (C,), both in grids of their queries and
    exact, in float64."""
    num_classes, dim = counts.size, z.shape[1]
    zero = torch.zeros(num_classes, dim, dtype=torch.float64, device=z.device)
    ones = counts.clipped(torch.ones(len(y), 1, device=z.device))[:, 0]
    total = zero.index_add(0, y, sums.clipped(z).double())
    return total, zero.new_zeros(num_classes).index_add(0, y, ones.double())


def means_of(total: Tensor, mass: Tensor, query: Query, is_positive: bool, times: float = 1.0) -> tuple[Tensor, Tensor]:
    """Class means made of noised sums (C, D) and counts (C,), and which classes are known (C,); the others are zero.
    `query` is that of the sums, and their noise so many times as wide."""
    spread = times * query.multiplier * query.most * sqrt(total.shape[1])  # how long the noise of a row is
    is_known = mass * ABSTAIN * query.most >= spread  # guard: abstain-where-noise-is-long
    mean = total / mass.clamp(min=1)[:, None]
    mean = mean.clamp(min=0) if is_positive else mean
    mean = mean * (query.most / mean.norm(dim=1, keepdim=True).clamp(min=1e-12)).clamp(max=1)
    return torch.where(is_known[:, None], mean, 0.0), is_known


def ends_in_relu(networks: Networks) -> bool:
    """Whether features cannot be negative."""
    return isinstance([*networks.modules("features")][-1], nn.ReLU)
