"""What each site of a run gets: its own numbers, how sure they are, and which classes are confused."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.markup import escape
from rich.table import Table

from protofed.api.task import ClientId
from protofed.evaluation.evaluate import Confusion
from protofed.metrics import formulas
from protofed.metrics.bootstrap import Interval, bootstrap_interval
from protofed.printable import one_line
from protofed.runs.results import Round, best_by_validation

MAX_CLASSES = 12
"""Confusion matrices with more classes are not printed."""
MEASURES: Mapping[str, Callable[[NDArray[np.int64]], float]] = {
    "accuracy": formulas.accuracy,
    "balanced": formulas.balanced_accuracy,
    "macro-F1": formulas.macro_f1,
}
NOTES = (
    "balanced: mean of the classes' sensitivities. majority: the accuracy of always naming the most frequent class.",
    "In brackets: 95 % confidence interval, by drawing the test examples again 2000 times; none where all draws agree, "
    "as when every example is right.",
)


@dataclass(frozen=True)
class SiteResult:
    """The model that a site uses, on the site's own test examples."""

    site: ClientId
    confusion: NDArray[np.int64]  # (C, C)
    is_held_out: bool = False
    auc: float | None = None

    @property
    def num_tested(self) -> int:
        return int(self.confusion.sum())

    @property
    def majority(self) -> float:
        return formulas.majority_rate(self.confusion)

    @cached_property
    def measures(self) -> dict[str, tuple[float, Interval | None]]:
        """Each measure, and its confidence interval."""
        return {
            name: (formula(self.confusion), bootstrap_interval(self.confusion, formula))
            for name, formula in MEASURES.items()
        }

    def sensitivity(self, label: int) -> tuple[float, Interval | None]:
        """The share of a class's examples that was found. Examples of the class are drawn again, no others."""
        row = self.confusion[label]
        pair = np.array([[row[label], row.sum() - row[label]], [0, 0]])
        return float(formulas.sensitivities(self.confusion)[label]), bootstrap_interval(pair, formulas.accuracy)

    @property
    def only_prediction(self) -> int | None:
        """The class that was predicted for every example, although the test set has others; None if there is none."""
        predicted, present = self.confusion.sum(0).nonzero()[0], self.confusion.sum(1).nonzero()[0]
        return int(predicted[0]) if len(predicted) == 1 and len(present) > 1 else None

    def facts(self, classes: Sequence[str]) -> dict[str, Any]:
        """All numbers, for JSON."""
        names = {"accuracy": "accuracy", "balanced": "balanced_accuracy", "macro-F1": "macro_f1"}
        values = {names[name]: found for name, found in self.measures.items()}
        present = self.confusion.sum(1).nonzero()[0].tolist()
        return {
            "test_examples": self.num_tested,
            "held_out": self.is_held_out,
            **{name: {"value": value, "interval": _pair(interval)} for name, (value, interval) in values.items()},
            "majority_rate": self.majority,
            **({} if self.auc is None else {"auc": self.auc}),
            "sensitivity": {class_name(classes, k): self.sensitivity(k)[0] for k in present},
            "confusion": self.confusion.tolist(),
        }


def reported_round(rounds: Sequence[Round]) -> Round | None:
    """The round that a site's numbers are of: the best by validation or, without validation, the last evaluated."""
    evaluated = [r for r in rounds if r.is_evaluated]
    return best_by_validation(evaluated) or (evaluated[-1] if evaluated else None)


def site_results(one: Round) -> list[SiteResult]:
    """Of each site that was tested, those that were held out last."""
    results = [_result(one, site, counts) for site, counts in one.confusion.items()]
    return sorted(results, key=lambda result: result.is_held_out)


def _result(one: Round, site: ClientId, counts: Confusion) -> SiteResult:
    scores = one.new.get(site) or one.at_home.get(site, {})
    return SiteResult(site, np.array(counts, dtype=np.int64), site in one.new, scores.get("auc"))


def class_name(classes: Sequence[str], label: int) -> str:
    return classes[label] if label < len(classes) else str(label)


def site_table(results: Sequence[SiteResult], title: str) -> Table:
    """A row for each site, and the mean over the sites that train."""
    table = _table(title)
    areas = any(result.auc is not None for result in results)
    table.add_column("site")
    for name in ("tested", *MEASURES, *(["AUC"] if areas else []), "majority"):
        table.add_column(name, justify="right")
    for result in results:
        name = f"{one_line(result.site)}{' (held out)' if result.is_held_out else ''}"
        auc = ["–" if result.auc is None else _percent(result.auc)] if areas else []
        cells = [
            _percent(value) if name == "macro-F1" else _with_interval(value, interval)
            for name, (value, interval) in result.measures.items()
        ]
        table.add_row(escape(name), str(result.num_tested), *cells, *auc, _percent(result.majority))
    home = [result for result in results if not result.is_held_out]
    if len(home) > 1:
        means = [float(np.mean([result.measures[name][0] for result in home])) for name in MEASURES]
        found = [result.auc for result in home if result.auc is not None]
        auc = [_percent(float(np.mean(found))) if found else "–"] if areas else []
        majority = _percent(float(np.mean([result.majority for result in home])))
        table.add_section()
        table.add_row("mean", "", *map(_percent, means), *auc, majority, style="bold")
    return table


def class_table(results: Sequence[SiteResult], classes: Sequence[str]) -> Table | None:
    """A row for each class at each site: how many were found, and what they were taken for. None if there are too many
    classes to print."""
    count = len(results[0].confusion) if results else 0
    if not 0 < count <= MAX_CLASSES:
        return None
    table = _table("What each class was taken for, in test examples")
    for name in ("site", "class"):
        table.add_column(name)
    for name in ("tested", "sensitivity, %", *(f"→ {one_line(class_name(classes, k))}" for k in range(count))):
        table.add_column(escape(name), justify="right")
    for result in results:
        present = result.confusion.sum(1).nonzero()[0].tolist()
        for k in present:
            row = [str(number) if number else "·" for number in result.confusion[k].tolist()]
            site = one_line(result.site) if k == present[0] else ""
            total = str(int(result.confusion[k].sum()))
            table.add_row(
                escape(site),
                escape(one_line(class_name(classes, k))),
                total,
                _with_interval(*result.sensitivity(k)),
                *row,
                end_section=k == present[-1],
            )
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _with_interval(value: float, interval: Interval | None) -> str:
    if interval is None:
        return _percent(value)
    return f"{_percent(value)} \\[{100 * interval.low:.0f}–{100 * interval.high:.0f}]"


def _pair(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]
