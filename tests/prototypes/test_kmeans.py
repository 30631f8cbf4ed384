"""K-means on principal components: optima, degenerate points, and the choice of the number of clusters."""

import math
from itertools import pairwise

import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from torch import Tensor

from protofed.prototypes.finch import cluster_means
from protofed.prototypes.kmeans import (
    Partition,
    _moved_in_class,
    _spread_in_classes,
    assigned,
    kmeans,
    kmeans_of_classes,
    no_partition,
    partitioned,
    principal_axes,
    silhouettes,
    within,
)


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def blobs(count: int, each: int = 7, dim: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Points around centres that are at least 20 apart, and their blobs."""
    centres = torch.zeros(count, dim)
    centres[:, 0] = 20.0 * torch.arange(count)
    centres[:, 1:] = 10 * torch.rand(count, dim - 1, generator=draws(seed))
    truth = torch.arange(count).repeat_interleave(each)
    return centres[truth] + torch.randn(count * each, dim, generator=draws(seed + 1)), truth


def together(labels: Tensor) -> Tensor:
    """Which points share a cluster, whatever its number, (N, N)."""
    return labels[:, None] == labels


# ---- k-means


def test_kmeans_by_hand() -> None:
    points = torch.tensor([[0.0], [9.0], [1.0], [10.0]])
    labels = kmeans(points, 2, draws())
    # {0, 1} and {9, 10}: means 0.5 and 9.5, each point half away: 4 · 0.25 = 1.
    assert torch.equal(together(labels), together(torch.tensor([0, 1, 0, 1])))
    assert within(points, labels) == 1.0
    # {0} and the others: mean 20/3, squares (49 + 289 + 100) / 9 = 146/3.
    assert within(points, torch.tensor([0, 1, 1, 1])) == pytest.approx(146 / 3)


@pytest.mark.parametrize("count", [2, 3, 5, 8])
@pytest.mark.parametrize("seed", range(5))
def test_separated_blobs_are_found_as_scikit_learn_finds_them(count: int, seed: int) -> None:
    points, truth = blobs(count, seed=10 * seed)
    labels = kmeans(points, count, draws(seed))
    reference = KMeans(count, n_init=20, random_state=0).fit(points.double().numpy())
    assert torch.equal(together(labels), together(torch.from_numpy(reference.labels_)))
    assert torch.equal(together(labels), together(truth))
    assert within(points, labels) == pytest.approx(reference.inertia_, rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_without_blobs_the_best_restart_is_about_as_tight_as_that_of_scikit_learn(seed: int) -> None:
    points = torch.rand(60, 4, generator=draws(seed))
    reference = KMeans(5, n_init=20, random_state=0).fit(points.double().numpy()).inertia_
    assert within(points, kmeans(points, 5, draws(seed))) <= 1.05 * reference


def test_more_restarts_are_never_looser_and_sometimes_tighter() -> None:
    points = torch.rand(40, 3, generator=draws(1))
    found = [within(points, kmeans(points, 6, draws(), restarts)) for restarts in (1, 5, 30)]
    assert all(more <= fewer for fewer, more in pairwise(found))
    assert found[-1] < found[0]


def test_the_result_is_settled() -> None:
    """Every point is in the cluster whose mean is nearest."""
    points = torch.rand(50, 2, generator=draws(2)).double()
    labels = kmeans(points, 6, draws())
    means = torch.stack([points[labels == j].mean(0) for j in range(6)])
    assert torch.equal(torch.cdist(points, means).argmin(-1), labels)


@pytest.mark.parametrize(
    "points",
    [
        pytest.param(torch.ones(6, 3), id="all equal"),
        pytest.param(torch.zeros(6, 3), id="all zero"),
        pytest.param(torch.tensor([[0.0], [0.0], [0.0], [0.0], [0.0], [7.0]]), id="two distinct points"),
        pytest.param(torch.arange(6.0)[:, None], id="on a line"),
        pytest.param(torch.tensor([[1e30], [-1e30], [0.0], [1e-30], [0.0], [1.0]]), id="of very different sizes"),
    ],
)
@pytest.mark.parametrize("count", range(1, 7))
def test_no_cluster_is_empty_on_degenerate_points(points: Tensor, count: int) -> None:
    for seed in range(5):
        labels = kmeans(points, count, draws(seed))
        assert labels.shape == (6,)
        assert labels.unique().tolist() == list(range(count))


def test_no_cluster_is_empty_on_many_coarse_grids() -> None:
    for seed in range(60):
        points = torch.randint(0, 3, (9, 2), generator=draws(seed)).float()
        labels = kmeans(points, 1 + seed % 9, draws(seed))
        assert labels.unique().tolist() == list(range(1 + seed % 9))


def test_as_many_clusters_as_points_leave_every_point_alone() -> None:
    points = torch.rand(7, 2, generator=draws())
    assert kmeans(points, 7, draws()).sort().values.tolist() == list(range(7))


def test_a_centre_without_points_takes_the_farthest_that_can_be_spared() -> None:
    points = torch.tensor([[0.0], [1.0], [5.0], [100.0]], dtype=torch.float64)
    # 0, 1 and 5 are nearest to 0, 100 to 90, nothing to 1000. Of all gaps 10 is the largest, but the cluster of 100 has
    # no other point; the next is that of 5.
    centres = torch.tensor([[0.0], [1000.0], [90.0]], dtype=torch.float64)
    assert assigned(points, centres).tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize("count", [0, 5])
def test_more_clusters_than_points_and_none_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match="4 points cannot form"):
        kmeans(torch.rand(4, 2), count, draws())


@pytest.mark.parametrize("seed", range(5))
def test_another_order_of_the_points_gives_the_same_partition(seed: int) -> None:
    points, _ = blobs(4)
    order = torch.randperm(len(points), generator=draws(seed))
    labels, turned = kmeans(points, 4, draws(seed)), kmeans(points[order], 4, draws(seed))
    assert torch.equal(together(labels[order]), together(turned))


def test_the_generator_decides_and_nothing_else_does() -> None:
    points = torch.rand(30, 2, generator=draws())
    before = torch.random.get_rng_state()
    assert torch.equal(kmeans(points, 8, draws(3), 1), kmeans(points, 8, draws(3), 1))
    assert any(not torch.equal(kmeans(points, 8, draws(3), 1), kmeans(points, 8, draws(s), 1)) for s in range(5))
    assert torch.equal(torch.random.get_rng_state(), before)


# ---- principal components


def test_principal_axes_by_hand() -> None:
    # Around (1, 1): two points 3 away along (1, 1)/√2 · √2 and two 1 away along (1, −1).
    points = torch.tensor([[4.0, 4.0], [-2.0, -2.0], [2.0, 0.0], [0.0, 2.0]])
    origin, axes = principal_axes(points, 1)
    assert origin.tolist() == [1.0, 1.0]
    torch.testing.assert_close(axes.abs(), torch.full((1, 2), math.sqrt(0.5), dtype=torch.float64))
    assert axes[0, 0] * axes[0, 1] > 0


def test_principal_axes_are_those_of_scikit_learn() -> None:
    points = torch.rand(12, 40, generator=draws())
    origin, axes = principal_axes(points, 5)
    reference = PCA(5, svd_solver="full").fit(points.double().numpy())
    torch.testing.assert_close(origin, torch.from_numpy(reference.mean_))
    signs = (axes * torch.from_numpy(reference.components_)).sum(-1).sign()
    torch.testing.assert_close(axes * signs[:, None], torch.from_numpy(reference.components_))


@pytest.mark.parametrize(("shape", "dims", "rank"), [((4, 50), 4, 3), ((50, 3), 3, 3), ((1, 6), 1, 0)])
def test_there_are_no_more_axes_than_points_or_dimensions(shape: tuple[int, int], dims: int, rank: int) -> None:
    _, axes = principal_axes(torch.rand(shape, generator=draws()), 10)
    assert axes.shape == (dims, shape[1])
    # n points about their mean vary in n − 1 directions; the rest would be rounding, and is nothing.
    torch.testing.assert_close(axes @ axes.T, torch.diag((torch.arange(dims) < rank).double()))


def test_an_axis_points_to_where_its_largest_component_is_positive() -> None:
    points = torch.rand(12, 40, generator=draws())
    _, axes = principal_axes(points, 5)
    _, mirrored = principal_axes(-points, 5)
    torch.testing.assert_close(axes, mirrored)
    assert (axes.gather(1, axes.abs().argmax(1, keepdim=True)) > 0).all()


# ---- partitions


def test_later_points_belong_to_the_nearest_centre() -> None:
    points, truth = blobs(3, dim=5)
    partition, labels = partitioned(points, 3, 2, draws())
    assert torch.equal(together(labels), together(truth))
    assert torch.equal(partition.nearest(points), labels)
    assert partition.axes.shape == (2, 5)
    assert partition.centres.shape == (3, 2)
    later, kind = blobs(3, dim=5, each=4)
    assert torch.equal(labels[::7][kind], partition.nearest(later + 0.1))


def test_the_nearest_centre_by_hand() -> None:
    origin, axes, centres = ([[1.0, 1.0]], [[0.0, 1.0]], [[1.0], [4.0]])
    partition = Partition(*(torch.tensor(rows, dtype=torch.float64) for rows in (origin[0], axes, centres)))
    # Along the second axis, from the origin: 3 − 1 = 2 is nearer to 1, 3.6 − 1 = 2.6 nearer to 4.
    assert partition.nearest(torch.tensor([[99.0, 3.0], [-99.0, 3.6]])).tolist() == [0, 1]


def test_what_is_not_among_the_principal_axes_does_not_count() -> None:
    """Two blobs far apart in one direction; noise in others would join points otherwise."""
    points, truth = blobs(2, dim=6)
    one, _ = partitioned(points, 2, 1, draws())
    assert torch.equal(together(one.nearest(points + 100 * principal_axes(points, 6)[1][5])), together(truth))


def test_fewer_points_than_clusters_are_clusters_of_their_own() -> None:
    partition, labels = partitioned(torch.rand(3, 8, generator=draws()), 5, 10, draws())
    assert labels.sort().values.tolist() == [0, 1, 2]
    assert partition.centres.shape == (3, 3)
    alone, label = partitioned(torch.rand(1, 8, generator=draws()), 5, 10, draws())
    assert label.tolist() == [0]
    assert alone.nearest(torch.rand(2, 8)).tolist() == [0, 0]


def test_before_any_partition_everything_is_one_cluster() -> None:
    assert no_partition(6).nearest(torch.randn(3, 6, generator=draws())).tolist() == [0, 0, 0]


# ---- the number of clusters


def test_silhouettes_by_hand() -> None:
    points = torch.tensor([[0.0], [1.0], [10.0], [11.0]])
    # Of 0: its own cluster is 1 away, the other 10.5 on average: 9.5 / 10.5. Of 1: 8.5 / 9.5. The others mirror them.
    scores = silhouettes(points, [1, 2, 4, 9], draws())
    assert scores.keys() == {2}
    assert scores[2] == pytest.approx((9.5 / 10.5 + 8.5 / 9.5) / 2)


@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_the_silhouette_is_best_at_the_true_number_of_blobs(count: int) -> None:
    points, truth = blobs(count)
    scores = silhouettes(points, range(2, 11), draws())
    assert scores.keys() == set(range(2, 11))
    assert max(scores, key=lambda j: scores[j]) == count
    partition, labels = partitioned(points, 0, 3, draws())
    assert len(partition.centres) == count
    assert torch.equal(together(labels), together(truth))


@pytest.mark.parametrize("points", [torch.rand(1, 4), torch.tensor([[0.0], [5.0]])], ids=["one", "two"])
def test_too_few_points_for_a_silhouette_are_one_cluster(points: Tensor) -> None:
    partition, labels = partitioned(points, 0, 10, draws())
    assert len(partition.centres) == 1
    assert labels.tolist() == [0] * len(points)


def test_equal_points_have_a_number_of_clusters_too() -> None:
    partition, labels = partitioned(torch.ones(5, 3), 0, 10, draws())
    assert labels.unique().tolist() == list(range(len(partition.centres)))


def test_clusters_are_numbered_by_their_first_points() -> None:
    for seed in range(8):
        points, _ = blobs(4, dim=3)
        labels = kmeans(points, 4, torch.Generator().manual_seed(seed)).tolist()
        assert list(dict.fromkeys(labels)) == [0, 1, 2, 3]


# ---- inside each class


def test_clusters_inside_classes_are_those_of_each_class_alone() -> None:
    # Three blobs in class 0, the same far away in class 3 among others of class 1; class 2 is absent.
    centres = torch.tensor([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0]])
    points = torch.cat([centres.repeat(20, 1), centres.repeat(20, 1) + 500, centres[:2].repeat(10, 1)])
    points += 0.1 * torch.randn(points.shape, generator=draws(1))
    y = torch.tensor([0] * 60 + [3] * 60 + [1] * 20)
    labels = kmeans_of_classes(points, y, 3, draws(0))
    for c, blobs in ((0, 3), (3, 3)):
        mine = labels[y == c].view(-1, blobs)
        assert sorted(mine[0].tolist()) == list(range(blobs))
        assert (mine == mine[0]).all()
    assert set(labels[y == 1].tolist()) == {0, 1, 2}, "no cluster is empty"


def test_the_result_inside_classes_is_settled() -> None:
    points, y = torch.randn(80, 3, generator=draws(2)), torch.arange(80) % 4
    labels = kmeans_of_classes(points, y, 3, draws(0))
    for c in range(4):
        mine = points[y == c].double()
        assert torch.equal(assigned(mine, cluster_means(mine, labels[y == c])), labels[y == c])


def random_classes(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Points, some of which coincide, their classes and first clusters, and which clusters there are."""
    points = torch.randn(40, 2, generator=draws(seed)).mul(2).round().double()
    y = torch.randint(0, 3, (40,), generator=draws(seed + 1))
    return points, y, torch.arange(40) % 4, torch.ones(3, 4, dtype=torch.bool)


@pytest.mark.parametrize("moves", [1, 8])
@pytest.mark.parametrize("seed", range(10))
def test_moves_together_are_those_of_each_class_one_by_one(seed: int, moves: int) -> None:
    points, y, labels, there = random_classes(seed)
    found, is_settled = _moved_in_class(points, y, labels, there, moves)
    before = labels
    for _ in range(moves):
        before, labels = labels, labels.clone()
        for c in range(3):
            mine = points[y == c]
            labels[y == c] = assigned(mine, cluster_means(mine, before[y == c], 4))
    assert torch.equal(found, labels)
    assert is_settled == torch.equal(labels, before)


def test_a_cluster_that_loses_all_points_gets_the_farthest() -> None:
    # The means are −5, 5 and 0, to which no point is nearest: 1.5 from its mean, −6.5 is the farthest.
    points = torch.tensor([[-6.5], [-3.5], [4.0], [6.0], [-5.0], [5.0]]).double()
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    found, is_settled = _moved_in_class(points, 0 * labels, labels, torch.ones(1, 3, dtype=torch.bool), 1)
    assert found.tolist() == [2, 0, 1, 1, 0, 1]
    assert not is_settled


def test_a_class_of_fewer_points_than_clusters_has_one_for_each() -> None:
    points, y = torch.tensor([[1.0], [5.0], [2.0], [2.0], [7.0], [8.0], [9.0]]), torch.tensor([0, 0, 1, 2, 2, 2, 2])
    labels = kmeans_of_classes(points, y, 3, draws(0))
    assert sorted(labels[:2].tolist()) == [0, 1]
    assert labels[2] == 0
    assert set(labels[3:].tolist()) == {0, 1, 2}


def test_no_cluster_of_a_class_is_empty_where_points_coincide() -> None:
    points = torch.tensor([[1.0]] * 5 + [[1.0]] * 4 + [[2.0]])
    labels = kmeans_of_classes(points, torch.tensor([0] * 5 + [1] * 5), 3, draws(0))
    assert set(labels[:5].tolist()) == set(labels[5:].tolist()) == {0, 1, 2}


def test_first_centres_are_drawn_by_squared_distance() -> None:
    # Class 0: points 0, 1 and 3. After 0 the next is 1 or 3 with weights 1 and 9, after 1 it is 0 or 3 with 1 and 4,
    # after 3 it is 0 or 1 with 9 and 4: a point is left out with probability
    # 3: (1/10 + 1/5) / 3, 0: (4/5 + 4/13) / 3, 1: (9/10 + 9/13) / 3. Class 1 is drawn beside it.
    points, y, own = (
        torch.tensor([[0.0], [1.0], [3.0], [100.0], [200.0]]).double(),
        torch.tensor([0, 0, 0, 1, 1]),
        draws(0),
    )
    left_out = [3 - int(_spread_in_classes(points, y, 2, own)[0].sum()) for _ in range(4000)]
    expected = {2: (1 / 10 + 1 / 5) / 3, 0: (4 / 5 + 4 / 13) / 3, 1: (9 / 10 + 9 / 13) / 3}
    for row, probability in expected.items():
        assert left_out.count(row) / 4000 == pytest.approx(probability, abs=0.03)


def test_draws_inside_classes_come_from_the_generator_alone() -> None:
    points, y = torch.randn(60, 3, generator=draws(2)), torch.arange(60) % 3
    first = kmeans_of_classes(points, y, 4, draws(0))
    torch.manual_seed(99)
    assert torch.equal(kmeans_of_classes(points, y, 4, draws(0)), first)
    assert any(not torch.equal(kmeans_of_classes(points, y, 4, draws(seed)), first) for seed in range(1, 5))
