"""K-means by sums: its steps by hand, and the whole against Lloyd's algorithm over points that are all in one place."""

from itertools import permutations

import pytest
import torch
from torch import Tensor

from protofed.prototypes.kmeans import within
from protofed.prototypes.kmeans_sums import ClusterSums, added, first_centres, lloyd, memberships, moved, tightest
from protofed.seeds import generator

# One kind, two dimensions, two partitions of two clusters: centres (0, 0) and (4, 0), and (0, 0) and (0, 4).
CENTRES = torch.tensor([[[[0.0, 0.0]], [[4.0, 0.0]]], [[[0.0, 0.0]], [[0.0, 4.0]]]])


def summed(points: Tensor, centres: Tensor, is_known: Tensor | None = None) -> ClusterSums:
    """What clients with points (K, B, D) add up to."""
    known = torch.ones(points.shape[:2]) if is_known is None else is_known
    each = [added(p, own, memberships(p, centres)) for p, own in zip(points, known, strict=True)]
    return ClusterSums(sum(e.total for e in each), sum(e.count for e in each))  # type: ignore[arg-type]


def test_a_step_by_hand() -> None:
    points = torch.tensor([[[1.0, 0.0]], [[3.0, 1.0]], [[5.0, 3.0]]])
    sums = summed(points, CENTRES)
    # First partition: (1, 0) is nearest to (0, 0); (3, 1) and (5, 3) to (4, 0). Second: (5, 3) alone is nearer to
    # (0, 4), by 25 + 1 against 25 + 9.
    assert sums.count[..., 0].tolist() == [[1.0, 2.0], [2.0, 1.0]]
    assert sums.total[:, :, 0].tolist() == [[[1.0, 0.0], [8.0, 4.0]], [[4.0, 1.0], [5.0, 3.0]]]
    means = moved(CENTRES.double(), sums)
    assert means[:, :, 0].tolist() == [[[1.0, 0.0], [4.0, 2.0]], [[2.0, 0.5], [5.0, 3.0]]]
    # Squared distances within: ½ · 8 = 4 for (3, 1) and (5, 3), and ½ · 5 = 2.5 for (1, 0) and (3, 1).
    best = tightest(CENTRES, sums)
    assert best.centres[:, 0].tolist() == [[2.0, 0.5], [5.0, 3.0]]
    assert best.count[:, 0].tolist() == [2.0, 1.0]


def test_a_point_that_a_client_lacks_counts_nowhere_and_an_empty_cluster_keeps_its_centre() -> None:
    points, known = torch.tensor([[[1.0, 0.0]], [[9.0, 9.0]]]), torch.tensor([[1.0], [0.0]])
    sums = summed(points, CENTRES, known)
    assert sums.count.sum() == 2
    assert moved(CENTRES.double(), sums)[0, :, 0].tolist() == [[1.0, 0.0], [4.0, 0.0]]


def test_each_kind_takes_its_own_best_partition() -> None:
    """Two kinds: what splits the one well does not split the other."""
    count = torch.tensor([[[2.0, 2.0], [2.0, 2.0]], [[2.0, 2.0], [2.0, 2.0]]])
    total = torch.zeros(2, 2, 2, 1)
    total[0, :, 0, 0], total[1, :, 1, 0] = torch.tensor([-6.0, 6.0]), torch.tensor([2.0, 10.0])
    total[1, :, 0, 0], total[0, :, 1, 0] = torch.tensor([-2.0, 2.0]), torch.tensor([6.0, 6.0])
    best = tightest(torch.zeros(2, 2, 2, 1), ClusterSums(total, count))
    assert best.centres[..., 0].tolist() == [[-3.0, 1.0], [3.0, 5.0]]


@pytest.mark.parametrize("seed", range(5))
def test_of_starts_that_find_one_partition_the_first_counts(seed: int) -> None:
    """One partition with its clusters in every order: a sum over clusters rounds differently in each. The order decides
    which of several equally large clusters is the first."""
    orders = torch.tensor(list(permutations(range(4))))
    means = torch.randn(4, 3, generator=generator(seed, "clusters"))
    sums = ClusterSums(means[orders][:, :, None], torch.ones(24, 4, 1))
    assert torch.equal(tightest(torch.zeros(24, 4, 1, 3), sums).centres[:, 0], means.double())


@pytest.mark.parametrize("seed", range(5))
def test_it_is_lloyds_algorithm_of_the_best_of_its_starts(seed: int) -> None:
    """Twelve clients, two kinds of points, three clusters each: against loops over all points."""
    draws = generator(seed, "points")
    groups = 3 * torch.randn(3, 5, generator=draws)
    points = torch.stack([groups[torch.randperm(12, generator=draws) % 3] for _ in range(2)], 1)
    points = points + torch.randn(12, 2, 5, generator=draws)
    start = first_centres(points.mean(0), 3, 4, draws)
    found = lloyd(lambda centres: summed(points, centres), start, steps=6)
    for kind in range(2):
        own, spreads = points[:, kind].double(), []
        for centres in start[:, :, kind]:
            for _ in range(6):
                labels = torch.cdist(own, centres).argmin(-1)
                rows = [own[labels == j].mean(0) if (labels == j).any() else centres[j] for j in range(3)]
                centres = torch.stack(rows)
            spreads.append(float((own - centres[labels]).square().sum()))
        nearest = torch.cdist(own, found.centres[:, kind]).argmin(-1)
        sizes = nearest.bincount(minlength=3).tolist()
        assert found.count[:, kind].sum() == 12
        if found.count[:, kind].tolist() == sizes:  # the last step has changed nothing
            assert within(own, nearest.unique(return_inverse=True)[1]) == pytest.approx(min(spreads), rel=1e-5)


def test_the_length_of_the_first_step_does_not_matter() -> None:
    draws = generator(1, "lengths")
    points, mean = torch.randn(7, 1, 3, generator=draws), torch.zeros(1, 3)
    centres = first_centres(mean, 4, 2, draws)
    assert centres.norm(dim=-1).sub(1).abs().max() < 1e-12
    for p in points:
        assert torch.equal(memberships(p, centres), memberships(p, 1e-3 * centres))
