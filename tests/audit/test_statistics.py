"""The statistics of audits against numbers worked out by hand and by scipy."""

from math import log

import numpy as np
import pytest
from scipy import stats

from protofed.audit import statistics
from protofed.audit.statistics import Scores


def array(*values: float) -> Scores:
    return np.array(values, dtype=np.float64)


def test_the_area_counts_pairs_and_ties_half() -> None:
    # Pairs (member, other): 3 > 1, 3 > 2, 2 > 1 count 1; 2 = 2 counts a half. 3.5 of 4.
    assert statistics.auc(array(3, 2), array(1, 2)) == 3.5 / 4
    assert statistics.auc(array(1), array(2, 3)) == 0
    assert statistics.auc(array(5, 5), array(5, 5, 5)) == 0.5


def test_the_area_is_that_of_mann_and_whitney() -> None:
    draws = np.random.default_rng(0)
    members, others = draws.integers(0, 9, 40).astype(float), draws.integers(0, 7, 33).astype(float)
    expected = stats.mannwhitneyu(members, others).statistic / (40 * 33)
    assert statistics.auc(members, others) == pytest.approx(expected, abs=1e-12)


def test_the_curve_goes_from_nothing_to_all_and_has_the_area() -> None:
    draws = np.random.default_rng(1)
    members, others = draws.normal(0.5, 1, 50), draws.normal(0, 1, 60)
    false, true = statistics.roc(members, others)
    assert (false[0], true[0], false[-1], true[-1]) == (0, 0, 1, 1)
    area = float((np.diff(false) * (true[1:] + true[:-1]) / 2).sum())
    assert area == pytest.approx(statistics.auc(members, others), abs=1e-12)


@pytest.mark.parametrize(("hits", "trials"), [(0, 10), (3, 10), (10, 10), (1, 300), (150, 151)])
def test_the_interval_of_a_share_is_that_of_clopper_and_pearson(hits: int, trials: int) -> None:
    expected = stats.binomtest(hits, trials).proportion_ci(0.95, "exact")
    found = statistics.clopper_pearson(hits, trials)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_members_found_at_a_rate_of_false_alarms() -> None:
    others = np.arange(100.0)  # at 5 %, five of them may be above the threshold, which is then 94
    members = array(94, 94.5, 95, 200)
    found = statistics.found_at(members, others, 0.05)
    assert found is not None
    assert (found.value, found.count) == (3 / 4, 4)
    assert statistics.found_at(members, others[:99], 0.01) is None, "not one of 99 is 1 %"


def test_the_correlation_is_pearsons() -> None:
    assert statistics.correlation(array(1, 2, 3), array(2, 4, 6)) == pytest.approx(1)
    # Deviations (−1, 0, 1) and (−1, 1, 0): 1 / (√2 √2).
    assert statistics.correlation(array(1, 2, 3), array(1, 3, 2)) == pytest.approx(0.5)
    assert statistics.correlation(array(1, 1, 1), array(1, 2, 3)) is None


def test_clients_are_drawn_and_not_examples() -> None:
    """Two kinds of clients, each sure of itself: drawing examples would give a narrow interval around 0.5."""
    low, high = (array(0, 0), array(1, 1)), (array(1, 1), array(0, 0))
    found = statistics.over_clients(
        lambda own: float(np.mean([statistics.auc(*pair) for pair in own])), [low, high] * 4
    )
    assert found is not None
    assert found.low <= 0.25
    assert found.high >= 0.75
    assert statistics.over_clients(lambda own: 0.5, [low, high]) is None


def test_matched_positions_have_as_many_of_each_label() -> None:
    first, second = [0, 0, 0, 1, 2, 2], [2, 2, 2, 0, 0, 3]
    here, there = statistics.matched(first, second, seed=0)
    assert sorted(np.array(first)[here]) == sorted(np.array(second)[there]) == [0, 0, 2, 2]
    assert len({*here}) == 4


# ---- canaries


def test_without_delta_the_chance_is_a_tail_of_the_binomial() -> None:
    expected = stats.binom.sf(79, 100, 1 / (1 + np.exp(-1.0)))
    assert statistics.chance_of(80, 100, 200, epsilon=1.0) == pytest.approx(expected, rel=1e-9)


def test_all_guesses_right_have_a_bound_in_closed_form() -> None:
    """(e^ε / (1 + e^ε))^r = β gives ε = ln(q / (1 − q)) with q = β^(1/r)."""
    q = 0.05 ** (1 / 50)
    assert statistics.least_epsilon(50, 50, 100) == pytest.approx(log(q / (1 - q)), abs=1e-6)
    assert statistics.least_epsilon(25, 50, 100) == 0


def test_a_failure_probability_lowers_the_bound() -> None:
    """Written out once more from the theorem: β + 2 m δ max_i (P[X ≥ v − i] − P[X ≥ v]) / i."""
    share, right, delta = 1 / (1 + np.exp(-2.0)), 45, 1e-3
    tail = [stats.binom.sf(k - 1, 50, share) for k in range(51)]
    most = max((tail[right - i] - tail[right]) / i for i in range(1, right + 1))
    assert statistics.chance_of(right, 50, 100, 2.0, delta) == pytest.approx(tail[right] + 2 * 100 * delta * most)
    assert statistics.least_epsilon(45, 50, 100, delta) < statistics.least_epsilon(45, 50, 100)


def test_the_bound_holds_for_randomized_response() -> None:
    """Answers that are right with probability e^ε / (1 + e^ε) are ε-private: a bound above ε would be wrong, and with
    95 % confidence it may be in one of 20 runs."""
    draws, epsilon, wrong = np.random.default_rng(0), 1.0, 0
    found = []
    for _ in range(60):
        is_in = draws.random(400) < 0.5
        truthful = draws.random(400) < 1 / (1 + np.exp(-epsilon))
        scores = np.where(is_in == truthful, 1.0, -1.0) + 0.01 * draws.random(400)
        found.append(statistics.best_guesses(scores, is_in).epsilon)
        wrong += found[-1] > epsilon
    assert wrong <= 7
    assert np.median(found) > 0.5, "and it is worth something"


def test_more_canaries_can_prove_more() -> None:
    few, many = (statistics.best_guesses(np.arange(n, 0, -1.0), np.arange(n) < n / 2) for n in (40, 400))
    assert few.epsilon == few.most < many.epsilon == many.most
    assert many.right == many.guesses == 400
