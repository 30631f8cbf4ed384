"""Own tables: read, split, summed up for the agreement, and made a task by it."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from protofed.api.task import Task
from protofed.data.transforms import Transform
from protofed.datasets import sites
from protofed.datasets.preprocessing import TableRows
from protofed.datasets.sites import LabelledRows
from protofed.datasets.tabular import Kind, Table, summary_of
from protofed.datasets.tabular.encoding import Categories, Moments, Summary
from protofed.errors import BadInput
from protofed.tasks.custom.assembly import assemble
from protofed.tasks.custom.shares import Agreed, ColumnShare, TableShare, used_columns
from protofed.tasks.custom.split import SiteExamples, SplitRows, split_sites
from protofed.tasks.models import Network

if TYPE_CHECKING:
    from protofed.tasks.custom.settings import Custom

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OwnTables:
    """The tables of some sites, before it is agreed how their columns become numbers."""

    settings: "Custom"
    tables: Mapping[str, Table]
    labelled: Mapping[str, LabelledRows]
    kinds: Mapping[str, Kind]
    """Of the columns that are learnt from, as far as these sites know them."""
    examples: Mapping[str, SiteExamples]
    rows: Mapping[str, SplitRows]

    @classmethod
    def read(cls, settings: "Custom", root: Path, only: Collection[str] = ()) -> "OwnTables":
        """All sites of a folder, or only some."""
        tables, faults = sites.read_tables(root)
        if not tables and not faults:
            sites.kind_of(root)
            raise BadInput(f'task custom: {root} contains images, not tables; set kind = "images"')
        _refuse(faults)
        tables = {site: table for site, table in tables.items() if not only or site in only}
        labelled, kinds = _checked_tables(tables, settings)
        _refuse(sites.group_faults({site: site_rows.table for site, site_rows in labelled.items()}, settings.group))
        examples = {site: examples_of(site_rows, settings.group) for site, site_rows in labelled.items()}
        rows = split_sites(examples, settings.test_fraction, settings.seed, settings.validation_fraction)
        return cls(settings, tables, labelled, kinds, examples, rows)

    @property
    def shares(self) -> dict[str, TableShare]:
        return {site: self._share(site) for site in self.labelled}

    def _share(self, site: str) -> TableShare:
        table, label = self.tables[site], self.settings.label or ""
        said = Summary({})
        if site not in self.settings.hold_out:
            training = self.labelled[site].table.take(self.rows[site].train.tolist())
            codes = [name for name, kind in self.kinds.items() if kind == "categorical"]
            said = summary_of(sites.with_normalised_codes(training, codes), self.kinds, self.settings.min_rows)
        return TableShare(
            classes=sites.sorted_classes(self.examples[site].labels),
            tests=len(self.rows[site].test),
            rows=len(self.examples[site].labels),
            label=sites.facts_of(table, label),
            names=tuple(table.columns),
            columns={name: _column_share(table, name, said.columns.get(name)) for name in self.kinds},
        )

    def task(self, agreed: Agreed, model: Network) -> Task:
        assert isinstance(agreed.files, TableRows), "tables are prepared as tables"
        inputs = {site: agreed.files.encoded(site_rows.table) for site, site_rows in self.labelled.items()}
        return assemble(self.examples, self.rows, inputs, agreed, model, Transform(), self.settings)


def _column_share(table: Table, name: str, said: Moments | Categories | None) -> ColumnShare:
    words = tuple(sorted(said.values)) if isinstance(said, Categories) else None
    return ColumnShare(sites.facts_of(table, name), said if isinstance(said, Moments) else None, words)


def examples_of(rows: LabelledRows, group: str | None = None) -> SiteExamples:
    """Equal rows do not count as copies: two patients may have the same values. `group` is a column without gaps."""
    places = tuple(rows.table.place(row) for row in range(len(rows.table)))
    cells = () if group is None else rows.table.column(group)
    return SiteExamples(rows.labels, places, tuple(sites.normalised_code(cell) for cell in cells if cell is not None))


def _checked_tables(tables: Mapping[str, Table], settings: "Custom") -> tuple[dict[str, LabelledRows], dict[str, Kind]]:
    """The rows that have a label, and the kinds of the columns that are used. What is wrong is named with its file and
    line."""
    if settings.label is None:
        raise BadInput("task custom: label is not set; name the column to be predicted")
    if settings.label in settings.leave_out:
        raise BadInput(f"task custom: {settings.label!r} is the label and in leave_out; it cannot be both")
    if settings.label == settings.group:
        raise BadInput(f"task custom: {settings.label!r} is the label and the group; it cannot be both")
    _refuse(sites.column_faults(tables, settings.leave_out))
    _refuse(sites.label_faults(tables, settings.label))
    names = used_columns(next(iter(tables.values())).columns, settings)
    kinds, faults = sites.kinds_of(tables, names, settings.categorical)
    _refuse([*faults.values()])
    rows = sites.labelled_rows(tables, settings.label)
    dropped = ", ".join(f"{site} {site_rows.dropped}" for site, site_rows in rows.items() if site_rows.dropped)
    if dropped:
        log.warning("task custom: rows without a label are left out: %s", dropped)
    return rows, kinds


def _refuse(faults: Sequence[str]) -> None:
    if faults:
        raise BadInput("\n".join(faults))
