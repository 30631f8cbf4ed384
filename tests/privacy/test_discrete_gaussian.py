"""Exact draws: their distribution, and the coins that floating point leaves open."""

from fractions import Fraction
from math import exp

import numpy as np
import pytest
from scipy.stats import chi2

from protofed.privacy.discrete_gaussian import _Coins, discrete_gaussian


def entropy(seed: int):
    """Bytes that are the same in every run of the tests."""
    return np.random.default_rng(seed).bytes


@pytest.mark.parametrize("scale", [0.4, 1.0, 3.7, 12.0])
def test_small_scales_have_the_probabilities_of_the_formula(scale: float) -> None:
    most = int(4 * scale) + 1
    drawn = np.clip(discrete_gaussian(200_000, scale, entropy(1)), -most, most)
    numbers = np.arange(-60, 61)
    weight = np.exp(-(numbers**2) / (2 * scale**2))
    chance = {n: weight[np.clip(numbers, -most, most) == n].sum() / weight.sum() for n in range(-most, most + 1)}
    expected = 200_000 * np.array([*chance.values()])
    found = np.array([(drawn == n).sum() for n in chance])
    keep = expected > 5
    statistic = ((found - expected) ** 2 / expected)[keep].sum()
    assert chi2.sf(statistic, keep.sum() - 1) > 1e-4


@pytest.mark.parametrize("scale", [2.0**20 + 0.3, 2.0**39])
def test_large_scales_have_mean_variance_and_kurtosis_of_a_normal_distribution(scale: float) -> None:
    drawn = discrete_gaussian(400_000, scale, entropy(2)) / scale
    assert abs(drawn.mean()) < 0.008
    assert drawn.var() == pytest.approx(1, abs=0.01)
    assert (drawn**4).mean() / drawn.var() ** 2 == pytest.approx(3, abs=0.05)
    assert len(np.unique(drawn)) > 380_000 or scale < 2**30, "also the last digits are drawn"


def test_coins_that_floating_point_leaves_open_are_decided_with_more_bits() -> None:
    """With a margin above 1 every coin is decided exactly, and the words decide as in floating point."""
    gamma = [Fraction(1, 3), Fraction(1), Fraction(7, 2), Fraction(12)] * 500
    numbers = np.array([float(g) for g in gamma])
    by_floats = _Coins(entropy(3)).heads(numbers, gamma.__getitem__)
    exactly = _Coins(entropy(3)).heads(numbers, gamma.__getitem__, margin=2.0)
    assert (by_floats == exactly).all()
    assert exactly[1::4].mean() == pytest.approx(exp(-1), abs=0.06)


@pytest.mark.parametrize("last_word", [0, 2**64 - 1])
def test_bits_that_are_equal_so_far_are_followed_by_others(last_word: int) -> None:
    """The first 64 bits of e⁻¹ themselves say neither; the next ones do."""
    first = int("0x5E2D58D8B3BCDF1A", 16)  # ⌊2⁶⁴ / e⌋
    words = iter([first, last_word])
    coins = _Coins(lambda count: next(words).to_bytes(8, "little") if count == 8 else b"")
    assert coins.heads(np.ones(1), lambda i: Fraction(1)).tolist() == [last_word == 0]
    assert next(words, None) is None, "both words were read"


def test_numbers_below_n_are_all_equally_likely() -> None:
    """A word above the last whole multiple of n is thrown away, and another one is drawn."""
    n = 2**63 + 1  # nearly half of all words are too large
    words = iter([2**64 - 1, 5])
    assert _Coins(lambda count: next(words).to_bytes(8, "little")).below(n, 1).tolist() == [5]


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 2.0**41])
def test_scales_that_cannot_be(scale: float) -> None:
    with pytest.raises(ValueError, match="scale"):
        discrete_gaussian(1, scale)


def test_nobody_draws_the_same_twice() -> None:
    assert (discrete_gaussian(100, 1e6) != discrete_gaussian(100, 1e6)).any()
    assert discrete_gaussian(0, 1e6).shape == (0,)
