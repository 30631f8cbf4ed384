"""K-means on principal components, with the number of clusters given or chosen by silhouette.

The iteration is our own: a cluster is never empty, also where points coincide, every draw is the server's, and no
thread changes a bit. (scikit-learn's warns and returns fewer clusters where there are fewer distinct points.)
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from protofed.prototypes.finch import cluster_means
from protofed.tree import record

NOTHING = 1e-10
"""A spread so small beside the largest is rounding."""
RESTARTS = 10
MAX_STEPS = 300
"""Moves of the centres in one restart; few are ever needed."""
CANDIDATES = range(2, 11)
"""Numbers of clusters that are tried where none is given."""


@record
class Partition:
    """What says to which cluster a point belongs, also one that comes later."""

    origin: Tensor  # (P,), the mean of the points, float64
    axes: Tensor  # (K, P), their principal directions, float64
    centres: Tensor  # (J, K), float64

    def nearest(self, points: Tensor) -> Tensor:
        """The cluster of each point (N, P), (N,)."""
        return squared_distances((points.double() - self.origin) @ self.axes.T, self.centres).argmin(-1)


def no_partition(dim: int) -> Partition:
    """One cluster of everything, for points (N, P)."""
    zeros = torch.zeros(1, dim, dtype=torch.float64)
    return Partition(zeros[0], zeros.clone(), zeros.new_zeros(1, 1))


def partitioned(points: Tensor, num_clusters: int, dims: int, generator: torch.Generator) -> tuple[Partition, Tensor]:
    """A partition of the points (N, P) and their clusters (N,).

    Fewer points than clusters give as many clusters as points, and 0 the number with the best silhouette.
    """
    origin, axes = principal_axes(points, dims)
    projected = (points.double() - origin) @ axes.T  # (N, K)
    if not num_clusters:
        scores = silhouettes(projected, CANDIDATES, generator)
        num_clusters = max(scores, key=lambda j: scores[j], default=1)
    labels = kmeans(projected, min(num_clusters, len(points)), generator)
    return Partition(origin, axes, cluster_means(projected, labels)), labels


def principal_axes(points: Tensor, dims: int) -> tuple[Tensor, Tensor]:
    """The mean of the points (N, P) and the directions of largest variance, at most N or P of them, (P,) and (K, P)."""
    origin = points.double().mean(0)
    _, spread, directions = torch.linalg.svd(points.double() - origin, full_matrices=False)
    directions, spread = directions[:dims], spread[:dims, None]
    # Each is as good as its opposite: the one is taken whose largest component is positive. Where nothing varies, any
    # direction would do: there is none.
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    return origin, directions * largest.sign() * (spread > NOTHING * spread[:1])


def silhouettes(points: Tensor, candidates: Iterable[int], generator: torch.Generator) -> dict[int, float]:
    """How well k-means with each number of clusters separates the points, −1 to 1; more is better.

    Numbers for which there is no silhouette, below 2 or not below the number of points, are left out.
    """
    from sklearn.metrics import silhouette_score  # a slow import that few runs need

    scores = {}
    for count in candidates:
        if 2 <= count < len(points):
            labels = kmeans(points, count, generator)
            scores[count] = float(silhouette_score(points.double().cpu().numpy(), labels.cpu().numpy()))
    return scores


def kmeans(points: Tensor, num_clusters: int, generator: torch.Generator, restarts: int = RESTARTS) -> Tensor:
    """The cluster of each of `num_clusters` or more points (N, K), in the tightest partition of all restarts, (N,).

    Clusters are numbered by their first points: restarts that find one partition give it the same numbers.
    """
    if not 1 <= num_clusters <= len(points):
        raise ValueError(f"{len(points)} points cannot form {num_clusters} clusters")
    points = points.double()
    partitions = [_converged(points, _spread(points, num_clusters, generator)) for _ in range(restarts)]
    return _numbered(min(partitions, key=lambda labels: within(points, labels)))


def _numbered(labels: Tensor) -> Tensor:
    numbers: dict[int, int] = {}
    return torch.tensor([numbers.setdefault(label, len(numbers)) for label in labels.tolist()], device=labels.device)


def within(points: Tensor, labels: Tensor) -> float:
    """Σ of the squared distances to the mean of the own cluster, which k-means makes small."""
    return float((points.double() - cluster_means(points, labels)[labels]).square().sum())


def squared_distances(points: Tensor, centres: Tensor) -> Tensor:
    """From each point to each centre, (N, J); by differences, since products cancel where points are close."""
    return (points[:, None] - centres).square().sum(-1)


def _spread(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """First centres by k-means++: each is drawn by its squared distance to those before it, (J, K)."""
    chosen = torch.randint(len(points), (1,), generator=generator)
    while len(chosen) < count:
        gaps = squared_distances(points, points[chosen]).min(-1).values
        weights = gaps if gaps.sum() > 0 else torch.ones_like(gaps)
        chosen = torch.cat([chosen, torch.multinomial(weights, 1, generator=generator)])
    return points[chosen]


def _converged(points: Tensor, centres: Tensor) -> Tensor:
    """The clusters (N,) that no further move of the centres changes."""
    labels = assigned(points, centres)
    for _ in range(MAX_STEPS):
        moved = assigned(points, cluster_means(points, labels))
        if torch.equal(moved, labels):
            break
        labels = moved
    return labels


def assigned(points: Tensor, centres: Tensor) -> Tensor:
    """The nearest centre of each point, (N,); a centre that is nearest to none takes the point farthest from its own,
    out of the clusters that can spare one."""
    gaps, labels = squared_distances(points, centres).min(-1)
    for empty in range(len(centres)):
        sizes = labels.bincount(minlength=len(centres))
        if not sizes[empty]:
            labels[torch.where(sizes[labels] > 1, gaps, -1.0).argmax()] = empty
    return labels
