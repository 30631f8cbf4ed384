"""Tables of comparisons: methods in rows, mean ± sample standard deviation over seeds in cells."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from rich import box
from rich.markup import escape
from rich.table import Table

NOTE = (
    "AVG: mean over the domains. Δ: points of AVG above FedAvg. own: what a client sees on its own domain.\n"
    "*: every client has a model of its own, and a domain's accuracy is the mean over them."
)
PERSONAL_NOTE = (
    "GM: the public model on all test sets together. PM(V), PM(L): clients' own models there, on the classes that\n"
    "the client has and with classes weighted as in its data. Acc, MF1, I_local: own models on test sets with the\n"
    "client's own label proportions. HM: harmonic mean of GM and I_local. Own models are those that clients have just\n"
    "trained."
)
PERSONAL = {
    "global": "GM",
    "owned": "PM(V)",
    "proportional": "PM(L)",
    "accuracy": "Acc",
    "macro_f1": "MF1",
    "local_index": "I_local",
    "harmonic_mean": "HM",
}
"""Names of metrics in the papers."""
COSTS = (("down", 1e-3), ("up", 1e-3), ("seconds", 1.0))
"""What is counted, and its unit in the table."""


@dataclass(frozen=True)
class Row:
    """One method on one task."""

    label: str
    seeds: Sequence[Mapping[str, float]]
    """For each seed that came to its end: accuracy per domain, metrics, and costs."""
    has_public_model: bool = True
    is_reference: bool = False
    """Whether gains are over this one."""
    published: Mapping[str, float] | None = None
    """Percent."""

    @property
    def name(self) -> str:
        return self.label if self.has_public_model else f"{self.label}*"

    def mean(self, column: str) -> float:
        return fmean(self.values(column))

    def values(self, column: str) -> list[float]:
        return [seed[column] for seed in self.seeds if column in seed]

    def cell(self, column: str) -> str:
        """Percent, mean ± sample standard deviation; a dash for what a method does not have."""
        values = [100 * value for value in self.values(column)]
        if not values:
            return "–" if self.seeds else "failed"
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
        """For a terminal of so many columns: without deviations if they do not fit."""
        lines = [[cell.replace(" ± ", "±") for cell in line] for line in self.rows]
        needed = sum(max(map(len, column)) + 2 for column in zip(self.header, *lines, strict=True))
        if needed >= width:
            lines = [[cell.partition("±")[0] for cell in line] for line in lines]
        table = Table(
            title=escape(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1)
        )
        for k, name in enumerate(self.header):
            table.add_column(escape(name), justify="right" if k else "left", no_wrap=True)
        for line in lines:
            table.add_row(*map(escape, line))
        return table


def _in_a_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def domain_sheet(rows: Sequence[Row], domains: Sequence[str]) -> Sheet:
    """In the papers' layout: domains, their average, the gain over FedAvg; published numbers in a row below ours."""
    columns = [*domains, "average"]
    own = ["own_domain"] if any(row.values("own_domain") for row in rows) else []
    header = ["method", *domains, "AVG", "Δ", *["own"] * len(own)]
    lines = []
    for row in rows:
        lines.append([row.name, *map(row.cell, columns), _gain(row, rows, domains), *map(row.cell, own)])
        if row.published and row.published.keys() & set(columns):
            lines.append([f"*{row.label}, published*", *_published(row, columns), "", *[""] * len(own)])
    return Sheet(header, lines)


def home_sheet(rows: Sequence[Row], domains: Sequence[str], measure: str) -> Sheet | None:
    """What clients see on their own domain; None if nothing was measured there."""
    columns = [f"{measure} at {domain}" for domain in domains]
    shown = [
        (domain, column) for domain, column in zip(domains, columns, strict=True) if any(r.values(column) for r in rows)
    ]
    if not shown:
        return None
    header = ["method", *(domain for domain, _ in shown), "mean"]
    total = {"accuracy": "own_domain", "auc": "auc"}[measure]
    return Sheet(header, [[row.name, *(row.cell(column) for _, column in shown), row.cell(total)] for row in rows])


def personal_sheet(rows: Sequence[Row]) -> Sheet | None:
    """The metrics of clients' own models; None if they were not measured."""
    if not any(row.values("local_index") for row in rows):
        return None
    lines = []
    for row in rows:
        lines.append([row.name, *map(row.cell, PERSONAL)])
        if row.published and row.published.keys() & PERSONAL.keys():
            lines.append([f"*{row.label}, published*", *_published(row, list(PERSONAL))])
    return Sheet(["method", *PERSONAL.values()], lines)


def cost_sheet(rows: Sequence[Row], target: float | None) -> Sheet:
    """What a round moves and takes, how many replies were left out, and how soon a target was reached."""
    header = ["method", "kB down", "kB up", "s per round", "replies left out"]
    lines = [
        [row.name, *(f"{scale * row.mean(c):.1f}" if row.seeds else "failed" for c, scale in COSTS), _left_out(row)]
        for row in rows
    ]
    if target is not None:
        header = [*header, f"rounds to {100 * target:g} %"]
        lines = [[*line, _rounds(row)] for line, row in zip(lines, rows, strict=True)]
    return Sheet(header, lines)


def _gain(row: Row, rows: Sequence[Row], domains: Sequence[str]) -> str:
    """Δ: points of the average above FedAvg's; a dash if theirs are averages over other domains."""
    reference = next((r for r in rows if r.is_reference and r.seeds), None)
    if reference is None or row is reference or not row.seeds:
        return "–"
    if any(bool(row.values(domain)) != bool(reference.values(domain)) for domain in domains):
        return "–"
    return f"{100 * (row.mean('average') - reference.mean('average')):+.1f}"


def _published(row: Row, columns: Sequence[str]) -> list[str]:
    return [f"{row.published[c]:.1f}" if row.published and c in row.published else "" for c in columns]


def _left_out(row: Row) -> str:
    return f"{sum(row.values('left_out')):.0f}" if row.seeds else "failed"


def _rounds(row: Row) -> str:
    """How many rounds each seed took, and how many were published."""
    published = f"; published {row.published['reached']:g}" if row.published and "reached" in row.published else ""
    return ", ".join(_reached(seed) for seed in row.seeds) + published


def _reached(seed: Mapping[str, float]) -> str:
    return f"{seed['reached']:.0f}" if "reached" in seed else "not reached"
