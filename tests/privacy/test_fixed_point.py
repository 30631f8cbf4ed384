"""Sums of whole numbers: exact, in any order, and refused where a number does not fit."""

from fractions import Fraction
from math import inf, nan
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protofed.privacy.fixed_point import LARGEST, FixedPoint, TooLarge, flat, totals_of
from protofed.prototypes.class_means import ClassSums

NUMBERS = st.lists(st.floats(-LARGEST, LARGEST), min_size=1, max_size=40)


@given(NUMBERS, st.integers(0, 1000))
def test_the_sum_is_the_same_in_any_order(numbers: list[float], seed: int) -> None:
    point = FixedPoint(len(numbers))
    shuffled = list(numbers)
    Random(seed).shuffle(shuffled)
    sums = [point.encoded(torch.tensor(own, dtype=torch.float64)).sum().item() for own in (numbers, shuffled)]
    one_by_one = torch.tensor(0)
    for x in shuffled:
        one_by_one = one_by_one + point.encoded(torch.tensor(x, dtype=torch.float64))
    assert sums[0] == sums[1] == one_by_one.item()


@given(NUMBERS)
def test_the_sum_is_off_by_no_more_than_the_bound_of_each_number(numbers: list[float]) -> None:
    point = FixedPoint(len(numbers))
    total = point.encoded(torch.tensor(numbers, dtype=torch.float64)).sum().item()
    exact = sum(map(Fraction, numbers), Fraction(0))
    assert abs(Fraction(int(total), 2**point.bits) - exact) <= len(numbers) * Fraction(point.error)


def test_the_bits_behind_the_point_are_what_the_largest_sum_leaves() -> None:
    # 62 − 24 = 38 bits for one client; 16 clients take 4 of them, 17 take 5.
    assert [FixedPoint(count).bits for count in (1, 2, 16, 17, 1024)] == [38, 37, 34, 33, 28]
    for count in (3, 16, 1000):
        point = FixedPoint(count)
        most = sum([int(point.encoded(torch.tensor(LARGEST)))] * count)
        assert 2**60 < most <= 2**62
        assert point.is_sum_of(torch.tensor(most), count)
        assert point.is_sum_of(torch.tensor(-most), count)
        assert not point.is_sum_of(torch.tensor(-most - 2**20), count)


@pytest.mark.parametrize("value", [LARGEST * 1.001, -LARGEST * 2, inf, -inf, nan])
def test_what_does_not_fit_is_an_error_where_it_is_made(value: float) -> None:
    with pytest.raises(TooLarge):
        FixedPoint(3).encoded(torch.tensor([1.0, value]))


def test_summands_are_laid_flat_and_back() -> None:
    ann = {"b": ({"w": torch.tensor([[1.0], [2.0]]), "k": torch.tensor(3)}, 4.0), "a": (torch.tensor(5.0), 0.5)}
    bob = {"b": ({"w": torch.tensor([[0.5], [-2.0]]), "k": torch.tensor(9)}, 2.0), "a": (torch.tensor(1.0), 1.5)}
    # By name: a has weight ½ and ½ · 5; b has weight 4, and 4 times k = 3 and w = (1, 2).
    assert flat(ann).tolist() == [0.5, 2.5, 4.0, 12.0, 4.0, 8.0]
    assert flat({"a": ann["a"], "b": (dict(reversed(ann["b"][0].items())), 4.0)}).tolist() == flat(ann).tolist()
    totals = totals_of(flat(ann) + flat(bob), ann)
    assert totals["a"].weight == 2.0
    assert totals["a"].value().item() == 2.0  # (2.5 + 1.5) / 2
    assert totals["b"].value()["w"].tolist() == torch.tensor([[5 / 6], [4 / 6]]).tolist()  # float32, as the leaf is
    assert totals["b"].value()["k"].item() == 5  # 30 / 6, a whole number again
    assert totals["b"].total["w"].dtype == torch.float64
    with pytest.raises(ValueError, match="numbers are not"):
        totals_of(torch.zeros(7, dtype=torch.float64), ann)


def test_records_keep_their_kind_and_nothing_is_nothing() -> None:
    sums = ClassSums(torch.ones(2, 3), torch.tensor([1.0, 0.0]))
    found = totals_of(flat({"p": (sums, 1.0)}), {"p": (sums, 1.0)})["p"].total
    assert isinstance(found, ClassSums)
    assert found.total.tolist() == sums.total.tolist()
    assert totals_of(flat({}), {}) == {}
