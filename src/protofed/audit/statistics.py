"""The statistics of audits: how well scores tell members from others, and how sure that is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from protofed.metrics.bootstrap import LEVEL, Interval

T = TypeVar("T")
Scores = NDArray[np.float64]
Pair = tuple[Scores, Scores]
"""Scores of members and of others."""

DRAWS = 1000
"""Of a bootstrap."""


@dataclass(frozen=True)
class Share:
    """A share of so many, with its interval after Clopper and Pearson."""

    value: float
    interval: Interval
    count: int


def auc(members: Scores, others: Scores) -> float:
    """The chance that a member scores higher than another; equal scores count half."""
    ordered = np.sort(others)
    below = np.searchsorted(ordered, members, "left") + np.searchsorted(ordered, members, "right")
    return float(below.sum() / (2 * len(members) * len(others)))


def roc(members: Scores, others: Scores) -> tuple[Scores, Scores]:
    """False and true positive rates at every threshold, from 0 to 1."""
    thresholds = np.unique(np.concatenate([members, others]))[::-1]
    rates = [1 - np.searchsorted(np.sort(scores), thresholds, "left") / len(scores) for scores in (others, members)]
    false, true = (np.concatenate([[0.0], rate]) for rate in rates)
    return false, true


def clopper_pearson(hits: int, trials: int, level: float = LEVEL) -> Interval:
    """The exact interval of a share."""
    from scipy.special import betaincinv

    tail = (1 - level) / 2
    low = 0.0 if hits == 0 else float(betaincinv(hits, trials - hits + 1, tail))
    high = 1.0 if hits == trials else float(betaincinv(hits + 1, trials - hits, 1 - tail))
    return Interval(low, high)


def share_of(hits: int, trials: int) -> Share:
    return Share(hits / trials, clopper_pearson(hits, trials), trials)


def found_at(members: Scores, others: Scores, rate: float) -> Share | None:
    """The share of members above a threshold that at most this share of the others is above. None with so few others
    that not even one of them may be."""
    allowed = int(rate * len(others) + 1e-9)
    if not allowed:
        return None
    threshold = np.sort(others)[-allowed - 1] if allowed < len(others) else -np.inf
    return share_of(int((members > threshold).sum()), len(members))


def over_clients(
    statistic: Callable[[Sequence[T]], float | None], clients: Sequence[T], draws: int = DRAWS, seed: int = 0
) -> Interval | None:
    """The percentile interval of a statistic when clients are drawn again, with replacement: what another federation of
    such clients might have shown. None with fewer than three clients."""
    if len(clients) < 3:
        return None
    chosen = np.random.default_rng(seed).integers(len(clients), size=(draws, len(clients)))
    found = [statistic([clients[k] for k in one]) for one in chosen]
    values = [value for value in found if value is not None]
    if not values:
        return None
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(low), float(high))


def pooled(pairs: Sequence[Pair]) -> Pair:
    """The scores of several clients together."""
    return np.concatenate([members for members, _ in pairs]), np.concatenate([others for _, others in pairs])


def pooled_auc(pairs: Sequence[Pair]) -> float:
    return auc(*pooled(pairs))


def correlation(a: Scores, b: Scores) -> float | None:
    """After Pearson; None if one of the two is constant."""
    x, y = a - a.mean(), b - b.mean()
    length = float(np.sqrt((x**2).sum() * (y**2).sum()))
    return float((x * y).sum() / length) if length > 0 else None


def matched(first: Any, second: Any, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions in two lists of labels, drawn so that both have as many of each label, and as many as there can be."""
    draws = np.random.default_rng(seed)
    chosen: list[list[NDArray[np.int64]]] = [[], []]
    labels = np.asarray(first), np.asarray(second)
    for label in np.intersect1d(*labels):
        own = [draws.permutation(np.flatnonzero(each == label)) for each in labels]
        count = min(map(len, own))
        for kept, positions in zip(chosen, own, strict=True):
            kept.append(positions[:count])
    ends = [np.sort(np.concatenate(kept)) if kept else np.zeros(0, dtype=np.int64) for kept in chosen]
    return ends[0], ends[1]


# ---- one run with canaries


def chance_of(right: int, guesses: int, canaries: int, epsilon: float, delta: float = 0.0) -> float:
    """A bound on the chance of at least so many right guesses if the mechanism is (ε, δ)-private: Theorem 5.2 of
    Steinke, Nasr, Jagielski, Privacy Auditing with One (1) Training Run, NeurIPS 2023."""
    from scipy.special import bdtrc

    at_least = np.arange(right + 1)[::-1]  # right, right − 1, …, 0
    tails = np.where(at_least > 0, bdtrc(at_least - 1.0, guesses, 1 / (1 + exp(-epsilon))), 1.0)
    bound = float(tails[0])
    if delta and right:
        bound += 2 * canaries * delta * float(((tails[1:] - tails[0]) / np.arange(1, right + 1)).max())
    return min(bound, 1.0)


def least_epsilon(right: int, guesses: int, canaries: int, delta: float = 0.0, doubt: float = 1 - LEVEL) -> float:
    """The largest ε that so many right guesses rule out, at this chance of being wrong; 0 if none."""
    if chance_of(right, guesses, canaries, 0.0, delta) >= doubt:
        return 0.0
    low, high = 0.0, 1.0
    while chance_of(right, guesses, canaries, high, delta) < doubt:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if chance_of(right, guesses, canaries, middle, delta) < doubt else (low, middle)
    return low


def best_guesses(scores: Scores, is_in: NDArray[np.bool_], delta: float = 0.0) -> "Guessed":
    """Guesses that the highest scores are in and the lowest are not, for an eighth, a quarter, a half and all of the
    canaries. Each of the four may be wrong with a quarter of the doubt, so that the best of them may be reported."""
    order, total = np.argsort(-scores, kind="stable"), len(scores)
    found = []
    for part in (8, 4, 2, 1):
        half = total // (2 * part)
        right = int(is_in[order[:half]].sum() + (~is_in[order[total - half :]]).sum())
        doubt = (1 - LEVEL) / 4
        most = least_epsilon(2 * half, 2 * half, total, delta, doubt)
        found.append(Guessed(least_epsilon(right, 2 * half, total, delta, doubt), right, 2 * half, most))
    best = max(found, key=lambda one: one.epsilon)
    return Guessed(best.epsilon, best.right, best.guesses, max(one.most for one in found))


@dataclass(frozen=True)
class Guessed:
    """What guesses about canaries show."""

    epsilon: float
    """The run is not (ε', δ)-private for any ε' below this."""
    right: int
    guesses: int
    most: float
    """What it would have been with every guess right: no audit with so few canaries shows more."""
