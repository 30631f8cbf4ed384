"""Heat maps of who learns from whom, in whatever way a method says so."""

from collections.abc import Sequence
from math import floor, log10
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from protofed.api.views import Relation
from protofed.reports.analysis.drawing import CannotDraw, Drawing, Group, Options, Table, grouped
from protofed.reports.analysis.style import MANY, MARKERS, SMALL, label, panels, tidy
from protofed.reports.analysis.views import Observer, chosen_rounds
from protofed.runs.loading import SavedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

NAMED = 26
"""Up to so many rows have their names on the axis."""
WRITTEN = 10
"""Up to so many columns have their numbers in the cells."""

Found = dict[str, dict[int, Relation]]
"""The relations of a run, by title and round."""


def relations(runs: Sequence[SavedRun], options: Options) -> Drawing:
    """A picture for each run whose method has relations: one row for each relation, one column for each round."""
    figures, rows, places = {}, list[tuple[Any, ...]](), list[tuple[Any, ...]]()
    groups = grouped(runs)
    for group in groups:
        found = _found(group, options)
        for title, by_round in found.items():
            for number, one in by_round.items():
                rows += _cells(group.label, title, number, one)
                places += _places(group.label, title, number, one)
        if found:
            figures[group.label if len(groups) > 1 else ""] = _drawn(group.label, found)
    if not figures:
        names = ", ".join(dict.fromkeys(group.method for group in groups))
        raise CannotDraw(f"no client learns from certain others in these states of {names}: there is no such relation")
    tables = {"": Table(("run", "relation", "round", "row", "column", "value"), rows)}
    if places:
        tables["places"] = Table(("run", "relation", "round", "row", "cluster", "x", "y"), places)
    return Drawing(figures, tables)


def _found(group: Group, options: Options) -> Found:
    run, found = group.runs[0], Found()
    for number in chosen_rounds(run, options.rounds, most=3):
        options.tell(f"relations of {group.label}, round {number}")
        result = run.at(number)
        method, observer = result.federation.method, Observer(result)
        for title, one in method.relations(result.state.server, observer).items():
            found.setdefault(title, {})[number] = one
    return found


def _cells(name: str, title: str, number: int, one: Relation) -> list[tuple[Any, ...]]:
    values = one.values.tolist()
    return [
        (name, title, number, row, column, values[i][j])
        for i, row in enumerate(one.rows)
        for j, column in enumerate(one.columns)
    ]


def _places(name: str, title: str, number: int, one: Relation) -> list[tuple[Any, ...]]:
    if one.layout is None:
        return []
    groups: Sequence[Any] = one.groups or [""] * len(one.rows)
    rows = zip(one.rows, groups, one.layout.tolist(), strict=True)
    return [(name, title, number, row, cluster, *place) for row, cluster, place in rows]


def _drawn(name: str, found: Found) -> "Figure":
    """What does not change from round to round is drawn once."""
    shown = {title: _without_repeats(by_round) for title, by_round in found.items()}
    widest = max(len(own) + 2 * any(r.layout is not None for r in own.values()) for own in shown.values())
    figure, axes = panels(len(shown), widest, (3.9, 3.5))
    for row, (title, by_round) in zip(axes, shown.items(), strict=True):
        every = np.concatenate([r.values.numpy().ravel() for r in by_round.values()])
        free, maps = iter(row), list["AxesImage"]()
        for number, one in by_round.items():
            said = f"round {number}" if maps else f"{title}, round {number}" if len(by_round) > 1 else title
            maps.append(_heat_map(next(free), one, said, (float(every.min()), float(every.max()))))
        last = list(by_round.values())[-1]
        bar = figure.colorbar(maps[0], ax=row[: len(maps)], shrink=0.85, aspect=25)
        bar.set_label(last.says, fontsize=SMALL)
        bar.ax.tick_params(labelsize=SMALL - 1)
        if last.layout is not None:
            _scatter(next(free), next(free), last)
        for axis in free:
            axis.set_axis_off()
    figure.suptitle(label([name], 80)[0], fontsize=11)
    return figure


def _without_repeats(by_round: dict[int, Relation]) -> dict[int, Relation]:
    numbers = list(by_round)
    same = all(_equal(by_round[numbers[0]], other) for other in by_round.values())
    return {numbers[-1]: by_round[numbers[-1]]} if same else by_round


