"""FINCH: clustering by first neighbours, without a number of clusters to choose (Sarfraz et al., CVPR 2019)."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.nn.precision import product

BLOCK = 256
"""Points are compared in full precision with the blocks of so many that can hold their first neighbour."""
TILE = 4096
"""How many rows of a matrix of similarities are held at a time; a multiple of BLOCK."""

MOST_MEMBERS = 2**25
"""Points times clusters up to which a GPU may note for each pair whether they belong together."""


def first_neighbours(points: Tensor) -> Tensor:
    """The other point of highest cosine similarity, for each of two or more points; the first of equals, (N,)."""
    unit = F.normalize(points.double(), dim=-1, eps=1e-8)
    if len(unit) <= BLOCK:
        return nearest(unit, torch.arange(len(unit)), 0, len(unit))[1]
    best = unit.new_full((len(unit),), -torch.inf)
    neighbours = torch.zeros(len(unit), dtype=torch.int64)
    for block, is_possible in enumerate(possible_blocks(unit.float()).unbind(1)):
        rows = (is_possible & (best < 1)).nonzero().squeeze(1)  # no later block can beat a cosine of 1
        for part in torch.split(rows, TILE):
            value, neighbour = nearest(unit, part, block * BLOCK, (block + 1) * BLOCK)
            is_new = value > best[part]
            best[part[is_new]], neighbours[part[is_new]] = value[is_new], neighbour[is_new]
    return neighbours


def nearest(unit: Tensor, rows: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """The highest similarity of each of these rows (R,) to another one from `start` to `stop`, and the first that has
    it, (R,) each."""
    similarity = product(unit[rows], unit[start:stop].T)
    similarity.masked_fill_(rows[:, None] == torch.arange(start, start + similarity.shape[1]), -torch.inf)
    value, column = similarity.round(decimals=12).max(-1)  # equal points differ in the last bits of the product
    return value, start + column


def possible_blocks(unit: Tensor) -> Tensor:
    """Whether the first neighbour of each row, of length 1 or less in float32, can be in each block, (N, N / BLOCK).

    Each product is computed once, for its row and its column.
    """
    highest = unit.new_empty(len(unit), -(-len(unit) // BLOCK))
    for i in range(0, len(unit), TILE):
        for j in range(0, i + 1, TILE):
            products = product(unit[i : i + TILE], unit[j : j + TILE].T)
            if i == j:
                products.fill_diagonal_(-torch.inf)
            highest[i : i + TILE, j // BLOCK : (j + TILE) // BLOCK] = highest_of_blocks(products)
            highest[j : j + TILE, i // BLOCK : (i + TILE) // BLOCK] = highest_of_blocks(products.T)
    return highest >= highest.amax(1, keepdim=True) - 2 * product_error(unit.shape[1])


def highest_of_blocks(products: Tensor) -> Tensor:
    return torch.stack([block.amax(1) for block in torch.split(products, BLOCK, 1)], 1)


def product_error(dim: int) -> float:
    """How far a product in float32 of two rows of length 1 or less can be from the one in float64."""
    # With unit roundoff u, a sum of n products is off by at most n·u / (1 − n·u) times Σ |x_i y_i| ≤ 1, in whatever
    # order it is added up (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1). Two more roundings are
    # those of the factors to float32. The last two, 1.2e-7, are more than float64 and its 12 decimals are off by.
    rounding = (dim + 4) * 2.0**-24
    return rounding / (1 - rounding)


def linked(neighbours: Tensor) -> Tensor:
    """Labels of the components in which every point is joined to its first neighbour, (N,).

    Points that share a neighbour meet there, so no link of their own is needed.
    """
    n = len(neighbours)
    from scipy.sparse import csr_array  # slow imports that few runs need
    from scipy.sparse.csgraph import connected_components

    graph = csr_array((np.ones(n), neighbours.cpu().numpy(), np.arange(n + 1)), shape=(n, n))  # one entry in each row
    component = connected_components(graph, directed=False)[1].astype(np.int64)
    return torch.from_numpy(component).to(neighbours.device)


def cluster_means(points: Tensor, labels: Tensor, num_clusters: int = 0) -> Tensor:
    """The unweighted mean of the points of each cluster, (J, D), in float64; NaN for a cluster without points."""
    return means_and_sizes(points, labels, num_clusters)[0]


def means_and_sizes(points: Tensor, labels: Tensor, num_clusters: int = 0) -> tuple[Tensor, Tensor]:
    """These means, and how many points each cluster has, (J,)."""
    points = points.double()
    if points.is_cuda and num_clusters and num_clusters * len(labels) <= MOST_MEMBERS:
        return means_by_product(points, members(labels, num_clusters))
    sizes = labels.bincount(minlength=num_clusters)
    total = torch.zeros(len(sizes), points.shape[1], dtype=torch.float64)
    return total.index_add_(0, labels, points).div_(sizes[:, None]), sizes


def members(labels: Tensor, num_clusters: int) -> Tensor:
    """Whether each cluster has each point, (J, N)."""
    return torch.arange(num_clusters, device=labels.device)[:, None] == labels


def means_by_product(points: Tensor, has: Tensor) -> tuple[Tensor, Tensor]:
    """The same for a GPU, of points (N, D) in float64: without a sort, and the CPU need not wait."""
    count = has.double()
    sizes = count.sum(-1)
    return (count @ points).div_(sizes[:, None]), sizes


def cluster_sizes(labels: Tensor, num_clusters: int) -> Tensor:
    """How many of the labels (N,) are those of each cluster, (J,)."""
    if labels.is_cuda and num_clusters * len(labels) <= MOST_MEMBERS:
        return members(labels, num_clusters).sum(-1)  # for bincount the CPU waits for the GPU
    return labels.bincount(minlength=num_clusters)


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
