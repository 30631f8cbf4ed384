"""Inspects a folder of tables: one file for each site, with the same columns."""

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
from protofed.inspection.columns import MAX_CODES, Column, column_facts, column_of, common_columns, content_of
from protofed.inspection.findings import Finding, class_findings
from protofed.inspection.page import Inspection
from protofed.inspection.proposal import proposed
from protofed.inspection.text import MAX_NAMED, listed, number_of
from protofed.tasks.custom import Custom, examples_of

LIKELY_PERSON = re.compile(r"patient|subject|person|participant|mrn", re.IGNORECASE)
LIKELY_LABEL = re.compile(r"label|class|target|outcome|diagnos|event|status|^y$", re.IGNORECASE)


def inspected_tables(path: Path, requested: Custom) -> Inspection:
    tables, faults = sites.read_tables(path)
    findings = [Finding("error", fault) for fault in (*faults, *sites.column_faults(tables, requested.leave_out))]
    findings += _unknown_columns(tables, requested)
    unused = {requested.label, requested.group, *requested.leave_out}
    names = [name for name in common_columns(tables) if name not in unused]
    columns = [column_of(tables, name, requested.categorical) for name in names]
    rows, label_findings = _labelled(tables, requested.label)
    group, group_findings = _groups({site: site_rows.table for site, site_rows in rows.items()}, requested)
    examples = {site: examples_of(site_rows, group) for site, site_rows in rows.items()}
    settings, split = proposed(_table_settings(requested, columns), examples)
    findings += [
        *_formats(tables),
        *group_findings,
        *label_findings,
        *(finding for column in columns for finding in column.findings),
    ]
    findings += [*_same_tables(tables), *_same_rows(tables), *_beside(path)]
    findings += class_findings(examples, split) if examples else []
    if tables and all(column.is_left_out for column in columns):
        findings.append(Finding("error", "no column is left to learn from", "add columns that differ between examples"))
    facts = column_facts(columns)
    return Inspection(path, "tables", (*tables,), examples, split, facts, tuple(findings), settings)


def _labelled(tables: Mapping[str, Table], label: str | None) -> tuple[dict[str, LabelledRows], list[Finding]]:
    """The rows that have a label, and findings about the label. There are no rows if something is wrong with it."""
    if not tables:
        return {}, []
    if label is None:
        candidates = "; or ".join(_candidates(tables)) or "none of the columns: none has a few values that repeat"
        what = f"which column is the label? It could be {candidates}"
        return {}, [Finding("error", what, "add --label COLUMN")]
    try:
        faults = sites.label_faults(tables, label)
    except BadInput as error:
        return {}, [Finding("error", str(error), "add --label COLUMN, with a column that every site has")]
    if faults:
        return {}, [Finding("error", fault) for fault in faults]
    rows = sites.labelled_rows(tables, label)
    return rows, [*_unlabelled(rows)]


def _formats(tables: Mapping[str, Table]) -> Iterator[Finding]:
    """Files that are not written in the usual way, and how they are read."""
    lines = [f"{table.source}: {table.form}" for table in tables.values() if table.form]
    if lines:
        advice = "look at the values above; if one is wrong, export the file with commas, decimal points and in UTF-8"
        yield Finding("warning", f"tables that are read in an unusual format:{listed(lines)}", advice)


def _groups(tables: Mapping[str, Table], requested: Custom) -> tuple[str | None, list[Finding]]:
    """The column of groups, if it can be used; otherwise what is wrong with it, or which column could be one."""
    if requested.group is None:
        names = [name for name in common_columns(tables) if LIKELY_PERSON.search(name) and _repeats(tables, name)]
        advice = "add --group COLUMN, so that no person is in training and in the test set"
        return None, [
            Finding("warning", f"column {name!r} may name people who have several rows", advice)
            for name in names
            if name != requested.label
        ]
    if any(requested.group not in table.columns for table in tables.values()) or requested.group == requested.label:
        return None, []  # said by others
    faults = sites.group_faults(tables, requested.group)
    return None if faults else requested.group, [Finding("error", fault) for fault in faults]


