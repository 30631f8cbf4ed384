"""Numbers over rounds, small enough for a page: scores are whole numbers of hundredths of a percent."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from typing import Any

from protofed.metrics.registry import METRICS
from protofed.runs.listing import ListedRun
from protofed.runs.results import Round

MOST = 400_000
"""Numbers on one page, of some five bytes each."""
FEWEST = 12
"""Rounds that a curve keeps at least."""
SUMMED = tuple(metric.id for metric in METRICS if metric.group != "domain")


@dataclass(frozen=True)
class Budget:
    """How many rounds of each curve the page has room for."""

    rounds: int
    is_short: bool
    """Whether some rounds are left out."""

    @classmethod
    def of(cls, runs: Sequence[ListedRun], most: int = MOST) -> "Budget":
        longest = max((len(run.rounds) for run in runs), default=0)
        wide = sum(_width(run) for run in runs)
        room = max(FEWEST, most // max(1, wide))
        return cls(room, longest > room)

    def kept(self, rounds: Sequence[Round]) -> list[Round]:
        """Evenly spread, the first and the last among them."""
        if len(rounds) <= self.rounds:
            return list(rounds)
        step = (len(rounds) - 1) / (self.rounds - 1)
        return [rounds[round(k * step)] for k in range(self.rounds)]


def _width(run: ListedRun) -> int:
    """The numbers of one round."""
    last = run.evaluated[-1:]
    scores = sum(2 * len(r.domains) + len(r.at_home) + len(r.new) + len(SUMMED) for r in last)
    return scores + 6


def series(run: ListedRun, budget: Budget) -> dict[str, Any]:
    """Every curve of a run. `round` belongs to what every round has, `at` to the scores of evaluated rounds."""
    every = budget.kept([r for r in run.rounds if r.round])
    judged = budget.kept(run.evaluated)
    clients = dict.fromkeys(client for r in judged for client in (*r.at_home, *r.new))
    return {
        "round": [r.round for r in every],
        "loss": [_significant(r.loss) for r in every],
        "seconds": [_significant(sum(r.seconds.values())) for r in every],
        "kilobytes": [_significant(sum(sum(t.values()) for t in r.traffic.values()) / 1000) for r in every],
        "at": [r.round for r in judged],
        "metrics": _columns({key: [r.metric(key) for r in judged] for key in SUMMED}),
        "domains": _columns(
            {d: [_accuracy(r.domains, d) for r in judged] for d in dict.fromkeys(d for r in judged for d in r.domains)}
        ),
        "own_domains": _columns(
            {
                d: [_accuracy(r.own_domains, d) for r in judged]
                for d in dict.fromkeys(d for r in judged for d in r.own_domains)
            }
        ),
        "clients": _columns({c: [_accuracy({**r.at_home, **r.new}, c) for r in judged] for c in clients}),
    }


def client_means(run: ListedRun) -> dict[str, dict[str, int | None]]:
    """What each client sees at home: every score, the mean of the last five evaluated rounds in which it has one."""
    last = [{**r.at_home, **r.new} for r in run.evaluated[-5:]]
    found: dict[str, dict[str, int | None]] = {}
    for client in sorted({client for scores in last for client in scores}):
        own = [scores[client] for scores in last if client in scores]
        names = dict.fromkeys(name for scores in own for name in scores)
        found[client] = {name: rounded(fmean(scores[name] for scores in own if name in scores)) for name in names}
    return found


def rounded(value: float | None) -> int | None:
    """Hundredths of a percent."""
    return None if value is None or not isfinite(value) else round(10_000 * value)


def _columns(columns: dict[str, list[float | None]]) -> dict[str, list[int | None]]:
    """Without those that have no number."""
    return {key: [*map(rounded, column)] for key, column in columns.items() if _has_number(column)}


def _has_number(column: Iterable[float | None]) -> bool:
    return any(value is not None for value in column)


def _accuracy(scores: Any, key: str) -> float | None:
    found: float | None = scores.get(key, {}).get("accuracy")
    return found


def _significant(value: float | None) -> float | None:
    """Four digits."""
    return None if value is None or not isfinite(value) else float(f"{value:.4g}")
