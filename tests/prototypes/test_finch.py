"""FINCH against its definition, written as slowly and plainly as possible."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from protofed.prototypes import finch as finch_module
from protofed.prototypes.finch import (
    cluster_means,
    cluster_sizes,
    finch,
    first_neighbours,
    linked,
    means_by_product,
    members,
    product_error,
)

Points = NDArray[np.float64]
Partition = set[frozenset[int]]


def cases(count: int = 200) -> Iterator[Tensor]:
    """Clouds of 1 to 60 points, some in clumps, in 2 to 9 dimensions."""
    random = np.random.default_rng(0)
    for case in range(count):
        n, dim = 1 + case % 60, int(random.integers(2, 10))
        clumps = random.standard_normal((int(random.integers(1, 9)), dim))
        noise = random.choice([0.05, 0.5, 3.0])
        points = clumps[random.integers(0, len(clumps), n)] + noise * random.standard_normal((n, dim))
        yield torch.from_numpy(points.astype(np.float32))


def partition(labels: Tensor) -> Partition:
    return {frozenset((labels == label).nonzero()[:, 0].tolist()) for label in labels.unique()}


def slow_neighbours(points: Points) -> list[int]:
    """v_m: the other point of highest cosine similarity."""
    found = []
    for m, p in enumerate(points):
        cosines = [-np.inf if n == m else p @ q / np.linalg.norm(p) / np.linalg.norm(q) for n, q in enumerate(points)]
        found.append(int(np.argmax(cosines)))
    return found


def slow_components(points: Points) -> NDArray[np.int64]:
    """Components of the whole adjacency of Eq. (4) of the FPL paper, shared neighbours included."""
    v, n = slow_neighbours(points), len(points)
    adjacency = [[n_ == v[m] or m == v[n_] or v[m] == v[n_] for n_ in range(n)] for m in range(n)]
    labels: NDArray[np.int64] = connected_components(np.array(adjacency), directed=False)[1]
    return labels


def slow_finch(points: Points) -> list[Partition]:
    """Joins clusters by the means of their original points until one is left, which only counts if it comes first."""
    if len(points) == 1:
        return [{frozenset([0])}]
    clusters = [[i] for i in range(len(points))]
    levels: list[list[list[int]]] = []
    while len(clusters) > 1:
        means = np.stack([np.mean([points[i] for i in cluster], axis=0) for cluster in clusters])
        joined: dict[int, list[int]] = {}
        for cluster, label in zip(clusters, slow_components(means), strict=True):
            joined.setdefault(int(label), []).extend(cluster)
        clusters = list(joined.values())
        levels.append(clusters)
    if len(levels) > 1:
        levels.pop()
    return [{frozenset(cluster) for cluster in level} for level in levels]


def plain_neighbours(points: Tensor) -> Tensor:
    """The rule for ties on the whole matrix, in float64: cosines equal to 12 decimals are equal, the first counts."""
    unit = points.double() / points.double().norm(dim=-1, keepdim=True).clamp(min=1e-8)
    return (unit @ unit.T).fill_diagonal_(-torch.inf).round(decimals=12).argmax(-1)


def plain_finch(points: Tensor) -> list[Partition]:
    """As `slow_finch`, for some thousands of points."""
    labels, levels = torch.arange(len(points)), []
    while len(labels.unique()) > 1:
        means = torch.stack([points[labels == label].double().mean(0) for label in labels.unique()])
        neighbours = plain_neighbours(means)
        links = coo_array((np.ones(len(means)), (np.arange(len(means)), neighbours.numpy())), shape=(len(means),) * 2)
        labels = torch.from_numpy(connected_components(links, directed=False)[1])[labels]
        levels.append(partition(labels))
    return levels[:-1] if len(levels) > 1 else levels


def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finch_module, "BLOCK", 4)
    monkeypatch.setattr(finch_module, "TILE", 8)


def cloud(kind: str, n: int, dim: int = 24) -> Tensor:
    random = torch.Generator().manual_seed(n)
    noise = torch.randn(n, dim, generator=random, dtype=torch.float64)
    clumps = torch.randn(3, dim, generator=random, dtype=torch.float64)[torch.randint(3, (n,), generator=random)]
    match kind:
        case "noise":
            return noise.float()
        case "clumps":
            return (clumps + 0.1 * noise).float()
        case "doubles":
            return clumps.float()
        case "equal":
            return noise[:1].expand(n, dim)
        case "opposite":  # every cosine of the first with another is negative, those of the others are 1
            return torch.cat([-noise[:1], noise[:1].expand(n - 1, dim)])
        case "zeros":
            return noise.float() * (torch.rand(n, 1, generator=random) < 0.5)
        case _:
            return clumps + float(kind) * noise


def test_links_to_first_neighbours_join_what_the_whole_adjacency_joins() -> None:
    for points in cases():
        if len(points) > 1:
            whole = torch.from_numpy(slow_components(points.double().numpy()))
            assert partition(linked(first_neighbours(points))) == partition(whole)


def test_every_level_equals_that_of_the_slow_reference() -> None:
    depths = set()
    for points in cases():
        found = finch(points)
        assert [partition(labels) for labels in found] == slow_finch(points.double().numpy())
        depths.add(len(found))
    assert {1, 2, 3} <= depths  # or the deeper levels would not have been tested


def test_labels_count_from_zero_and_partitions_get_coarser() -> None:
    for points in cases():
        sizes = []
        for labels in finch(points):
            assert labels.dtype == torch.int64
            assert labels.unique().tolist() == list(range(int(labels.max()) + 1))
            sizes.append(int(labels.max()) + 1)
        assert all(fine > coarse for fine, coarse in pairwise(sizes))
        assert sizes[-1] > 1 or len(sizes) == 1


def test_the_order_of_the_points_does_not_matter() -> None:
    random = torch.Generator().manual_seed(0)
    for points in cases(60):
        order = torch.randperm(len(points), generator=random)
        for labels, permuted in zip(finch(points), finch(points[order]), strict=True):
            assert partition(labels[order]) == partition(permuted)


def test_one_point_is_a_cluster_and_two_are_one() -> None:
    assert [labels.tolist() for labels in finch(torch.ones(1, 3))] == [[0]]
    assert [labels.tolist() for labels in finch(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))] == [[0, 0]]


def test_two_directions_by_hand() -> None:
    points = torch.tensor([[1.0, 0.0], [0.0, 1.0], [5.0, 0.1], [0.1, 9.0]])
    assert [labels.tolist() for labels in finch(points)] == [[0, 1, 0, 1]]


def test_equal_points_are_one_cluster() -> None:
    """Products of equal rows can differ in the last bit by their place in the matrix, and ties must survive that."""
    split = []
    for n in range(2, 61):
        points = torch.randn(1, 7, generator=torch.Generator().manual_seed(n)).expand(n, 7)
        if [labels.tolist() for labels in finch(points)] != [[0] * n]:
            split.append(n)
    assert split == []


@pytest.mark.parametrize("zeros", [1, 2, 5])
def test_vectors_of_zero_are_clustered_somewhere(zeros: int) -> None:
    points = torch.cat([torch.zeros(zeros, 3), torch.eye(3)])
    for labels in finch(points):
        assert len(labels) == zeros + 3
        assert min(len(cluster) for cluster in partition(labels)) > 1
    assert finch(torch.zeros(4, 3))[0].tolist() == [0, 0, 0, 0]


def test_neighbours_are_found_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [finch(points) for points in cases(60)]
    small_blocks(monkeypatch)
    for levels, points in zip(whole, cases(60), strict=True):
        assert [labels.tolist() for labels in finch(points)] == [labels.tolist() for labels in levels]


def test_the_first_of_equal_neighbours_is_taken() -> None:
    assert first_neighbours(torch.eye(3)).tolist() == [1, 0, 0]


def test_cluster_means_by_hand() -> None:
    points = torch.tensor([[1.0, 2.0], [3.0, 6.0], [10.0, 20.0]])
    means = cluster_means(points, torch.tensor([1, 1, 0]))
    assert means.dtype == torch.float64
    assert means.tolist() == [[10, 20], [2, 4]]


def test_means_by_a_product_are_those_of_sums() -> None:
    points = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)).double()
    labels = torch.arange(50) % 7
    found, sizes = means_by_product(points, members(labels, 8))
    torch.testing.assert_close(found, cluster_means(points, labels, 8), equal_nan=True)
    assert found[7].isnan().all()
    assert cluster_sizes(labels, 8).tolist() == sizes.tolist() == [8, *[7] * 6, 0]


KINDS = ("noise", "clumps", "doubles", "equal", "opposite", "zeros", "1e-3", "1e-4", "1e-5", "1e-7", "1e-13")


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_are_those_of_the_whole_matrix_in_full_precision(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    for n in (2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 15, 16, 17, 24, 25, 61):
        points = cloud(kind, n)
        assert first_neighbours(points).tolist() == plain_neighbours(points).tolist(), n


@pytest.mark.parametrize("kind", ["1e-3", "1e-4", "1e-5"])
def test_neighbours_that_single_precision_confuses_are_told_apart(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    points = cloud(kind, 300, dim=512)
    single = torch.nn.functional.normalize(points, dim=-1).float()
    confused = (single @ single.T).fill_diagonal_(-torch.inf).argmax(-1)
    exact = plain_neighbours(points)
    assert (confused // 4 != exact // 4).sum() > 3  # or the test would not show anything: another block looks nearer
    assert first_neighbours(points).tolist() == exact.tolist()


def test_the_error_of_single_precision_by_hand() -> None:
    # 512 products and sums, two roundings of factors, two to spare: 516 / 2²⁴ = 3.07559967e-5, over 1 − 3.07559967e-5.
    assert product_error(512) == pytest.approx(3.07569427e-5, rel=1e-8)


@pytest.mark.parametrize("dim", [1, 24, 512, 5000])
def test_products_in_single_precision_are_off_by_less_than_is_allowed_for(dim: int) -> None:
    unit = torch.nn.functional.normalize(cloud("noise", 50, dim).double().abs(), dim=-1)
    off = (unit.float() @ unit.float().T).double() - unit @ unit.T
    assert off.abs().max() <= product_error(dim)


@pytest.mark.parametrize("kind", ["noise", "clumps", "doubles", "1e-3"])
def test_thousands_of_points_are_clustered_as_by_the_whole_matrix(kind: str) -> None:
    points = cloud(kind, 3000)
    assert len(points) > 10 * finch_module.BLOCK
    assert [partition(labels) for labels in finch(points)] == plain_finch(points)


def test_rows_are_taken_tile_by_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many equal points have their neighbour in one block, and no matrix may have a row for each of them."""
    small_blocks(monkeypatch)
    sizes, whole = [], finch_module.nearest

    def watched(unit: Tensor, rows: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        sizes.append((len(rows), stop - start))
        return whole(unit, rows, start, stop)

    monkeypatch.setattr(finch_module, "nearest", watched)
    assert first_neighbours(cloud("equal", 50)).tolist() == [1] + [0] * 49
    assert max(sizes) == (8, 4)
    assert sum(rows for rows, _ in sizes) == 50  # each point is done once it has met its equal


def test_means_of_very_many_clusters_need_no_matrix_of_clusters_and_points() -> None:
    """It would have 80 GB."""
    points = torch.arange(200_000.0).view(100_000, 2)
    labels = torch.arange(100_000) // 2
    means = cluster_means(points, labels)
    assert means.shape == (50_000, 2)
    assert torch.equal(means, points.view(50_000, 2, 2).mean(1).double())
