"""K-means on principal components, with the number of clusters given or chosen by silhouette.

The iteration is our own: a cluster is never empty, also where points coincide, every draw is the server's, and no
thread changes a bit. (scikit-learn's warns and returns fewer clusters where there are fewer distinct points.)
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from protofed.prototypes.finch import cluster_means, cluster_sizes, means_and_sizes
from protofed.tree import record

NOTHING = 1e-10
"""A spread so small beside the largest is rounding."""
NEGLIGIBLE = 1e-300
"""The weight of a point that is a centre already: it is drawn only where no other is left."""
RESTARTS = 10
MAX_STEPS = 300
"""Moves of the centres in one restart; few are ever needed."""
MOVES_TOGETHER = 8
"""Moves of the centres before a GPU is asked whether they still change anything."""
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


def kmeans_of_classes(points: Tensor, y: Tensor, num_clusters: int, generator: torch.Generator) -> Tensor:
    """K-means inside each class, all classes at once: the cluster of each point (N, K) in its class, (N,). A class of
    fewer points than clusters has as many clusters as points."""
    points, num_classes = points.double(), int(y.max()) + 1
    sizes = y.bincount(minlength=num_classes)
    there = torch.arange(num_clusters) < sizes[:, None]  # (C, J), whether a class has a cluster of this number
    labels = _assigned_in_class(points, y, points[_spread_in_classes(points, y, num_clusters, generator)], there)
    together = MOVES_TOGETHER if points.is_cuda else 1
    for done in range(0, MAX_STEPS, together):
        labels, is_settled = _moved_in_class(points, y, labels, there, min(together, MAX_STEPS - done))
        if is_settled:
            break
    return labels


def _moved_in_class(points: Tensor, y: Tensor, labels: Tensor, there: Tensor, moves: int) -> tuple[Tensor, bool]:
    """The clusters after some moves of the centres, and whether the last move changed nothing: then no other will. A
    GPU is asked once for all moves whether it did, and whether a cluster lost its last point on the way. If one did,
    the moves are done again, one by one, with care for that."""
    first, seen = labels, []
    is_there, offset, (num_classes, num_clusters) = there[y], y * there.shape[1], there.shape
    for _ in range(moves):
        before = labels
        means, sizes = means_and_sizes(points, offset + labels, there.numel())
        labels = _nearest_in_class(points, y, means.view(num_classes, num_clusters, -1), is_there)
        seen.append(sizes)
    seen.append(cluster_sizes(offset + labels, there.numel()))
    is_lost = there.flatten() & (torch.stack(seen).amin(0) == 0)
    lost, changed = torch.stack([is_lost.any(), (labels != before).any()]).tolist()
    if not lost:
        return labels, not changed
    labels = first
    for _ in range(moves):
        before = labels
        means = cluster_means(points, offset + labels, there.numel())
        labels = _assigned_in_class(points, y, means.view(num_classes, num_clusters, -1), there)
    return labels, torch.equal(labels, before)


def _spread_in_classes(points: Tensor, y: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """First centres of each class by k-means++, as rows of the points, (C, J). The race that a point wins with
    probability proportional to its weight w is that of w / e, where e is drawn from an exponential distribution."""
    classes = torch.arange(int(y.max()) + 1)
    chosen: list[Tensor] = []
    gaps = torch.ones(len(points), dtype=torch.float64)
    while len(chosen) < count:
        draws = torch.rand(len(points), dtype=torch.float64, generator=generator)
        speed = (gaps + NEGLIGIBLE) / -torch.log1p(-draws)
        winners = torch.where(y == classes[:, None], speed, -1.0).argmax(-1)  # (C,)
        chosen.append(winners)
        gap = (points - points[winners[y]]).square().sum(-1)
        gaps = gap if len(chosen) == 1 else torch.minimum(gaps, gap)
    return torch.stack(chosen, -1)


def _assigned_in_class(points: Tensor, y: Tensor, centres: Tensor, there: Tensor) -> Tensor:
    """The nearest of the centres (C, J, K) of its class for each point, (N,); none of them is left without a point."""
    labels = _nearest_in_class(points, y, centres, there[y])
    sizes = cluster_sizes(y * there.shape[1] + labels, there.numel()).view_as(there)
    for c in (there & (sizes == 0)).any(-1).nonzero().flatten().tolist():
        labels[y == c] = assigned(points[y == c], centres[c, there[c]])
    return labels


def _nearest_in_class(points: Tensor, y: Tensor, centres: Tensor, is_there: Tensor) -> Tensor:
    """The same by distance alone; is_there (N, J) says which clusters the class of a point has."""
    squares = (points[:, None] - centres[y]).square().sum(-1)
    return torch.where(is_there, squares, torch.inf).argmin(-1)


def assigned(points: Tensor, centres: Tensor) -> Tensor:
    """The nearest centre of each point, (N,); a centre that is nearest to none takes the point farthest from its own,
    out of the clusters that can spare one."""
    gaps, labels = squared_distances(points, centres).min(-1)
    for empty in range(len(centres)):
        sizes = labels.bincount(minlength=len(centres))
        if not sizes[empty]:
            labels[torch.where(sizes[labels] > 1, gaps, -1.0).argmax()] = empty
    return labels
