"""Comparison tables in the papers' layout: methods in rows, domains in columns, mean ± sd over seeds, Δ over FedAvg."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from rich.table import Table

REFERENCE = "fedavg"


@dataclass(frozen=True)
class Row:
    method: str
    judged: str
    """Whose model was tested."""
    seeds: Sequence[Mapping[str, float]]
    """For each seed: accuracy per domain, and their mean as `average`."""

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
    def header(self) -> list[str]:
        return ["method", *self._columns[:-1], "AVG", "Δ", "tested"]

    @property
    def _columns(self) -> list[str]:
        return list(self.rows[0].seeds[0])

    def cells(self) -> list[list[str]]:
        return [
            [row.method, *(row.cell(column) for column in self._columns), self._gain(row), row.judged]
            for row in self.rows
        ]

    def _gain(self, row: Row) -> str:
        """Δ: points of the average above FedAvg's."""
        reference = next((r for r in self.rows if r.method == REFERENCE), None)
        if reference is None or row is reference:
            return "–"
        return f"{100 * (row.mean('average') - reference.mean('average')):+.1f}"

    def markdown(self) -> str:
        lines = [self.header, ["---", *["---:"] * (len(self.header) - 2), "---"], *self.cells()]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"

    def rich(self, title: str) -> Table:
        table = Table(title=title, title_justify="left", title_style="bold")
        for k, name in enumerate(self.header):
            table.add_column(name, justify="left" if k in (0, len(self.header) - 1) else "right", no_wrap=True)
        for cells in self.cells():
            table.add_row(*cells)
        return table
