"""What all figures of finished runs share: what is drawn, the numbers behind it, and how runs are named."""

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protofed.errors import BadInput
from protofed.metrics.registry import METRICS
from protofed.printable import one_line
from protofed.reports.figures import save_figure
from protofed.runs.config.schema import nearest
from protofed.runs.loading import SavedRun
from protofed.runs.results import summed
from protofed.runs.store.checkpoint import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Tell = Callable[[str], None]
"""Is told what is being done."""

SEED = "training.seed"
COMPARED = ("task", "method", "training", "uploads", "robust")
"""Sections in which runs may differ so that it shows."""


class CannotDraw(BadInput):
    """These runs do not have what a figure needs."""


@dataclass(frozen=True)
class Table:
    """Numbers, with a name for each column."""

    header: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def csv(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.header)
        writer.writerows([[one_line(x) if isinstance(x, str) else x for x in row] for row in self.rows])
        return text.getvalue()


@dataclass(frozen=True)
class Drawing:
    """Pictures that belong together, and the numbers behind them, by what follows the figure's name in their names."""

    figures: "Mapping[str, Figure]"
    tables: Mapping[str, Table]


@dataclass(frozen=True)
class Options:
    """What a user may choose."""

    rounds: tuple[int, ...] = ()
    """Of states; empty: all that are there, or as many as a figure has room for."""
    clients: tuple[str, ...] = ()
    """Whose models are looked at; empty: the public model, or the first client's where there is none."""
    trained: bool = False
    """Whether a client's model is looked at as its next training would leave it, not as it uses it now."""
    examples: int = 400
    """Test examples in a panel of t-SNE."""
    images: tuple[str, ...] = ()
    """Test images for Grad-CAM, as DOMAIN:NUMBER; empty: some on which the runs disagree."""
    metric: str = ""
    """For curves, sensitivity and ablations: the id of a metric; empty: the headline."""
    tell: Tell = field(default=lambda what: None, compare=False)


def write(name: str, drawing: Drawing, folder: Path) -> list[Path]:
    """Writes pictures and tables; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for suffix, figure in drawing.figures.items():
        paths.append(folder / f"{_file_name(name, suffix)}.png")
        save_figure(figure, paths[-1], grows=True)
    for suffix, table in drawing.tables.items():
        paths.append(folder / f"{_file_name(name, suffix)}.csv")
        write_atomically(paths[-1], table.csv().encode())
    return paths


def _file_name(name: str, suffix: str) -> str:
    word = re.sub(r"\W+", "_", suffix.lower(), flags=re.ASCII).strip("_")
    return f"{name}_{word}" if word else name


# ---- runs and what they differ in


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but the seed."""

    label: str
    runs: Sequence[SavedRun]
    settings: Mapping[str, Any]
    """By their whole names, such as `method.temperature`; the seed is not among them."""

    @property
    def method(self) -> str:
        name: str = self.settings["method.name"]
        return name

    def values(self, metric: str) -> list[float]:
        """A metric of each run, as the mean of its last five evaluated rounds."""
        found = [summed(run.rounds, "last_five").metrics.get(metric) for run in self.runs]
        return [value for value in found if value is not None]


def grouped(runs: Sequence[SavedRun]) -> list[Group]:
    """The runs by what they differ in, each group with a name that tells it from the others. A run that is there twice,
    with the same settings and seed, counts once."""
    members: dict[str, list[SavedRun]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for run in runs:
        flat = settings_of(run)
        key = repr(sorted(flat.items()))
        own = members.setdefault(key, [])
        if run.config.training.seed not in [other.config.training.seed for other in own]:
            own.append(run)
        settings[key] = flat
    names = labels(list(settings.values()))
    return [Group(name, members[key], settings[key]) for key, name in zip(members, names, strict=True)]


def settings_of(run: SavedRun) -> dict[str, Any]:
    """Every setting that may matter, but the seed."""
    resolved = run.config.resolved()
    flat = dict(pair for section in COMPARED for pair in _flat(resolved[section], section))
    return {key: value for key, value in flat.items() if key != SEED and value is not None}


def _flat(table: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in table.items():
        found += _flat(value, f"{prefix}.{key}") if isinstance(value, Mapping) else [(f"{prefix}.{key}", value)]
    return found


def varying(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that all have and in which some differ."""
    shared = [key for key in groups[0] if all(key in other for other in groups)] if groups else []
    return [key for key in shared if len({repr(group[key]) for group in groups}) > 1]


def labels(groups: Sequence[Mapping[str, Any]], name: str = "method.name") -> list[str]:
    """The name of each method or task, and what tells it from others of its name."""
    found = []
    for settings in groups:
        namesakes = [other for other in groups if other[name] == settings[name]]
        unusual = [key for key in varying(namesakes) if not _is_usual(settings[key], [o[key] for o in namesakes])]
        own = [f"{short(key)} {_said(settings[key])}" for key in unusual]
        found.append(", ".join([str(settings[name]), *own]))
    return found


def _is_usual(value: Any, values: Sequence[Any]) -> bool:
    """Whether more than half have it."""
    return sum(repr(other) == repr(value) for other in values) > len(values) / 2


def short(key: str) -> str:
    """A setting's name without its section, unless that would be a mere `name`."""
    words = key.split(".")
    return ".".join(words[-2:]) if words[-1] in ("name", "rounds") else words[-1]


def _said(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


# ---- metrics


def chosen_metric(groups: Sequence[Group], wanted: str) -> str:
    """The metric of METRICS to draw: the one that is wanted, or what clients see at home if some have models of their
    own, or the mean over the domains."""
    known = [metric.id for metric in METRICS if metric.group != "domain"]
    if wanted and wanted not in known:
        raise BadInput(f"--metric {wanted!r} is unknown{nearest(wanted, known)}")
    judged = [r for group in groups for run in group.runs for r in run.rounds[-1:]]
    uses_own = any(r.judged == "own models" for r in judged) and all("own" in r.summary for r in judged)
    metric = wanted or ("own" if uses_own else "average")
    lacking = [group.label for group in groups if not _has(group, metric)]
    if lacking:
        raise CannotDraw(f"no round of {lacking[0]} has the metric {metric}: evaluate it, or choose another --metric")
    return metric


def _has(group: Group, metric: str) -> bool:
    return any(r.metric(metric) is not None for run in group.runs for r in run.rounds)


def metric_title(metric: str) -> str:
    titles = {"own": "accuracy at home, %", "average": "mean accuracy of the domains, %"}
    labels = {one.id: f"{one.label}, %" for one in METRICS}
    return titles.get(metric, labels.get(metric, metric))
