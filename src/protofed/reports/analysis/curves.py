"""Accuracy and training loss over rounds; accuracy of the models that clients start from; a calibration's effect."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from protofed.api.evaluation import Outcomes
from protofed.api.requests import Map
from protofed.data.batches import Data
from protofed.engine.federation import Federation
from protofed.reports.analysis.drawing import (
    CannotDraw,
    Drawing,
    Group,
    Options,
    Table,
    chosen_metric,
    grouped,
    metric_title,
)
from protofed.reports.analysis.style import COLOURS, FEW, LINES, MARKERS, SMALL, grid_of, label, panels, tidy
from protofed.reports.analysis.views import chosen_rounds
from protofed.runs.loading import SavedRun
from protofed.runs.results import Result, Round
from protofed.tree import Params, Tree

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LONG = 30
"""Runs of more evaluated rounds are smoothed."""
CLIENTS = 30
"""Clients whose initial models are tested; of more, so many are taken evenly."""

Curve = dict[int, list[float]]
"""The values of all seeds, by round."""


def curves(runs: Sequence[SavedRun], options: Options) -> Drawing:
    """A panel for the metric and one for the training loss; of many runs one for each, with the others in grey."""
    groups = grouped(runs)
    metric = chosen_metric(groups, options.metric)
    scores = {g.label: _curve(g, lambda r: _percent(r.metric(metric))) for g in groups}
    losses = {g.label: _curve(g, lambda r: r.loss if r.round else None) for g in groups}
    rows = [
        (name, what, number, value)
        for what, of in ((metric, scores), ("training loss", losses))
        for name, curve in of.items()
        for number, values in curve.items()
        for value in values
    ]
    shown = {metric_title(metric): scores} | ({"training loss": losses} if any(losses.values()) else {})
    return Drawing(
        {_word(title, metric): _over_rounds({title: of}) for title, of in shown.items()}
        if len(groups) > FEW
        else {"": _over_rounds(shown)},
        {"": Table(("run", "what", "round", "value"), rows)},
    )


def _word(title: str, metric: str) -> str:
    return "loss" if title == "training loss" else metric


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _curve(group: Group, of: Callable[[Round], float | None]) -> Curve:
    found: Curve = {}
    for run in group.runs:
        for r in run.rounds:
            value = of(r)
            if value is not None:
                found.setdefault(r.round, []).append(value)
    return found


def _over_rounds(shown: Mapping[str, Mapping[str, Curve]]) -> Any:
    """One panel for each quantity; a single quantity of many runs has a panel for each run."""
    names = list(next(iter(shown.values())))
    if len(names) <= FEW:
        figure, axes = panels(1, len(shown), (4.2, 3.2))
        for axis, (title, of) in zip(axes[0], shown.items(), strict=True):
            for k, (name, curve) in enumerate(of.items()):
                _line(axis, curve, COLOURS[k], LINES[k % len(LINES)], name)
            _finish(axis, title, [curve for curve in of.values() if curve])
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=min(4, len(names)), fontsize=SMALL, frameon=False
        )
        return figure
    [(title, of)] = shown.items()
    rows, columns = grid_of(len(names))
    figure, axes = panels(rows, columns, (2.6, 2.1), sharex=True, sharey=True)
    free = [axis for row in axes for axis in row]
    for axis, name in zip(free, names, strict=False):
        for other in of.values():
            if other:
                axis.plot(list(other), [fmean(v) for v in other.values()], color="#cccccc", linewidth=0.8)
        _line(axis, of[name], COLOURS[0], "-", name)
        _finish(axis, "", [curve for curve in of.values() if curve])
        axis.set_title(label([name], 40)[0], fontsize=8.5)
        axis.set(xlabel="", ylabel="")
    for axis in free[len(names) :]:
        axis.set_axis_off()
    figure.supylabel(title, fontsize=SMALL + 1)
    figure.supxlabel("round", fontsize=SMALL + 1)
    return figure


def _line(axis: "Axes", curve: Curve, colour: str, style: str, name: str) -> None:
    """The mean of the seeds in their range. A long one is smoothed, with the raw line behind."""
    rounds, means = list(curve), [fmean(values) for values in curve.values()]
    if not rounds:
        return
    width = len(rounds) // 20 if len(rounds) > LONG else 0
    if width:
        axis.plot(rounds, means, color=colour, alpha=0.3, linewidth=0.8)
    axis.plot(rounds, smoothed(means, width), style, color=colour, linewidth=1.8, label=label([name], 40)[0])
    if not width:
        low, high = [min(v) for v in curve.values()], [max(v) for v in curve.values()]
        axis.fill_between(rounds, low, high, color=colour, alpha=0.15, linewidth=0)


def smoothed(values: Sequence[float], width: int) -> list[float]:
    """The mean of up to `width` values on each side and the value itself."""
    return [fmean(values[max(0, k - width) : k + width + 1]) for k in range(len(values))]


def _finish(axis: "Axes", title: str, every: Sequence[Curve]) -> None:
    from matplotlib.ticker import MaxNLocator

    tidy(axis, "", "round", title)
    values = [v for curve in every for own in curve.values() for v in own]
    if title == "training loss" and values and min(values) > 0 and max(values) > 20 * min(values):
        axis.set_yscale("log")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))


# ---- the models that clients start from


def initial(runs: Sequence[SavedRun], options: Options) -> Drawing:
    """Accuracy at home of the models that clients would start the next round from, beside that of the models that they
    use, at the rounds whose states are there; and the training loss of every round."""
    groups, rows = grouped(runs), list[tuple[Any, ...]]()
    for group in groups:
        for run in group.runs:
            for number in chosen_rounds(run, options.rounds, most=12):
                options.tell(f"initial models of {group.label}, round {number}")
                rows += [(group.label, run.config.training.seed, number, *line) for line in _tested(run.at(number))]
    losses = {g.label: _curve(g, lambda r: r.loss if r.round else None) for g in groups}
    figure, axes = panels(1, 2, (4.2, 3.2))
    for k, group in enumerate(groups[: len(COLOURS)]):
        own = [line for line in rows if line[0] == group.label]
        lines = (("starts from", "-", 4), ("uses", ":", 5))
        for what, style, column in lines if any(line[4] != line[5] for line in own) else lines[:1]:
            curve: Curve = {}
            for line in own:
                curve.setdefault(line[2], []).append(100 * line[column])
            means, colour = [fmean(v) for v in curve.values()], COLOURS[k]
            marker, name = MARKERS[k % len(MARKERS)], label([f"{group.label}: {what}"], 44)[0]
            axes[0][0].plot(list(curve), means, style, color=colour, marker=marker, ms=4.5, label=name)
        _line(axes[0][1], losses[group.label], COLOURS[k], LINES[k % len(LINES)], group.label)
    _finish(axes[0][0], "accuracy at home, %", [])
    _finish(axes[0][1], "training loss", [curve for curve in losses.values() if curve])
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=SMALL, frameon=False)
    header = ("run", "seed", "round", "client", "initial model", "model in use")
    return Drawing({"": figure}, {"": Table(header, rows)})


def _tested(result: Result) -> list[tuple[str, float, float]]:
    """The accuracy of what each client would start from, and of what it uses, on its own test set."""
    federation, state = result.federation, result.state
    ids = [client for client in federation.ids if client in federation.testable]
    if not ids:
        raise CannotDraw(f"the clients of {federation.task.name} have no test sets")
    step = max(1, -(-len(ids) // CLIENTS))
    found = []
    for client in ids[::step]:
        message = federation.method.message_for(state.server, client)
        memory = federation.client_state(state, client, message)
        data = home(federation, client)
        used = federation.method.local_weights(message, memory)
        start = federation.method.starting_weights(message, memory)
        in_use = accuracy(federation, client, used, (message, memory), data)
        is_same = all(used[name] is leaf for name, leaf in start.items())
        initially = in_use if is_same else accuracy(federation, client, start, (message, memory), data)
        found.append((client, initially, in_use))
    return found


def home(federation: Federation, client: str) -> Data:
    """What a client sees at home: the test set of its domain, or its own."""
    domain = federation.task.domain_of.get(client)
    if domain is not None:
        return federation.task.tests[domain]
    own = federation.test_sets(client, "own").own
    assert own is not None, "only clients with a test set are asked"
    return own


def accuracy(federation: Federation, client: str, params: Params, known: tuple[Tree, Tree], data: Data) -> float:
    """The share of examples that the method predicts rightly with these weights."""
    networks, transform = federation.networks_of(client), federation.task.transform
    request = Map(networks, params, known, data, transform, 0, federation.method.outcomes, to_cpu=True)
    with federation.runtime.open(federation):
        outcomes: Outcomes = federation.runtime.answers([request])[0]
    return (outcomes.predicted == data.labels.cpu()).to(torch.float64).mean().item()


# ---- before and after a calibration


def calibration(runs: Sequence[SavedRun], options: Options) -> Drawing:
    """The public model's accuracy before and after what the server does to it, mean over the domains."""
    rows = list[tuple[Any, ...]]()
    groups = grouped(runs)
    for group in groups:
        for run in group.runs:
            for number in chosen_rounds(run, options.rounds, most=8):
                options.tell(f"calibration of {group.label}, round {number}")
                rows += [(group.label, run.config.training.seed, number, *line) for line in _variants(run.at(number))]
    if not rows:
        names = ", ".join(dict.fromkeys(group.method for group in groups))
        raise CannotDraw(f"the server calibrates nothing in {names}")
    labels = list(dict.fromkeys(row[0] for row in rows))
    figure, axes = panels(1, len(labels), (4.4, 3.1), sharey=True)
    for axis, name in zip(axes[0], labels, strict=True):
        _bars(axis, [row for row in rows if row[0] == name])
        axis.set_title(label([name], 40)[0], fontsize=10)
    axes[0][0].set_ylabel("mean accuracy of the domains, %", fontsize=SMALL)
    header = ("run", "seed", "round", "model", "domain", "accuracy")
    return Drawing({"": figure}, {"": Table(header, rows)})


