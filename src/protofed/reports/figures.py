"""Pictures of how runs went."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from protofed.experiments.run import Round

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#000000")


def accuracy_over_rounds(runs: Mapping[str, Sequence[Sequence[Round]]], path: Path, title: str) -> None:
    """One panel per domain and one for their average; one line per method, the mean of its seeds in their range."""
    from matplotlib.figure import Figure  # slow imports that only pictures need
    from matplotlib.ticker import MaxNLocator

    first = next(iter(runs.values()))[0]
    panels = [*next(r for r in first if r.is_evaluated).domains, "average"]
    figure = Figure(figsize=(3.1 * len(panels), 3.4), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        for (method, seeds), colour in zip(runs.items(), COLOURS, strict=False):
            curves = [_curve(rounds, panel) for rounds in seeds]
            shown = [r.round for r in seeds[0] if r.is_evaluated]
            values = list(zip(*curves, strict=True))
            axis.plot(shown, [fmean(v) for v in values], label=method, color=colour, linewidth=1.8)
            axis.fill_between(shown, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.15)
        axis.set_title(panel, fontsize=11, fontweight="bold" if panel == "average" else "normal")
        axis.set_xlabel("round")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("accuracy, %")
    axes[0].set_ylim(0, 100)
    axes[-1].legend(frameon=False, loc="lower right", fontsize=9)
    figure.suptitle(title, fontsize=12)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _curve(rounds: Sequence[Round], panel: str) -> list[float]:
    values = [r.average if panel == "average" else r.domains[panel] for r in rounds if r.is_evaluated]
    return [100 * (value or 0.0) for value in values]
