"""Pictures of audits."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from protofed.audit.membership import Attack
from protofed.audit.prototypes import Records
from protofed.audit.statistics import pooled, roc
from protofed.reports.analysis.style import COLOURS, LINES, label, panels, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEPS = (1, 2, 3, 5, 10, 20, 50, 100)
"""Where the bars of prototypes begin."""
LOWEST = 1e-3
"""Of the rates on logarithmic axes."""


def roc_curves(attacks: Sequence[Attack]) -> "Figure":
    """Members found against false alarms, on plain axes and on logarithmic ones, which show the surest guesses."""
    figure, ((plain, small),) = panels(1, 2, (3.2, 3.0))
    for k, attack in enumerate(attacks):
        false, true = roc(*pooled([*attack.pairs.values()]))
        look: dict[str, Any] = {"color": COLOURS[k % len(COLOURS)], "linestyle": LINES[k % len(LINES)]}
        plain.plot(false, true, label=f"{label([attack.kind], 40)[0]}: {attack.auc:.2f}", **look)
        small.plot(np.maximum(false, LOWEST), np.maximum(true, LOWEST), **look)
    for axis in (plain, small):
        axis.plot([LOWEST, 1], [LOWEST, 1], color="#999999", linewidth=0.8)
    small.set_xscale("log")
    small.set_yscale("log")
    tidy(plain, "", "share of others taken for members", "share of members found")
    tidy(small, "", "share of others taken for members", "")
    plain.legend(frameon=False, fontsize=7.5, title="AUC", title_fontsize=7.5)
    return figure


def prototype_bars(records: Records) -> "Figure":
    """How many prototypes are the mean of how many examples."""
    figure, ((axis,),) = panels(1, 1, (4.6, 2.6))
    ends = [*STEPS[1:], np.inf]
    counts = [sum(low <= one < high for one in records.behind) for low, high in zip(STEPS, ends, strict=True)]
    names = [
        str(low) if high == low + 1 else f"{low} and more" if high == np.inf else f"{low} to {int(high) - 1}"
        for low, high in zip(STEPS, ends, strict=True)
    ]
    colours = [COLOURS[1] if low < 5 else COLOURS[0] for low in STEPS]
    axis.bar(range(len(counts)), counts, color=colours)
    for k, count in enumerate(counts):
        axis.annotate(str(count), (k, count), ha="center", va="bottom", fontsize=8)
    axis.set_xticks(range(len(names)), names, rotation=30, ha="right")
    tidy(axis, "", "examples behind a prototype", "prototypes sent")
    return figure


def lines_by_attackers(by_attack: Mapping[str, Mapping[str, Mapping[int, Sequence[float]]]], y: str) -> "Figure":
    """A panel for each attack, a line for each rule over the number of attackers: the mean of seeds in their range."""
    figure, (axes,) = panels(1, len(by_attack), (2.7, 2.7), sharey=True)
    for axis, (attack, rules) in zip(axes, by_attack.items(), strict=True):
        for k, (rule, cells) in enumerate(rules.items()):
            numbers = sorted(cells)
            means = [float(np.mean(cells[n])) for n in numbers]
            look: dict[str, Any] = {"color": COLOURS[k % len(COLOURS)], "linestyle": LINES[k % len(LINES)]}
            axis.plot(numbers, means, marker="os^Dv"[k % 5], markersize=4, label=rule, **look)
            axis.fill_between(
                numbers, [min(cells[n]) for n in numbers], [max(cells[n]) for n in numbers],
                color=look["color"], alpha=0.12, linewidth=0,
            )  # fmt: skip
        tidy(axis, attack, "attackers", y if axis is axes[0] else "")
        axis.set_ylim(0, 100)
        axis.set_xticks(sorted({number for cells in rules.values() for number in cells}))
    axes[-1].legend(frameon=False, fontsize=7.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
