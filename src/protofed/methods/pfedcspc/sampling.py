"""Several prototypes per class: K-means inside the class, and means of random samples of each cluster."""

from typing import Annotated

import torch
from torch import Tensor

from protofed.api.roles import Count, Prototype
from protofed.prototypes.finch import cluster_means
from protofed.prototypes.kmeans import kmeans_of_classes
from protofed.tree import record


@record
class Slots:
    """Room for a fixed number of prototypes of each class, of which some may be empty."""

    mean: Annotated[Tensor, Prototype()]  # (C · S, D), slots by class; zero where empty
    count: Annotated[Tensor, Count()]  # (C · S,), 1 where there is a prototype, else 0


def empty_slots(num_classes: int, per_class: int, dim: int) -> Slots:
    return Slots(torch.zeros(num_classes * per_class, dim), torch.zeros(num_classes * per_class))


def sampled_prototypes(
    z: Tensor, y: Tensor, num_classes: int, clusters: int, repeats: int, share: float, generator: torch.Generator
) -> Slots:
    """`repeats` sampled means of each of the clusters of each class, Eq. (8) and (9)."""
    cluster = y * clusters + kmeans_of_classes(z, y, clusters, generator)  # (n,), numbered over all classes, Eq. (8)
    num_clusters = num_classes * clusters
    sizes = cluster.bincount(minlength=num_clusters)
    means = [sampled_means(z, cluster, sizes, share, generator) for _ in range(repeats)]
    exists = (sizes > 0).repeat_interleave(repeats)
    mean = torch.stack(means, 1).flatten(0, 1)
    return Slots(torch.where(exists[:, None], mean, 0.0), exists.to(mean.dtype))


def sampled_means(z: Tensor, cluster: Tensor, sizes: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """The mean of a random part of each cluster, drawn without replacement, at least one of its points, Eq. (9)."""
    draws = torch.rand(len(z), dtype=torch.float64, generator=generator)
    order = (cluster + draws).argsort(stable=True)  # clusters one after another, each in random order
    rank = torch.arange(len(z)) - (sizes.cumsum(0) - sizes)[cluster[order]]  # of a point in its cluster
    wanted = (share * sizes).round().clamp(min=1)
    drawn = order[rank < wanted[cluster[order]]]
    return cluster_means(z[drawn], cluster[drawn], len(sizes)).to(z.dtype)
