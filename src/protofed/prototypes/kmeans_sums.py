"""K-means whose points stay at clients: a server is given sums over clients and no point.

Each client has one point of each of B kinds, such as its prototype of each class. Several partitions of each kind are
made side by side, from several starts. In a step of Lloyd's the server sends the centres, and each client adds each of
its points to the sum of the nearest one: one-hot sums. The server moves the centres to the means.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from protofed.seeds import generator
from protofed.tree import record

AS_TIGHT = 1e-9
"""Partitions whose spreads differ by less, relatively, are one, with its clusters in other orders."""


@record
class ClusterSums:
    """What a client adds, and the sum over clients, of S partitions into J clusters of points of B kinds."""

    total: Tensor  # (S, J, B, D)
    count: Tensor  # (S, J, B)


@record
class Clustered:
    """The best partition of each kind."""

    centres: Tensor  # (J, B, D), float64
    count: Tensor  # (J, B), the points of each cluster; 0 for a centre that no point is nearest to


def memberships(points: Tensor, centres: Tensor) -> Tensor:
    """1 at the nearest of the centres (S, J, B, D) of the kind for each point (B, D), in every partition, (S, J, B)."""
    nearest = (centres.double() - points.double()).square().sum(-1).argmin(1)  # (S, B)
    clusters = torch.arange(centres.shape[1], device=centres.device)
    return (clusters[:, None] == nearest[:, None]).to(points.dtype)


def added(points: Tensor, is_known: Tensor, member: Tensor) -> ClusterSums:
    """What a client adds, which has some of the points (B, D) only, and whose clusters (S, J, B) are these."""
    count = member * is_known
    return ClusterSums(count[..., None] * points, count)


def first_centres(mean: Tensor, num_clusters: int, starts: int, draws: torch.Generator) -> Tensor:
    """Where the centres start, public draws: one step from the mean (B, D) in any direction, (S, J, B, D), float64. How
    long the step is does not matter: a point is nearest to the centre in whose direction it lies farthest."""
    directions = torch.randn(starts, num_clusters, *mean.shape, generator=draws, dtype=torch.float64)
    centres: Tensor = mean.double() + directions / directions.norm(dim=-1, keepdim=True)
    return centres


def projection(seed: int, size: int, dims: int) -> Tensor:
    """Random directions, which everybody can draw, (dims, P), float64: their products with points (P,) nearly keep the
    distances (Johnson, Lindenstrauss 1984)."""
    axes: Tensor = torch.randn(dims, size, generator=generator(seed, "projection"), dtype=torch.float64) / dims**0.5
    return axes


def moved(centres: Tensor, sums: ClusterSums) -> Tensor:
    """The means of the clusters; a centre that no point is nearest to stays."""
    means = sums.total.double() / sums.count.double().clamp(min=1)[..., None]
    return torch.where(sums.count[..., None] > 0, means, centres)


def tightest(centres: Tensor, sums: ClusterSums) -> Clustered:
    """Of each kind the partition whose points are nearest to their means: the one whose means are farthest from the
    mean of all, since both together are the same for all partitions. Of starts that find one partition the first is
    taken: rounding must not choose between them, since it differs between devices."""
    count = sums.count.double()
    everything = (sums.total.double().sum(1) / count.sum(1).clamp(min=1)[..., None])[:, None]  # (S, 1, B, D)
    means = moved(centres, sums)
    between = (count * (means - everything).square().sum(-1)).sum(1)  # (S, B)
    best = (between >= (1 - AS_TIGHT) * between.amax(0)).byte().argmax(0)  # (B,), the first
    kinds = torch.arange(len(best), device=best.device)
    return Clustered(means[best, :, kinds].movedim(0, 1), count[best, :, kinds].movedim(0, 1))


def lloyd(exchange: Callable[[Tensor], ClusterSums], centres: Tensor, steps: int) -> Clustered:
    """So many steps from these centres, each of which is an exchange with the clients."""
    for _ in range(steps - 1):
        centres = moved(centres, exchange(centres))
    return tightest(centres, exchange(centres))
