"""The task `custom` for tables."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from protofed.api.task import Task
from protofed.data.transforms import Transform
from protofed.datasets import sites
from protofed.datasets.preprocessing import TableRows
from protofed.datasets.sites import LabelledRows
from protofed.datasets.tabular import Encoder, Kind, Table, sum_of, summary_of
from protofed.errors import BadInput
from protofed.nn.networks import Parts
from protofed.tasks.custom.assembly import assemble, training_sites
from protofed.tasks.custom.split import SiteExamples, split_sites

if TYPE_CHECKING:
    from protofed.tasks.custom.settings import Custom

log = logging.getLogger(__name__)


def table_task(settings: "Custom", root: Path, network: Callable[[int, int], Parts]) -> Task:
    tables, faults = sites.read_tables(root)
    if not tables and not faults:
        sites.kind_of(root)
        raise BadInput(f'task custom: {root} contains images, not tables; set kind = "images"')
    _refuse(faults)
    labelled, kinds = _checked_tables(tables, settings)
    _refuse(sites.group_faults({site: site_rows.table for site, site_rows in labelled.items()}, settings.group))
    examples = {site: examples_of(site_rows, settings.group) for site, site_rows in labelled.items()}
    rows = split_sites(examples, settings.test_fraction, settings.seed, settings.validation_fraction)
    train_tables = [
        labelled[site].table.take(rows[site].train.tolist()) for site in training_sites(examples, settings.hold_out)
    ]
    encoder = Encoder.fit(sum_of(summary_of(table, kinds) for table in train_tables))
    inputs = {site: torch.from_numpy(encoder.encode(site_rows.table)) for site, site_rows in labelled.items()}
    task = assemble(examples, rows, inputs, partial(network, len(encoder.features)), Transform(), settings)
    return replace(task, preprocessing=TableRows(encoder, settings.label or ""))


def examples_of(rows: LabelledRows, group: str | None = None) -> SiteExamples:
    """Equal rows do not count as copies: two patients may have the same values. `group` is a column without gaps."""
    places = tuple(rows.table.place(row) for row in range(len(rows.table)))
    cells = () if group is None else rows.table.column(group)
    return SiteExamples(rows.labels, places, tuple(sites.normalised_code(cell) for cell in cells if cell is not None))


def _checked_tables(tables: Mapping[str, Table], settings: "Custom") -> tuple[dict[str, LabelledRows], dict[str, Kind]]:
    """The rows that have a label, and the kinds of the columns that are used."""
    if settings.label is None:
        raise BadInput("task custom: label is not set; name the column to be predicted")
    if settings.label in settings.leave_out:
        raise BadInput(f"task custom: {settings.label!r} is the label and in leave_out; it cannot be both")
    if settings.label == settings.group:
        raise BadInput(f"task custom: {settings.label!r} is the label and the group; it cannot be both")
    _refuse(sites.column_faults(tables, settings.leave_out))
    _refuse(sites.label_faults(tables, settings.label))
    kinds, faults = sites.kinds_of(tables, _used_columns(tables, settings), settings.categorical)
    _refuse([*faults.values()])
    rows = sites.labelled_rows(tables, settings.label)
    dropped = ", ".join(f"{site} {site_rows.dropped}" for site, site_rows in rows.items() if site_rows.dropped)
    if dropped:
        log.warning("task custom: rows without a label are left out: %s", dropped)
    codes = [name for name, kind in kinds.items() if kind == "categorical"]
    return {
        site: replace(site_rows, table=sites.with_normalised_codes(site_rows.table, codes))
        for site, site_rows in rows.items()
    }, kinds


def _used_columns(tables: Mapping[str, Table], settings: "Custom") -> list[str]:
    """The columns to learn from: the same at every site, in the order of the first site."""
    first = next(iter(tables.values()))
    columns = {name for table in tables.values() for name in table.columns}
    for name in (*settings.leave_out, *settings.categorical, *([settings.group] if settings.group else [])):
        if name not in columns:
            first.column(name)
    unused = {settings.label, settings.group, *settings.leave_out}
    names = [name for name in first.columns if name not in unused]
    if not names:
        raise BadInput(
            f"task custom: there is no column but the label {settings.label!r}; nothing can be learnt from it"
        )
    return names


def _refuse(faults: Sequence[str]) -> None:
    if faults:
        raise BadInput("\n".join(faults))
