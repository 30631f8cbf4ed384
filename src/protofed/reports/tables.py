"""Tables of comparisons: methods in rows, mean ± sample standard deviation over seeds in cells."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import fmean, stdev
from typing import Literal

from rich import box
from rich.markup import escape
from rich.table import Table
from scipy.special import stdtrit

from protofed.evaluation.evaluate import Scores
from protofed.metrics.registry import METRICS, Metric
from protofed.printable import printable

Headline = Literal["own", "average"]
"""The metric that methods are compared by: what clients see at home, if some have models of their own or the data are a
user's own; otherwise the mean over the domains."""

NOTES = {
    "own": (
        "own: what a client sees at home with the model that it uses, mean over clients: on the test set of its "
        "domain or, without domains, on one with its label proportions. Δ: points of own above FedAvg.\n"
        "*: every client has a model of its own."
    ),
    "average": "AVG: mean over the domains. Δ: points of AVG above FedAvg. own: what a client sees on its own domain.",
}
GAIN_NOTE = "In brackets: 95 % confidence interval of the mean of the seeds' differences (Student's t)."
ALL_MODELS_NOTE = (
    "*: the mean over the clients' own models, most of which never saw the domain. It says how they transfer, not what "
    "a client gets."
)
COSTS = (("down", 1e-3), ("up", 1e-3), ("seconds", 1.0))
"""What is counted, and its unit in the table."""


@dataclass(frozen=True)
class Numbers:
    """What a report says of one run that came to its end."""

    seed: int = 0
    domains: Mapping[str, Scores] = field(default_factory=dict)
    own_domains: Mapping[str, Scores] = field(default_factory=dict)
    metrics: Scores = field(default_factory=dict)
    """By id."""
    costs: Scores = field(default_factory=dict)
    sites: Mapping[str, Scores] = field(default_factory=dict)
    """What each client sees at home."""
    new_sites: Mapping[str, Scores] = field(default_factory=dict)
    """The same for clients that were held out."""
    tested: Mapping[str, int] = field(default_factory=dict)
    """The number of test examples of each client, if that is known."""


@dataclass(frozen=True)
class Column:
    """A column of a table: where its numbers are."""

    key: str
    """What published numbers call it."""
    read: Callable[[Numbers], float | None]


def metric(key: str) -> Column:
    """A metric of METRICS by its id."""
    return Column(key, lambda numbers: numbers.metrics.get(key))


def on_domain(domain: str, name: str = "accuracy") -> Column:
    return Column(domain, lambda numbers: numbers.domains.get(domain, {}).get(name))


def on_own_domain(domain: str, name: str) -> Column:
    return Column(domain, lambda numbers: numbers.own_domains.get(domain, {}).get(name))


def cost(name: str) -> Column:
    return Column(name, lambda numbers: numbers.costs.get(name))


@dataclass(frozen=True)
class Row:
    """One method on one task."""

    label: str
    seeds: Sequence[Numbers]
    """Of each seed that came to its end, or was stopped on its way."""
    uses_own_models: bool = False
    """Whether every client has a model of its own, by which the method is judged."""
    is_reference: bool = False
    """Whether gains are over this one."""
    published: Mapping[str, float] | None = None
    """Percent, by domain or by a metric's id."""
    progress: str = ""
    """How far its runs are, if some were stopped before their end."""

    @property
    def name(self) -> str:
        mark = "*" if self.uses_own_models else ""
        return f"{self.label}{mark}{f' ({self.progress})' if self.progress else ''}"

    @property
    def missing(self) -> str:
        """What stands for numbers if it has none."""
        return "–" if self.progress else "failed"

    def mean(self, column: Column) -> float:
        return fmean(self.values(column))

    def values(self, column: Column) -> list[float]:
        return [value for value in map(column.read, self.seeds) if value is not None]

    def cell(self, column: Column) -> str:
        """Percent, mean ± sample standard deviation; a dash for what a method does not have."""
        values = [100 * value for value in self.values(column)]
        if not values:
            return "–" if self.seeds else self.missing
        return f"{fmean(values):.1f} ± {stdev(values):.1f}" if len(values) > 1 else f"{values[0]:.1f}"


