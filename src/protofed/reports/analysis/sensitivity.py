"""Results over a setting: lines where it is a number, bars where parts of a method are switched."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from protofed.reports.analysis.drawing import (
    CannotDraw,
    Drawing,
    Group,
    Options,
    Table,
    chosen_metric,
    grouped,
    metric_title,
    short,
    varying,
)
from protofed.reports.analysis.style import COLOURS, FEW, MARKERS, SMALL, grid_of, label, panels, tidy
from protofed.runs.loading import SavedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes


REFERENCE, MOST_REFERENCES = "fedavg", 3


@dataclass(frozen=True)
class Series:
    """Groups of one method that differ in one number."""

    method: str
    key: str
    others: str
    """The other settings in which groups of this method differ, as they are here."""
    points: Mapping[float, Group]


def sensitivity(runs: Sequence[SavedRun], options: Options) -> Drawing:
    """A panel for each number in which runs of one method differ, with that number on the axis."""
    groups = grouped(runs)
    metric = chosen_metric(groups, options.metric)
    found = series(groups)
    if not found:
        raise CannotDraw("no two of these runs differ in one number only, apart from their seeds")
    keys = list(dict.fromkeys((s.method, s.key) for s in found))
    references = _references([g for g in groups if all(g.method != s.method for s in found)])
    rows, columns = grid_of(len(keys), 3)
    figure, axes = panels(rows, columns, (3.6, 2.9), sharey=True)
    free = [axis for row in axes for axis in row]
    for axis, (method, key) in zip(free, keys, strict=False):
        _lines(axis, [s for s in found if (s.method, s.key) == (method, key)], references, metric)
        tidy(axis, method if len({m for m, _ in keys}) > 1 else "", short(key), metric_title(metric))
        axis.legend(fontsize=SMALL - 1.5, frameon=False)
    for axis in free[len(keys) :]:
        axis.set_axis_off()
    return Drawing({"": figure}, {"": Table(HEADER, [row for s in found for row in _rows(s, metric)])})


def _references(others: Sequence[Group]) -> list[Group]:
    """Methods to compare with: FedAvg if it is there, otherwise up to three."""
    return [g for g in others if g.method == REFERENCE] or list(others[:MOST_REFERENCES])


HEADER = ("method", "setting", "value", "other settings", "run", "seed", "metric", "result")


def series(groups: Sequence[Group]) -> list[Series]:
    """For each method and each number in which its groups differ: those that are equal in all else."""
    found = []
    for method in dict.fromkeys(g.method for g in groups):
        own = [g for g in groups if g.method == method]
        keys = varying([g.settings for g in own])
        for key in (key for key in keys if all(is_number(g.settings[key]) for g in own)):
            rest = [other for other in keys if other != key]
            parts: dict[str, dict[float, Group]] = {}
            for group in own:
                said = ", ".join(f"{short(k)} {group.settings[k]}" for k in rest)
                parts.setdefault(said, {})[group.settings[key]] = group
            found += [Series(method, key, said, points) for said, points in parts.items() if len(points) > 1]
    return found


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _rows(one: Series, metric: str) -> list[tuple[Any, ...]]:
    return [
        (one.method, one.key, value, one.others, group.label, run.config.training.seed, metric, result)
        for value, group in sorted(one.points.items())
        for run, result in zip(group.runs, group.values(metric), strict=True)
    ]


def _lines(axis: "Axes", found: Sequence[Series], references: Sequence[Group], metric: str) -> None:
    if len(found) > FEW:
        raise CannotDraw(f"{len(found)} lines over {found[0].key} cannot be told apart: give fewer runs")
    several = len(found) > 1
    for k, one in enumerate(found):
        values = sorted(one.points)
        results = [[100 * v for v in one.points[value].values(metric)] for value in values]
        name = label([one.others if several else one.method], 40)[0]
        means, marker = [fmean(r) for r in results], MARKERS[k % len(MARKERS)]
        axis.plot(values, means, "-", color=COLOURS[k], marker=marker, ms=5, lw=1.6, label=name)
        for value, seeds in zip(values, results, strict=True):
            axis.plot([value] * len(seeds), seeds, ".", color=COLOURS[k], ms=4, alpha=0.6)
    for k, group in enumerate(references):
        mean = 100 * fmean(group.values(metric))
        axis.axhline(mean, color="black", linestyle=("--", ":", "-.")[k], lw=1.2, label=label([group.label], 40)[0])
    everywhere = sorted({value for one in found for value in one.points})
    if everywhere[0] > 0 and everywhere[-1] >= 8 * everywhere[0]:
        axis.set_xscale("log")
    axis.set_xticks(everywhere, [f"{value:g}" for value in everywhere])
    axis.minorticks_off()


# ---- switched parts


def ablation(runs: Sequence[SavedRun], options: Options) -> Drawing:
    """A bar for each group of runs of a method that differ in what is no number; other methods beside them, in grey."""
    every = grouped(runs)
    metric = chosen_metric(every, options.metric)
    by_method = {m: [g for g in every if g.method == m] for m in dict.fromkeys(g.method for g in every)}
    switched = [method for method, own in by_method.items() if _switched(own)]
    if not switched:
        raise CannotDraw("no two of these runs of one method differ in a part that is switched on or off, or exchanged")
    groups = [g for m, own in by_method.items() for g in (_alike(own) if m in switched else own)]
    rows = [
        (group.label, run.config.training.seed, metric, result)
        for group in groups
        for run, result in zip(group.runs, group.values(metric), strict=True)
    ]
    figure, axes = panels(1, 1, (6.2, 0.34 * len(groups) + 0.9))
    axis = axes[0][0]
    for height, group in enumerate(reversed(groups)):
        values = [100 * v for v in group.values(metric)]
        colour = COLOURS[switched.index(group.method) % 6] if group.method in switched else "#888888"
        axis.barh(height, fmean(values), color=colour, alpha=0.45)
        axis.plot(values, [height] * len(values), "o", color=colour, ms=3.5)
        axis.annotate(
            f"{fmean(values):.1f}", (max(values), height), (6, 0), textcoords="offset points", va="center", size=8
        )
    names = label([g.label for g in reversed(groups)], 60)
    tidy(axis, "", metric_title(metric), "")
    axis.set_yticks(range(len(groups)), names, fontsize=SMALL)
    axis.set_xlim(*_ends([100 * row[3] for row in rows]))
    axis.grid(axis="y", visible=False)
    return Drawing({"": figure}, {"": Table(("run", "seed", "metric", "result"), rows)})


def _switched(groups: Sequence[Group]) -> list[str]:
    keys = varying([g.settings for g in groups])
    return [key for key in keys if key.startswith("method.") and not all(is_number(g.settings[key]) for g in groups)]


def _alike(groups: Sequence[Group]) -> list[Group]:
    """Of groups that also differ in numbers, those that have the most frequent ones: else a bar would say nothing of
    the part that is switched."""
    numbers = [k for k in varying([g.settings for g in groups]) if all(is_number(g.settings[k]) for g in groups)]
    keys = [tuple(g.settings[k] for k in numbers) for g in groups]
    most = max(keys, key=keys.count)
    return [g for g, key in zip(groups, keys, strict=True) if key == most]


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """From 0 where that shows the differences, otherwise from a little below the least."""
    low, high = min(values), max(values)
    spread = max(high - low, 1.0)
    return (0.0 if spread > 0.25 * high else low - 0.6 * spread), high + 0.18 * max(spread, 0.2 * (high - low))
