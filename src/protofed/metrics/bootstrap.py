"""Confidence intervals of metrics, by drawing the test examples again.

A confusion matrix says of each test example which class it has and which it was given. Drawing N of N examples with
replacement is drawing from a multinomial distribution over its cells.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protofed.errors import BadInput
from protofed.metrics.formulas import Counts

DRAWS = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    low: float
    high: float


def resampled(confusion: Counts, draws: int = DRAWS, seed: int = 0) -> NDArray[np.int64]:
    """(draws, C, C), confusion matrices of test sets that are drawn from this one, as large as it is."""
    counts = np.asarray(confusion, dtype=np.int64)
    total = counts.sum()
    if total == 0:
        raise BadInput("no confidence interval: the test set has no examples")
    cells = np.random.default_rng(seed).multinomial(total, counts.ravel() / total, size=draws)
    return cells.reshape(draws, *counts.shape)


def bootstrap_interval(
    confusion: Counts,
    formula: Callable[[NDArray[np.int64]], float],
    level: float = LEVEL,
    draws: int = DRAWS,
    seed: int = 0,
) -> Interval | None:
    """The percentile interval of a metric of the confusion matrix. Draws for which it is not a number are left out.

    None if all draws give the same value, as when every example was classified right: then drawing again cannot tell
    how sure the value is.
    """
    values = np.array([formula(one) for one in resampled(confusion, draws, seed)], dtype=np.float64)
    values = values[~np.isnan(values)]
    if not len(values) or values.min() == values.max():
        return None
    # Values that were drawn, not means between two of them: a share of N examples is k / N.
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2], method="inverted_cdf")
    return Interval(float(low), float(high))