@dataclass(frozen=True)
class Sheet:
    """A table as text."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [self.header, ["---", *["---:"] * (len(self.header) - 1)], *self.rows]
        return "\n".join(f"| {' | '.join(map(_in_a_cell, line))} |" for line in lines) + "\n"

    def rich(self, title: str, width: int) -> Table:
        """For a terminal of so many columns: without intervals if they do not fit, then without deviations."""
        header = [printable(name) for name in self.header]
        lines = [[printable(cell).replace(" ± ", "±") for cell in line] for line in self.rows]
        for mark in (" [", "±"):
            needed = sum(max(map(len, column)) + 2 for column in zip(header, *lines, strict=True))
            if needed >= width:
                lines = [[line[0], *(cell.partition(mark)[0] for cell in line[1:])] for line in lines]
        table = Table(
            title=escape(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1)
        )
        for k, name in enumerate(header):
            table.add_column(escape(name), justify="right" if k else "left", no_wrap=True)
        for line in lines:
            table.add_row(*map(escape, line))
        return table


def _in_a_cell(text: str) -> str:
    return printable(text).replace("|", "\\|").replace("\n", " ")


def headline_of(rows: Sequence[Row], is_own_data: bool = False) -> Headline:
    ended = [row for row in rows if row.seeds]
    uses_own = is_own_data or any(row.uses_own_models for row in ended)
    return "own" if uses_own and all(row.values(metric("own")) for row in ended) else "average"


def sheets(rows: Sequence[Row], domains: Sequence[str]) -> list[tuple[str, Sheet, str]]:
    """The tables of accuracies, the one that decides first: title, table and note."""
    on_domains = domain_sheet(rows, domains)
    if headline_of(rows) == "average":
        return [("Accuracy on each domain, %", on_domains, NOTES["average"])]
    return [
        ("What clients see at home, accuracy in %", home_sheet(rows, domains), NOTES["own"]),
        ("Accuracy on each domain, %", on_domains, ALL_MODELS_NOTE),
    ]


def domain_sheet(rows: Sequence[Row], domains: Sequence[str]) -> Sheet:
    """In the papers' layout: domains, their average, the gain over FedAvg; published numbers in a row below ours."""
    columns = [*map(on_domain, domains), metric("average")]
    shown = [name for name in ("own", "new") if any(row.values(metric(name)) for row in rows)]
    labels = {one.id: one.label for one in METRICS}
    header = ["method", *domains, "AVG", "Δ", *(labels[name] for name in shown)]
    lines = []
    for row in rows:
        extra = [row.cell(metric(name)) for name in shown]
        gained = "–" if row.uses_own_models else gain(row, rows, columns)  # own models are not made for foreign domains
        lines.append([row.name, *map(row.cell, columns), gained, *extra])
        if row.published and row.published.keys() & {column.key for column in columns}:
            lines.append([f"*{row.label}, published*", *_published(row, columns), "", *[""] * len(shown)])
    return Sheet(header, lines)


def home_sheet(rows: Sequence[Row], domains: Sequence[str], measure: Literal["accuracy", "auc"] = "accuracy") -> Sheet:
    """What clients see on their own domains, its mean over clients, and the gain over FedAvg."""
    columns = [on_own_domain(domain, measure) for domain in domains]
    total = metric({"accuracy": "own", "auc": "auc"}[measure])
    shown = [column for column in columns if len(domains) > 1 and any(row.values(column) for row in rows)]
    new = [metric("new")] if measure == "accuracy" and any(row.values(metric("new")) for row in rows) else []
    lines = [[row.name, *map(row.cell, [*shown, total]), gain(row, rows, [total]), *map(row.cell, new)] for row in rows]
    header = [*(column.key for column in shown), "own" if measure == "accuracy" else "AUC", "Δ"]
    return Sheet(["method", *header, *(column.key for column in new)], lines)