def _repeats(tables: Mapping[str, Table], name: str) -> bool:
    """Whether a site has a value twice, but too many different ones for a category."""
    by_site = [[cell for cell in table.column(name) if cell is not None] for table in tables.values()]
    return any(len({*cells}) < len(cells) for cells in by_site) and any(len({*cells}) > MAX_CODES for cells in by_site)


def _unknown_columns(tables: Mapping[str, Table], requested: Custom) -> Iterator[Finding]:
    columns = {name for table in tables.values() for name in table.columns}
    for name in (*requested.leave_out, *requested.categorical):
        if tables and name not in columns:
            yield Finding(
                "error", f"there is no column {name!r} to leave out or to read as codes", "check its spelling"
            )
    if requested.group is not None and tables and requested.group not in columns:
        yield Finding("error", f"there is no column {requested.group!r} to keep rows together", "check its spelling")
    if requested.group is not None and requested.group == requested.label:
        yield Finding("error", f"{requested.group!r} is the label: it cannot keep rows together", "name another column")


def _candidates(tables: Mapping[str, Table]) -> list[str]:
    """Columns that could be the label, each with its values: few values, which repeat. Likely names come first."""
    candidates = []
    for name in common_columns(tables):
        cells = [cell for table in tables.values() for cell in table.column(name) if cell is not None]
        values = sites.sorted_classes(cells)
        if 2 <= len(values) <= MAX_CODES and len(values) * 2 <= len(cells):
            candidates.append((LIKELY_LABEL.search(name) is None, f"{name!r} ({content_of(values, 'categorical')})"))
    return [text for _, text in sorted(candidates, key=lambda pair: pair[0])[:MAX_NAMED]]


def _unlabelled(rows: Mapping[str, LabelledRows]) -> Iterator[Finding]:
    counts = {site: (site_rows.dropped, site_rows.dropped + len(site_rows.labels)) for site, site_rows in rows.items()}
    lines = [f"{site}: {dropped} of {total}" for site, (dropped, total) in counts.items() if dropped]
    if lines:
        yield Finding("warning", f"rows without a label:{listed(lines)}", "they are left out")


def _table_settings(requested: Custom, columns: Sequence[Column]) -> Custom:
    leave_out = [column.name for column in columns if column.is_left_out]
    codes = [column.name for column in columns if column.is_code]
    return replace(
        requested,
        model="mlp_norm",
        leave_out=(*requested.leave_out, *leave_out),
        categorical=(*requested.categorical, *codes),
    )


def _same_tables(tables: Mapping[str, Table]) -> Iterator[Finding]:
    """Sites whose files have the same content."""
    by_digest: dict[str, list[str]] = defaultdict(list)
    for table in tables.values():
        with open(table.source, "rb") as file:
            by_digest[hashlib.file_digest(file, "sha256").hexdigest()].append(table.source)
    for sources in by_digest.values():
        if len(sources) > 1:
            yield Finding("error", f"the same file at several sites: {' = '.join(sources)}", "keep one of them")


def _same_rows(tables: Mapping[str, Table]) -> Iterator[Finding]:
    names = common_columns(tables)
    counts = Counter(
        row for table in tables.values() for row in zip(*(table.column(name) for name in names), strict=True)
    )
    copies = sum(count - 1 for count in counts.values())
    if copies:
        what = f"{number_of(copies, 'row')} repeat another row in every column"
        yield Finding(
            "warning",
            what,
            "remove them if they are the same people: one may be in training and its copy in the test set",
        )


def _beside(path: Path) -> Iterator[Finding]:
    ignored = [name.name for name in sites.other_files(path)]
    if ignored:
        what = f"not read, since they are not tables:{listed(ignored)}"
        yield Finding("warning", what, "export data as CSV or Parquet, one file for each site")
