"""Pictures of how runs went."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from protofed.metrics.registry import METRICS
from protofed.printable import one_line
from protofed.reports.tables import Headline, Row, metric
from protofed.runs.results import Round
from protofed.runs.store.checkpoint import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#000000")

AXES = {"own": "what clients see at home", "average": "average over the domains"}


DPI = 130
FEW_POINTS = 10
"""Up to so many points of a line are marked: a single one would not be seen otherwise."""


def save_figure(figure: "Figure", path: Path, grows: bool = False) -> None:
    """A picture as a file, in the place of what was there, also of a link. It may grow to hold all of its labels."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DPI, bbox_inches="tight" if grows else None, pad_inches=0.1)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, drawn.getvalue())  # guard: pictures-not-through-links


def accuracy_over_rounds(
    runs: Mapping[str, Sequence[Sequence[Round]]],
    path: Path,
    title: str,
    headline: Headline = "average",
    metrics: Sequence[str] = (),
) -> None:
    """One panel per domain and one for the headline, or one for each of these metrics, by id; one line per method, the
    mean of its seeds in their range. A method that lacks a domain or a metric has no line there."""
    from matplotlib.figure import Figure  # slow imports that only pictures need
    from matplotlib.ticker import MaxNLocator

    seen = (r for seeds in runs.values() for r in seeds[0] if r.is_evaluated)
    domains = dict.fromkeys(domain for r in seen for domain in r.domains)
    panels = [Panel(key, is_metric=True) for key in metrics] or [*map(Panel, domains), Panel(headline, is_metric=True)]
    figure = Figure(figsize=(3.1 * len(panels) + 1.2, 3.4), layout="constrained")
    axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    lines = {}
    for axis, panel in zip(axes, panels, strict=True):
        for (method, seeds), colour in zip(runs.items(), COLOURS, strict=False):
            curves = [panel.curve(rounds, headline) for rounds in seeds]
            shown = [number for number in curves[0] if all(number in curve for curve in curves)]
            values = [[curve[number] for curve in curves] for number in shown]
            dots = {"marker": "o", "markersize": 4} if len(shown) <= FEW_POINTS else {}
            lines[method] = axis.plot(shown, [fmean(v) for v in values], color=colour, linewidth=1.8, **dots)[0]
            axis.fill_between(shown, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.15)
        axis.set_title(plain(panel.title), fontsize=11, fontweight="bold" if panel.is_metric else "normal")
        axis.set_xlabel("round")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("%" if metrics else "accuracy, %")
    axes[0].set_ylim(0, 100)
    names = [plain(method) for method in lines]
    axes[-1].legend([*lines.values()], names, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
    figure.suptitle(plain(title), fontsize=12)
    save_figure(figure, path)


def standings(rows: Sequence[Row], path: Path, title: str, by: str = "average") -> None:
    """Every method by one metric, a dot for each seed and a bar for their mean, the best at the top."""
    from matplotlib.figure import Figure

    ended = sorted((row for row in rows if row.values(metric(by))), key=lambda row: row.mean(metric(by)))
    figure = Figure(figsize=(7.5, 0.26 * len(ended) + 1.2), layout="constrained")
    axis = figure.subplots()
    for height, row in enumerate(ended):
        values = [100 * value for value in row.values(metric(by))]
        colour = COLOURS[1] if row.is_reference else COLOURS[0]
        axis.barh(height, fmean(values), color=colour, alpha=0.35)
        axis.plot(values, [height] * len(values), "o", color=colour, markersize=3.5)
    axis.set_yticks(range(len(ended)), [plain(row.name) for row in ended], fontsize=9)
    axis.set_xlabel(f"{Panel(by, is_metric=True).title}, %")
    axis.set_xlim(left=0)
    axis.set_ylim(-0.7, len(ended) - 0.3)
    axis.grid(axis="x", alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(plain(title), fontsize=12)
    save_figure(figure, path)


@dataclass(frozen=True)
class Panel:
    """What one part of a picture shows: a domain, or a metric by its id."""

    key: str
    is_metric: bool = False

    @property
    def title(self) -> str:
        labels = {one.id: one.label for one in METRICS}
        return AXES.get(self.key) or labels.get(self.key, self.key) if self.is_metric else self.key

    def curve(self, rounds: Sequence[Round], headline: Headline) -> dict[int, float]:
        """Percent, by the number of the round, where it was measured."""
        return {r.round: 100 * value for r in rounds if (value := self._value(r, headline)) is not None}

    def _value(self, one: Round, headline: Headline) -> float | None:
        if self.is_metric:
            return one.metric(self.key)
        return (one.own_domains if headline == "own" else one.domains).get(self.key, {}).get("accuracy")


def plain(name: str) -> str:
    """A name in which matplotlib finds no formula, and nothing that cannot be drawn."""
    return one_line(name).replace("$", r"\$")