def _equal(a: Relation, b: Relation) -> bool:
    return a.values.shape == b.values.shape and bool((a.values == b.values).all())


def _heat_map(axis: "Axes", one: Relation, title: str, ends: tuple[float, float]) -> "AxesImage":
    order = _order(one)
    is_square = list(one.rows) == list(one.columns)
    values: NDArray[Any] = one.values.numpy()[order]
    values = values[:, order] if is_square else values
    low, high = ends
    if low < 0 < high:
        most = max(-low, high)
        style: dict[str, Any] = {"cmap": "PuOr", "vmin": -most, "vmax": most}
    else:
        style = {"cmap": "cividis", "vmin": low, "vmax": high}
    image = axis.imshow(values, aspect="equal" if is_square else "auto", interpolation="nearest", **style)
    rows, columns = [one.rows[k] for k in order], [one.columns[k] for k in order] if is_square else list(one.columns)
    _name_axes(axis, rows, columns)
    axis.set_title(label([title], 60)[0], fontsize=9)
    axis.set_ylabel("who takes" if is_square and not one.groups else "", fontsize=SMALL)
    axis.set_xlabel(one.by or ("from whom" if is_square and not one.groups else ""), fontsize=SMALL)
    if values.shape[1] <= WRITTEN and len(values) <= 1.5 * WRITTEN:
        _write_cells(axis, values, image)
    if one.groups:
        _part_groups(axis, [one.groups[k] for k in order], is_square)
    return image


def _order(one: Relation) -> list[int]:
    """Rows of one cluster beside each other."""
    return sorted(range(len(one.rows)), key=lambda k: (one.groups[k] if one.groups else 0, k))


def _name_axes(axis: "Axes", rows: Sequence[str], columns: Sequence[str]) -> None:
    are_few = len(rows) <= NAMED, len(columns) <= NAMED
    axis.set_yticks(range(len(rows)) if are_few[0] else [], label(rows, 14) if are_few[0] else [], fontsize=SMALL - 1.5)
    names = label(columns, 18) if are_few[1] else []
    axis.set_xticks(range(len(columns)) if are_few[1] else [], names, fontsize=SMALL - 1.5, rotation=90)


def _write_cells(axis: "Axes", values: NDArray[Any], image: Any) -> None:
    spread = float(values.max() - values.min())
    digits = min(4, max(2, 2 - floor(log10(spread)))) if spread else 2
    for i, line in enumerate(values):
        for j, value in enumerate(line):
            red, green, blue, _ = image.cmap(image.norm(value))
            is_dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
            colour = "white" if is_dark else "black"
            axis.text(j, i, f"{value:.{digits}f}", ha="center", va="center", fontsize=SMALL - 2.5, color=colour)


def _part_groups(axis: "Axes", groups: Sequence[int], is_square: bool) -> None:
    """White lines between clusters."""
    for k in range(1, len(groups)):
        if groups[k] != groups[k - 1]:
            axis.axhline(k - 0.5, color="white", linewidth=1.5)
            if is_square:
                axis.axvline(k - 0.5, color="white", linewidth=1.5)


def _scatter(axis: "Axes", beside: "Axes", one: Relation) -> None:
    """Where rows lie, and beside it what the marks mean."""
    assert one.layout is not None
    groups, places = list(one.groups) or [0] * len(one.rows), one.layout.numpy()
    for k, group in enumerate(sorted(set(groups))):
        own = [i for i, g in enumerate(groups) if g == group]
        colour, marker = MANY[k % len(MANY)], MARKERS[k % len(MARKERS)]
        x, y = places[own].T
        names = label([one.rows[i] for i in own[:3]], 14)
        said = ", ".join(names) + (f" and {len(own) - 3} more" if len(own) > 3 else "")
        axis.scatter(x, y, s=34, color=colour, marker=marker, label=f"{group}: {said}")
    axis.margins(0.12)
    beside.set_axis_off()
    legend = beside.legend(*axis.get_legend_handles_labels(), fontsize=SMALL - 1, loc="upper left", frameon=False)
    legend.set_title("cluster")
    legend.get_title().set_fontsize(SMALL - 1)
    tidy(axis, "clients over principal components", *one.axes)
