"""What a folder of tables holds: a file for each site, with the same columns."""

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from protofed.datasets import sites
from protofed.datasets.sites import LabelledRows
from protofed.datasets.tabular import Table
from protofed.errors import BadInput
from protofed.inspection.columns import MAX_CODES, Column, column_facts, column_of, common, holds
from protofed.inspection.findings import Finding, class_findings
from protofed.inspection.page import Inspection
from protofed.inspection.text import NAMED, listed, number_of
from protofed.tasks.custom import Custom, examples_of, split_sites

LIKELY_LABEL = re.compile(r"label|class|target|outcome|diagnos|event|status|^y$", re.IGNORECASE)


def inspected_tables(path: Path, wishes: Custom) -> Inspection:
    tables, faults = sites.read_tables(path)
    findings = [Finding("error", fault) for fault in (*faults, *sites.column_faults(tables, wishes.leave_out))]
    findings += _unknown_columns(tables, wishes)
    names = [name for name in common(tables) if name != wishes.label and name not in wishes.leave_out]
    columns = [column_of(tables, name, wishes.categorical) for name in names]
    rows, label_findings = _labelled(tables, wishes.label)
    samples = {site: examples_of(own) for site, own in rows.items()}
    settings = _table_settings(wishes, columns)
    sides = split_sites(samples, settings.test_fraction, settings.seed)
    findings += [*label_findings, *(finding for column in columns for finding in column.findings)]
    findings += [*_same_tables(tables), *_same_rows(tables), *_beside(path)]
    findings += class_findings(samples, sides) if samples else []
    if tables and all(column.is_left_out for column in columns):
        findings.append(
            Finding("error", "no column is left to learn from", "give the sites columns that tell something")
        )
    facts = column_facts(columns)
    return Inspection(path, "tables", (*tables,), samples, sides, facts, tuple(findings), settings)


def _labelled(tables: Mapping[str, Table], label: str | None) -> tuple[dict[str, LabelledRows], list[Finding]]:
    """The rows that have a label, none if something is wrong with it; and what there is to say of it."""
    if not tables:
        return {}, []
    if label is None:
        candidates = "; or ".join(_candidates(tables)) or "no column that there is: none has a few values that repeat"
        what = f"which column is the label? It could be {candidates}"
        return {}, [Finding("error", what, "say --label COLUMN")]
    try:
        faults = sites.label_faults(tables, label)
    except BadInput as error:
        return {}, [Finding("error", str(error), "say --label COLUMN, with a column that every site has")]
    if faults:
        return {}, [Finding("error", fault) for fault in faults]
    rows = sites.labelled_rows(tables, label)
    return rows, [*_unlabelled(rows)]


def _unknown_columns(tables: Mapping[str, Table], wishes: Custom) -> Iterator[Finding]:
    known = {name for table in tables.values() for name in table.columns}
    for name in (*wishes.leave_out, *wishes.categorical):
        if tables and name not in known:
            yield Finding(
                "error", f"there is no column {name!r} to leave out or to read as codes", "look at its spelling"
            )


def _candidates(tables: Mapping[str, Table]) -> list[str]:
    """Columns with a few values that repeat, the likeliest names first, each with its values."""
    found = []
    for name in common(tables):
        cells = [cell for table in tables.values() for cell in table.column(name) if cell is not None]
        values = sites.sorted_classes(cells)
        if 2 <= len(values) <= MAX_CODES and len(values) * 2 <= len(cells):
            found.append((LIKELY_LABEL.search(name) is None, f"{name!r} ({holds(values, 'categorical')})"))
    return [text for _, text in sorted(found, key=lambda pair: pair[0])[:NAMED]]


def _unlabelled(rows: Mapping[str, LabelledRows]) -> Iterator[Finding]:
    lines = [f"{site}: {own.dropped} of {own.dropped + len(own.labels)}" for site, own in rows.items() if own.dropped]
    if lines:
        yield Finding("warning", f"rows without a label:{listed(lines)}", "they are left out")


def _table_settings(wishes: Custom, columns: Sequence[Column]) -> Custom:
    leave_out = [column.name for column in columns if column.is_left_out]
    codes = [column.name for column in columns if column.is_code]
    return replace(
        wishes, model="mlp", leave_out=(*wishes.leave_out, *leave_out), categorical=(*wishes.categorical, *codes)
    )


def _same_tables(tables: Mapping[str, Table]) -> Iterator[Finding]:
    """Sites that gave the same file."""
    by_digest: dict[str, list[str]] = defaultdict(list)
    for table in tables.values():
        with open(table.source, "rb") as file:
            by_digest[hashlib.file_digest(file, "sha256").hexdigest()].append(table.source)
    for sources in by_digest.values():
        if len(sources) > 1:
            yield Finding("error", f"the same file at several sites: {' = '.join(sources)}", "keep one of them")


def _same_rows(tables: Mapping[str, Table]) -> Iterator[Finding]:
    names = common(tables)
    seen = Counter(
        row for table in tables.values() for row in zip(*(table.column(name) for name in names), strict=True)
    )
    copies = sum(count - 1 for count in seen.values())
    if copies:
        what = f"{number_of(copies, 'row')} repeat another row in every column"
        yield Finding("warning", what, "remove them if they are the same people: one could be learnt, the other tested")


def _beside(path: Path) -> Iterator[Finding]:
    ignored = [name.name for name in sites.other_files(path)]
    if ignored:
        what = f"not read, since they are no tables:{listed(ignored)}"
        yield Finding("warning", what, "export what holds data as CSV or Parquet, one file for each site")