def personal_metrics(rows: Sequence[Row]) -> list[Metric]:
    """What the table of global and personal metrics shows: what was measured or published of a method."""
    groups = [one for one in METRICS if one.group in ("public", "personal") and one.is_shown]
    shown = [*groups, *(one for one in METRICS if one.id == "harmonic_mean")]
    published = {key for row in rows for key in row.published or ()}
    measured = [one for one in shown if one.id in published or any(row.values(metric(one.id)) for row in rows)]
    return [*measured, *(one for one in METRICS if one.id in published and one.group != "domain" and not one.is_shown)]


def personal_note(rows: Sequence[Row]) -> str:
    said = ". ".join(f"{one.label}: {one.note}" for one in personal_metrics(rows))
    return f"{said}. Own models are those that clients have just trained."


def personal_sheet(rows: Sequence[Row]) -> Sheet | None:
    """The metrics of clients' own models; None if they were not measured."""
    if not any(row.values(metric("personal.local_index")) for row in rows):
        return None
    shown = personal_metrics(rows)
    columns = [metric(one.id) for one in shown]
    lines = []
    for row in rows:
        lines.append([row.name, *map(row.cell, columns)])
        if row.published and row.published.keys() & {column.key for column in columns}:
            lines.append([f"*{row.label}, published*", *_published(row, columns)])
    return Sheet(["method", *(one.label for one in shown)], lines)


def cost_sheet(rows: Sequence[Row], target: float | None, of: str = "") -> Sheet:
    """What a round moves and takes, how many replies were left out, and how soon a target was reached, of a metric."""
    header = ["method", "kB down", "kB up", "s per round", "replies left out"]
    lines = [
        [
            row.name,
            *(f"{scale * row.mean(cost(c)):.1f}" if row.seeds else row.missing for c, scale in COSTS),
            _left_out(row),
        ]
        for row in rows
    ]
    if target is not None:
        header = [*header, f"rounds to {100 * target:g} % {of}".rstrip()]
        lines = [[*line, _rounds(row)] for line, row in zip(lines, rows, strict=True)]
    return Sheet(header, lines)


def gain(row: Row, rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """Δ: points of the last column above FedAvg's, and their 95 % confidence interval, from the seeds that both have; a
    dash if one of them lacks a column, since theirs would be means over other domains, or was stopped on its way."""
    reference = next((r for r in rows if r.is_reference and r.seeds), None)
    if reference is None or row is reference or not row.seeds or row.progress or reference.progress:
        return "–"
    if any(bool(row.values(c)) != bool(reference.values(c)) for c in columns):
        return "–"
    pairs = paired_differences(row, reference, columns[-1])
    if not pairs:
        return "–"
    middle, half = fmean(pairs), half_width(pairs)
    return f"{middle:+.1f}" if half is None else f"{middle:+.1f} [{middle - half:+.1f}, {middle + half:+.1f}]"


def paired_differences(row: Row, reference: Row, column: Column) -> list[float]:
    """Points above the reference, for each seed that both have."""
    theirs = {numbers.seed: column.read(numbers) for numbers in reference.seeds}
    pairs = [(column.read(numbers), theirs.get(numbers.seed)) for numbers in row.seeds]
    return [100 * (ours - other) for ours, other in pairs if ours is not None and other is not None]


def half_width(values: Sequence[float]) -> float | None:
    """Half of the 95 % confidence interval of a mean, by Student's t; None for a single value."""
    if len(values) < 2:
        return None
    quantile = float(stdtrit(len(values) - 1, 0.975))
    return quantile * stdev(values) / sqrt(len(values))


def _published(row: Row, columns: Sequence[Column]) -> list[str]:
    published = row.published or {}
    return [f"{published[c.key]:.1f}" if c.key in published else "" for c in columns]


def _left_out(row: Row) -> str:
    return f"{sum(row.values(cost('left_out'))):.0f}" if row.seeds else row.missing


def _rounds(row: Row) -> str:
    """How many rounds each seed took, and how many were published."""
    published = f"; published {row.published['reached']:g}" if row.published and "reached" in row.published else ""
    return ", ".join(_reached(seed) for seed in row.seeds) + published


def _reached(seed: Numbers) -> str:
    return f"{seed.costs['reached']:.0f}" if "reached" in seed.costs else "not reached"
