"""Comparison tables in the papers' layout: methods in rows, domains in columns, mean ± sd over seeds, Δ over FedAvg."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from rich import box
from rich.table import Table

REFERENCE = "fedavg"
NOTE = (
    "AVG: mean over the domains. Δ: points of AVG above FedAvg. own: what a client sees on its own domain.\n"
    "*: every client has a model of its own, and a domain's accuracy is the mean over them."
)


@dataclass(frozen=True)
class Row:
    method: str
    has_public_model: bool
    seeds: Sequence[Mapping[str, float]]
    """For each seed: accuracy per domain, `average` and `own_domain`."""

    @property
    def name(self) -> str:
        return self.method if self.has_public_model else f"{self.method}*"

    def mean(self, column: str) -> float:
        return fmean(seed[column] for seed in self.seeds)

    def cell(self, column: str) -> str:
        """Percent, mean ± sample standard deviation."""
        values = [100 * seed[column] for seed in self.seeds]
        return f"{fmean(values):.1f} ± {stdev(values):.1f}" if len(values) > 1 else f"{values[0]:.1f}"


@dataclass(frozen=True)
class Comparison:
    rows: Sequence[Row]

    @property
    def domains(self) -> list[str]:
        return [column for column in self.rows[0].seeds[0] if column not in ("average", "own_domain")]

    @property
    def header(self) -> list[str]:
        return ["method", *self.domains, "AVG", "Δ", *(["own"] if self._has_own else [])]

    @property
    def _has_own(self) -> bool:
        return all("own_domain" in seed for row in self.rows for seed in row.seeds)

    def cells(self) -> list[list[str]]:
        columns, own = [*self.domains, "average"], ["own_domain"] if self._has_own else []
        return [
            [row.name, *(row.cell(c) for c in columns), self._gain(row), *(row.cell(c) for c in own)]
            for row in self.rows
        ]

    def _gain(self, row: Row) -> str:
        """Δ: points of the average above FedAvg's."""
        reference = next((r for r in self.rows if r.method == REFERENCE), None)
        if reference is None or row is reference:
            return "–"
        return f"{100 * (row.mean('average') - reference.mean('average')):+.1f}"

    def markdown(self) -> str:
        lines = [self.header, ["---", *["---:"] * (len(self.header) - 1)], *self.cells()]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"

    def rich(self, title: str) -> Table:
        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
        for k, name in enumerate(self.header):
            table.add_column(name, justify="right" if k else "left", no_wrap=True)
        for cells in self.cells():
            table.add_row(*(cell.replace(" ± ", "±") for cell in cells))
        return table
