"""Several prototypes per class: clusters, samples of them, and where they are put."""

import pytest
import torch
from torch import Tensor

from protofed.methods.pfedcspc.sampling import empty_slots, sampled_means, sampled_prototypes
from protofed.prototypes.class_means import class_sums


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_points(count: int, dim: int = 3, seed: int = 0) -> Tensor:
    return torch.randn(count, dim, generator=draws(100 + seed))


# ---- samples


@pytest.mark.parametrize(
    ("points", "share", "size"),
    # max(1, round(r · n)); halves are rounded to the even number: 0.5 to 0, 1.5 to 2, 2.5 to 2, 3.5 to 4.
    [
        (1, 0.5, 1),
        (2, 0.5, 1),
        (3, 0.5, 2),
        (4, 0.5, 2),
        (5, 0.5, 2),
        (7, 0.5, 4),
        (5, 0.8, 4),
        (4, 1.0, 4),
        (9, 0.01, 1),
    ],
)
def test_a_sample_is_a_share_of_the_points_and_holds_none_twice(points: int, share: float, size: int) -> None:
    # The mean of k different rows of the identity has k entries of 1 / k; a row drawn twice would have 2 / k.
    one = torch.zeros(points, dtype=torch.int64)
    (mean,) = sampled_means(torch.eye(points), one, torch.tensor([points]), share, draws())
    assert sorted(mean.tolist()) == pytest.approx([0.0] * (points - size) + [1 / size] * size)


def test_every_point_is_drawn_equally_often() -> None:
    # Half of six points, 600 times: each about 300 times, with a deviation of 12.
    cluster, sizes, own = torch.tensor([1] * 6), torch.tensor([0, 6]), draws()
    times = sum(3 * sampled_means(torch.eye(6), cluster, sizes, 0.5, own)[1] for _ in range(600))
    assert isinstance(times, Tensor)
    assert ((times - 300).abs() < 60).all()


def test_samples_of_a_cluster_hold_its_points_alone() -> None:
    cluster = torch.tensor([2, 0, 2, 0, 2, 0])
    means = sampled_means(torch.eye(6), cluster, torch.tensor([3, 0, 3]), 1.0, draws())
    assert means[0].tolist() == pytest.approx([0, 1 / 3, 0, 1 / 3, 0, 1 / 3])
    assert means[2].tolist() == pytest.approx([1 / 3, 0, 1 / 3, 0, 1 / 3, 0])


def test_samples_differ_and_depend_on_the_generator_alone() -> None:
    points, own, one = random_points(20), draws(5), torch.zeros(20, dtype=torch.int64)
    first, second = (sampled_means(points, one, torch.tensor([20]), 0.5, own) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(99)
    assert torch.equal(sampled_means(points, one, torch.tensor([20]), 0.5, draws(5)), first)


# ---- prototypes


def test_slots_are_ordered_by_class_cluster_and_repeat() -> None:
    # Class 0 has groups near 0 and 100; class 1 is absent; class 2 has one example, 7.
    z = torch.tensor([[0.0], [100.0], [0.2], [100.2], [7.0]])
    y = torch.tensor([0, 0, 0, 0, 2])
    slots = sampled_prototypes(z, y, num_classes=3, clusters=2, repeats=3, share=0.5, generator=draws())
    assert slots.count.tolist() == [1] * 6 + [0] * 6 + [1] * 3 + [0] * 3
    assert slots.mean[slots.count == 0].abs().max() == 0
    first, second = sorted([slots.mean[:3].squeeze(1).tolist(), slots.mean[3:6].squeeze(1).tolist()])
    assert {round(v, 3) for v in first} <= {0.0, 0.2}
    assert {round(v, 3) for v in second} <= {100.0, 100.2}
    assert slots.mean[12:15].tolist() == [[7.0]] * 3
    like = empty_slots(3, 6, 1)
    assert (slots.mean.shape, slots.count.shape) == (like.mean.shape, like.count.shape)


def test_one_whole_cluster_is_the_mean_of_the_class() -> None:
    z, y = random_points(30), torch.arange(30) % 4
    slots = sampled_prototypes(z, y, 5, clusters=1, repeats=1, share=1.0, generator=draws())
    expected = class_sums(z, y, torch.ones(30), 5).prototypes()
    torch.testing.assert_close(slots.mean, expected.mean)
    assert slots.count.tolist() == [1, 1, 1, 1, 0]


def test_prototypes_depend_on_the_generator_alone() -> None:
    z, y = random_points(30), torch.arange(30) % 3
    one, two, other = (sampled_prototypes(z, y, 3, 2, 4, 0.5, draws(seed)).mean for seed in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_a_class_of_fewer_examples_than_clusters_has_fewer() -> None:
    slots = sampled_prototypes(torch.tensor([[1.0], [5.0]]), torch.tensor([0, 0]), 1, 3, 2, 0.5, draws())
    assert slots.count.tolist() == [1, 1, 1, 1, 0, 0]
    assert sorted(slots.mean[:4, 0].tolist()) == [1, 1, 5, 5]
