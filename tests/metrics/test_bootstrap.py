"""Confidence intervals by drawing test examples again."""

from itertools import product
from math import comb, isnan

import numpy as np
import pytest

from protofed.errors import BadInput
from protofed.metrics import formulas
from protofed.metrics.bootstrap import Interval, bootstrap_interval, resampled


def test_draws_are_test_sets_of_the_same_size_with_the_same_examples() -> None:
    drawn = resampled(np.array([[3, 0], [1, 4]]), draws=500)
    assert drawn.shape == (500, 2, 2)
    assert (drawn.sum((1, 2)) == 8).all()
    assert (drawn[:, 0, 1] == 0).all()  # no such example is there to be drawn
    # The mean of a count is the count: 3, 1 and 4, each with a standard error below sqrt(2 / 500) = 0.063.
    assert drawn.mean(0) == pytest.approx(np.array([[3, 0], [1, 4]]), abs=0.25)


def binomial_quantile(n: int, p: float, level: float) -> float:
    """The smallest share k / n whose distribution function is at least the level."""
    total = 0.0
    for k in range(n + 1):
        total += comb(n, k) * p**k * (1 - p) ** (n - k)
        if total >= level:
            return k / n
    raise AssertionError


@pytest.mark.parametrize(("right", "wrong"), [(1, 1), (7, 3), (18, 2), (30, 70)])
def test_an_interval_of_accuracy_is_that_of_the_binomial_distribution(right: int, wrong: int) -> None:
    n = right + wrong
    found = bootstrap_interval(np.array([[right, wrong], [0, 0]]), formulas.accuracy, draws=20_000)
    assert found is not None
    for value, level in ((found.low, 0.025), (found.high, 0.975)):
        assert abs(value - binomial_quantile(n, right / n, level)) <= 1 / n + 1e-12


def test_two_examples_one_of_them_right_by_hand() -> None:
    # Accuracies 0, 1/2 and 1 have chances 1/4, 1/2 and 1/4. So 10 % to 90 % is 0 to 1, and 30 % to 70 % is 1/2 to 1/2.
    counts = np.array([[1, 1], [0, 0]])
    assert bootstrap_interval(counts, formulas.accuracy, level=0.8) == Interval(0.0, 1.0)
    assert bootstrap_interval(counts, formulas.accuracy, level=0.4) == Interval(0.5, 0.5)


def test_an_interval_of_balanced_accuracy_is_that_of_all_test_sets() -> None:
    # All 4^4 ways to draw four examples again, each equally likely: (true, predicted) = (0, 0), (0, 1), (1, 1), (1, 1).
    examples = [(0, 0), (0, 1), (1, 1), (1, 1)]
    values = []
    for chosen in product(examples, repeat=4):
        confusion = np.zeros((2, 2))
        for one in chosen:
            confusion[one] += 1
        values.append(formulas.balanced_accuracy(confusion))
    low, high = np.quantile(values, [0.1, 0.9], method="inverted_cdf")
    counts = np.array([[1, 1], [0, 2]])
    assert bootstrap_interval(counts, formulas.balanced_accuracy, level=0.8) == Interval(low, high)


def test_the_seed_decides_and_all_draws_alike_give_no_interval() -> None:
    counts = np.array([[40, 10], [5, 45]])
    first, again = (bootstrap_interval(counts, formulas.accuracy, seed=1, draws=50) for _ in range(2))
    assert first == again
    assert first != bootstrap_interval(counts, formulas.accuracy, seed=2, draws=50)
    assert bootstrap_interval(np.diag([3, 4]), formulas.accuracy) is None
    assert bootstrap_interval(counts, lambda confusion: float("nan")) is None
    with pytest.raises(BadInput, match="no examples"):
        resampled(np.zeros((2, 2)))


def test_sensitivities_by_hand() -> None:
    found = formulas.sensitivities(np.array([[3, 1, 0], [0, 0, 0], [2, 0, 0]])).tolist()
    assert found[0] == 0.75
    assert isnan(found[1])
    assert found[2] == 0.0