def _variants(result: Result) -> list[tuple[str, str, float]]:
    federation, first = result.federation, result.federation.ids[0]
    return [
        (name, domain, accuracy(federation, first, params, (message, None), data))
        for name, (params, message) in federation.method.public_variants(result.state.server).items()
        for domain, data in federation.task.tests.items()
    ]


def _bars(axis: "Axes", rows: Sequence[tuple[Any, ...]]) -> None:
    """Groups of bars, one for each round, with a dot for each seed."""
    rounds, models = list(dict.fromkeys(r[2] for r in rows)), list(dict.fromkeys(r[3] for r in rows))
    width = 0.8 / len(models)
    tops = []
    for k, model in enumerate(models):
        for at, number in enumerate(rounds):
            own = [r for r in rows if r[2] == number and r[3] == model]
            seeds = [100 * fmean(r[5] for r in own if r[1] == seed) for seed in dict.fromkeys(r[1] for r in own)]
            x = at + (k - (len(models) - 1) / 2) * width
            bar = axis.bar(x, fmean(seeds), 0.92 * width, color=COLOURS[k], edgecolor="white", linewidth=0.5)
            bar[0].set(hatch=("", "//", "..")[k % 3], label="" if at else model)
            axis.plot([x] * len(seeds), seeds, "o", color="black", markersize=2.5)
            tops += seeds
    axis.set_xticks(range(len(rounds)), [str(number) for number in rounds])
    tidy(axis, "", "round", "")
    axis.grid(axis="x", visible=False)
    axis.set_ylim(0, min(100.0, 1.25 * max(tops) + 1))
    named = [bar for bar in axis.patches if not str(bar.get_label()).startswith("_") and bar.get_label()]
    axis.legend(handles=named, fontsize=SMALL - 1, frameon=False, loc="upper left")
