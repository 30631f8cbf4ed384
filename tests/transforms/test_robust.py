"""Robust means of vectors, against sorting and brute force in float64."""

from itertools import product

import pytest
import torch
from torch import Tensor

from protofed.transforms.robust import CENTRES, CentreRule, TrimmedMean, coordinate_median, geometric_median


def drawn(count: int, size: int, seed: int = 0) -> list[Tensor]:
    return [*torch.randn(count, size, generator=torch.Generator().manual_seed(seed))]


def centre(rule: CentreRule, vectors: list[Tensor], faulty: int) -> Tensor:
    made = CENTRES[rule](faulty)
    for vector in vectors:
        made.add(vector)
    return made.value()


def by_sorting(vectors: list[Tensor], faulty: int) -> Tensor:
    """The trimmed mean of each coordinate."""
    rows = torch.stack(vectors).double().sort(0).values
    return rows[faulty : len(vectors) - faulty].mean(0)


@pytest.mark.parametrize(("count", "faulty"), [(1, 0), (4, 0), (3, 1), (5, 2), (12, 1), (12, 4), (13, 6)])
def test_the_streaming_trimmed_mean_is_that_of_sorting(count: int, faulty: int) -> None:
    """T14: Bit for bit, after rounding to float32, also with ties and with values of 10¹² in any order of arrival.
    Subtracting these from a sum would leave errors of about 10⁻⁴."""
    for seed in range(5):
        vectors = drawn(count, 500, seed)
        vectors[0][:100] = vectors[-1][:100]
        for bad in range(faulty):
            vectors[(bad * 3 + seed) % count] = torch.full((500,), 1e12 if bad % 2 else -1e12)
        vectors[0][-50:] = 1e12 if faulty else 1.0
        assert torch.equal(centre("trimmed", vectors, faulty).float(), by_sorting(vectors, faulty).float())


def test_the_trimmed_mean_by_hand() -> None:
    """Of 1, 2, 6, 100 and −50 without one at each end: (1 + 2 + 6) / 3 = 3."""
    vectors = [torch.tensor([value]) for value in (1.0, 100.0, 2.0, -50.0, 6.0)]
    assert centre("trimmed", vectors, 1).tolist() == [3.0]


def test_the_trimmed_mean_holds_no_more_than_its_extremes_and_a_sum() -> None:
    made = TrimmedMean(2)
    for vector in drawn(40, 1000):
        made.add(vector)
    held = [value for value in vars(made).values() if isinstance(value, Tensor)]
    held += [tensor for value in vars(made).values() if isinstance(value, list) for tensor in value]
    assert sum(tensor.numel() for tensor in held) == (2 * 2 + 1) * 1000


def test_the_median_is_the_middle_of_each_coordinate() -> None:
    odd = [torch.tensor([1.0, 9.0]), torch.tensor([1e12, 4.0]), torch.tensor([3.0, -1e12])]
    assert centre("median", odd, 1).tolist() == [3.0, 4.0]
    assert centre("median", [*odd, torch.tensor([5.0, 6.0])], 1).tolist() == [4.0, 5.0]


def test_the_median_in_blocks_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = drawn(6, 100)
    whole = coordinate_median(vectors)
    monkeypatch.setattr("protofed.transforms.robust.BLOCK", 7)
    assert torch.equal(coordinate_median(vectors), whole)
    assert torch.allclose(whole, by_sorting(vectors, 2))


def test_no_point_nearby_has_a_smaller_sum_of_distances_than_the_geometric_median() -> None:
    vectors = drawn(9, 3)
    vectors[0] = torch.full((3,), 1e6)
    found = geometric_median(vectors)

    def total(point: Tensor) -> float:
        return sum((vector.double() - point).norm().item() for vector in vectors)

    least = total(found)
    for step in product((-0.01, 0.0, 0.01), repeat=3):
        assert total(found + torch.tensor(step)) >= least - 1e-6
    assert total(found) < total(torch.stack(vectors).double().mean(0)) / 1.5


def test_the_geometric_median_by_hand() -> None:
    """Three corners of an equilateral triangle: its middle. Where one point has most of the vectors: that point."""
    root = 3**0.5 / 2
    corners = [torch.tensor([1.0, 0.0]), torch.tensor([-0.5, root]), torch.tensor([-0.5, -root])]
    assert geometric_median(corners).tolist() == pytest.approx([0, 0], abs=1e-6)
    same = [torch.tensor([2.0, 1.0])] * 3 + [torch.tensor([1e9, -1e9])] * 2
    assert geometric_median(same).tolist() == pytest.approx([2, 1], abs=1e-3)


def test_nearest_neighbours_are_mixed_before_trimming() -> None:
    """0, 1, 3 and 100 with one bad: the three nearest of 0, 1 and 3 are these three, with the mean 4/3; those of
    100 are 100, 3 and 1, with the mean 104/3. Without one at each end, 4/3 is left twice."""
    vectors = [torch.tensor([value]) for value in (0.0, 100.0, 1.0, 3.0)]
    assert centre("nnm_trimmed", vectors, 1).item() == pytest.approx(4 / 3)


@pytest.mark.parametrize("rule", CENTRES)
def test_no_rule_follows_those_that_it_was_told_of(rule: CentreRule) -> None:
    """Seven vectors around 0 and two or three at 10⁶: the result stays with the seven. Control: the mean does not."""
    for faulty in (2, 3):
        vectors = [*drawn(7, 20), *(torch.full((20,), 1e6) for _ in range(faulty))]
        assert centre(rule, vectors, faulty).abs().max() < 3
        assert torch.stack(vectors).mean(0).min() > 1e5


@pytest.mark.parametrize("rule", CENTRES)
def test_without_bad_vectors_equal_ones_stay_as_they_are(rule: CentreRule) -> None:
    one = drawn(1, 20)[0]
    assert torch.allclose(centre(rule, [one] * 5, 2).float(), one, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rule", CENTRES)
def test_twice_as_many_as_the_bad_ones_are_too_few(rule: CentreRule) -> None:
    with pytest.raises(ValueError, match="4 vectors are too few for 2"):
        centre(rule, drawn(4, 3), 2)
