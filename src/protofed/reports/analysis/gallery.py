"""FIGURES: every figure that can be drawn from finished runs, in one place."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from protofed.errors import BadInput
from protofed.reports.analysis.curves import calibration, curves, initial
from protofed.reports.analysis.drawing import CannotDraw, Drawing, Options, write
from protofed.reports.analysis.gradcam import gradcam
from protofed.reports.analysis.relations import relations
from protofed.reports.analysis.sensitivity import ablation, sensitivity
from protofed.reports.analysis.tsne import tsne
from protofed.runs.config.schema import nearest
from protofed.runs.loading import SavedRun


@dataclass(frozen=True)
class Figure:
    draw: Callable[[Sequence[SavedRun], Options], Drawing]
    what: str


FIGURES = {
    "curves": Figure(curves, "accuracy and training loss over rounds"),
    "sensitivity": Figure(sensitivity, "results over a setting that is a number, of runs that differ in it"),
    "ablation": Figure(ablation, "results of runs that differ in parts of a method, as bars"),
    "initial": Figure(initial, "accuracy of the models that clients start from, and training loss"),
    "calibration": Figure(calibration, "accuracy of the public model before and after calibration"),
    "tsne": Figure(tsne, "test features by class and by domain, with prototypes, over rounds"),
    "relations": Figure(relations, "who learns from whom, as heat maps"),
    "gradcam": Figure(gradcam, "Grad-CAM: which parts of test images speak for the class that is named"),
}


@dataclass(frozen=True)
class Drawn:
    """What came of a wish for figures."""

    paths: list[Path]
    skipped: dict[str, str]
    """Figures that these runs do not allow, and why."""


def draw(runs: Sequence[SavedRun], names: Sequence[str], folder: Path, options: Options) -> Drawn:
    """Draws the figures of these names; without names, all that the runs allow."""
    for name in names:
        if name not in FIGURES:
            raise BadInput(f"--figure {name!r} is unknown{nearest(name, FIGURES)}")
    paths, skipped = list[Path](), dict[str, str]()
    for name in names or FIGURES:
        try:
            paths += write(name, FIGURES[name].draw(runs, options), folder)
        except CannotDraw as error:
            if names:
                raise CannotDraw(f"{name}: {error}") from None
            skipped[name] = str(error)
    if not paths:
        raise CannotDraw("\n".join(f"{name}: {why}" for name, why in skipped.items()))
    return Drawn(paths, skipped)
