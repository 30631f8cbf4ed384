"""FINCH: clustering by first neighbours, without a number of clusters to choose (Sarfraz et al., CVPR 2019)."""

import numpy as np
import torch
import torch.nn.functional as F
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

ROWS = 1024
"""How many rows of the similarity matrix are held at a time."""


def first_neighbours(points: Tensor) -> Tensor:
    """The other point of highest cosine similarity, for each of two or more points; the first of equals, (N,)."""
    unit = F.normalize(points.double(), dim=-1, eps=1e-8)
    found = []
    for start in range(0, len(unit), ROWS):
        similarity = unit[start : start + ROWS] @ unit.T
        own = torch.arange(len(similarity))
        similarity[own, start + own] = -torch.inf
        found.append(similarity.round(decimals=12).argmax(-1))  # equal points differ in the last bits of the product
    return torch.cat(found)


def linked(neighbours: Tensor) -> Tensor:
    """Labels of the components in which every point is joined to its first neighbour, (N,).

    Points that share a neighbour meet there, so no link of their own is needed.
    """
    n = len(neighbours)
    graph = csr_array((np.ones(n), (np.arange(n), neighbours.numpy())), shape=(n, n))
    return torch.from_numpy(connected_components(graph, directed=False)[1].astype(np.int64))


def cluster_means(points: Tensor, labels: Tensor) -> Tensor:
    """The unweighted mean of the points of each cluster, (J, D), in float64."""
    count = int(labels.max()) + 1
    member = (labels == torch.arange(count)[:, None]).double()  # (J, N)
    return member @ points.double() / member.sum(-1, keepdim=True)


def finch(points: Tensor) -> list[Tensor]:
    """Partitions of the points from fine to coarse, each as labels (N,).

    Each level joins the clusters of the one before by their means. One cluster of everything says nothing and is left
    out, unless it is the first partition.
    """
    if len(points) == 1:
        return [torch.zeros(1, dtype=torch.int64)]
    partitions = [linked(first_neighbours(points))]
    while partitions[-1].max() > 0:
        coarser = linked(first_neighbours(cluster_means(points, partitions[-1])))
        partitions.append(coarser[partitions[-1]])
    return partitions[:-1] if len(partitions) > 1 else partitions
