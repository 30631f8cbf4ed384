"""What a column of the sites' tables contains, and whether it is useful."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from protofed.datasets import sites
from protofed.datasets.tabular import Kind, Table
from protofed.datasets.tabular.limits import MAX_CATEGORIES
from protofed.errors import BadInput
from protofed.inspection.findings import FEW, Finding
from protofed.inspection.text import aligned, some
from protofed.printable import one_line

MAX_CODES = 20
"""A mixed column of numbers and words with more different values than this is meant to be numeric."""
LIKELY_IDENTIFIER = re.compile(r"(^|[^a-z])(id|ids|mrn|uid|key|nr|number|index|row|record|unnamed.*)$", re.IGNORECASE)


@dataclass(frozen=True)
class Column:
    """A column over all sites."""

    name: str
    kind: Kind
    missing: float
    """Share of cells without a value."""
    content: str
    """Its range, or its categories, as text."""
    findings: tuple[Finding, ...]
    is_left_out: bool
    is_code: bool
    """Whether its numbers and words are read as categories."""


def column_of(tables: Mapping[str, Table], name: str, categorical: Sequence[str]) -> Column:
    cells = [cell for table in tables.values() for cell in table.column(name)]
    present = [cell for cell in cells if cell is not None]
    kinds, faults = sites.kinds_of(tables, [name], categorical)
    normalised = sites.normalised_number if kinds[name] == "numeric" else sites.normalised_code
    values = sites.sorted_classes(normalised(cell) for cell in present)
    reason = None if name in faults else _useless(tables, name, kinds[name], values)
    is_code = name in faults and len(values) <= MAX_CODES
    findings = [*_sites_without_values(tables, name)] if present else []
    if reason is not None:
        findings.append(Finding("warning", f"column {name!r} {reason}", "the written file leaves it out (leave_out)"))
    elif is_code:
        findings.append(Finding("warning", faults[name], "the written file reads it as codes (categorical)"))
    elif name in faults:
        findings.append(Finding("error", faults[name]))
    elif kinds[name] == "numeric":
        findings += _unreadable_numbers(tables, name)
    missing = 1 - len(present) / len(cells)
    return Column(
        name, kinds[name], missing, content_of(values, kinds[name]), tuple(findings), reason is not None, is_code
    )


def _useless(tables: Mapping[str, Table], name: str, kind: Kind, values: Sequence[str]) -> str | None:
    """Why nothing can be learnt from a column; None if something can."""
    if len(values) < 2:
        return f"has the same value everywhere, {values[0][:40]!r}" if values else "is empty"
    by_site = [[cell for cell in table.column(name) if cell is not None] for table in tables.values()]
    count, distinct = sum(len(cells) for cells in by_site), sum(len(set(cells)) for cells in by_site)
    if kind == "numeric":
        is_unique = distinct == count >= FEW
        is_counter = is_unique and all(_is_counter(cells) for cells in by_site if cells)
        is_named = is_unique and LIKELY_IDENTIFIER.search(name) is not None
        return "looks like an identifier: no value occurs twice at a site" if is_counter or is_named else None
    if count >= FEW and distinct > 0.9 * count:
        return "looks like an identifier, a date or free text: hardly any value occurs twice at a site"
    if len(values) > MAX_CATEGORIES:
        return f"has {len(values)} different words, more than {MAX_CATEGORIES}; group them to use it"
    return None


def _is_counter(cells: Sequence[str]) -> bool:
    """Whether different numbers are consecutive integers."""
    numbers = [float(cell) for cell in cells]
    return all(number.is_integer() for number in numbers) and max(numbers) - min(numbers) == len(numbers) - 1


def content_of(values: Sequence[str], kind: Kind) -> str:
    """The range of a numeric column, or the first categories of a categorical one."""
    if not values:
        return "nothing"
    if kind == "numeric":
        distinct = f" ({len(values)} different)" if len(values) <= FEW else ""
        return f"{values[0]} to {values[-1]}{distinct}"
    more = f", … ({len(values)} in all)" if len(values) > 5 else ""
    return ", ".join(value[:20] for value in values[:5]) + more


def _unreadable_numbers(tables: Mapping[str, Table], name: str) -> Iterator[Finding]:
    for table in tables.values():
        try:
            table.numbers(name)
        except BadInput as error:
            yield Finding("error", str(error))


def _sites_without_values(tables: Mapping[str, Table], name: str) -> Iterator[Finding]:
    empty = [site for site, table in tables.items() if all(cell is None for cell in table.column(name))]
    if empty:
        what = f"column {name!r} has no value at {some(empty)}"
        yield Finding(
            "warning", what, "it counts as missing there, which tells the network the site; consider leave_out"
        )


def common_columns(tables: Mapping[str, Table]) -> list[str]:
    """The columns that every site has, in the order of the first site."""
    first = next(iter(tables.values()), None)
    names = [] if first is None else [*first.columns]
    return [name for name in names if all(name in table.columns for table in tables.values())]


def column_facts(columns: Sequence[Column]) -> tuple[str, ...]:
    if not columns:
        return ()
    rows = [
        (one_line(column.name), column.kind, f"{column.missing:.0%}", one_line(column.content)) for column in columns
    ]
    return tuple(aligned([("column", "kind", "missing", "values"), *rows], right=(2,)))
