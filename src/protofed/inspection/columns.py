"""What a column of the sites' tables holds, and whether it helps."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from protofed.datasets import sites
from protofed.datasets.tabular import Kind, Table
from protofed.datasets.tabular.limits import MAX_CATEGORIES
from protofed.errors import BadInput
from protofed.inspection.findings import FEW, Finding
from protofed.inspection.text import aligned, some

MAX_CODES = 20
"""A column of numbers and words with more different values is meant to be numeric."""
LIKELY_IDENTIFIER = re.compile(r"(^|[^a-z])(id|ids|mrn|uid|key|nr|number|index|row|record|unnamed.*)$", re.IGNORECASE)


@dataclass(frozen=True)
class Column:
    """What a column holds over all sites."""

    name: str
    kind: Kind
    missing: float
    """Share of all cells."""
    holds: str
    """Its range, or its categories."""
    findings: tuple[Finding, ...]
    is_left_out: bool
    is_code: bool
    """Whether its numbers and words are to be read as categories."""


def column_of(tables: Mapping[str, Table], name: str, categorical: Sequence[str]) -> Column:
    cells = [cell for table in tables.values() for cell in table.column(name)]
    there = [cell for cell in cells if cell is not None]
    kinds, faults = sites.kinds_of(tables, [name], categorical)
    written = sites.normalised_number if kinds[name] == "numeric" else sites.normalised_code
    values = sites.sorted_classes(written(cell) for cell in there)
    reason = None if name in faults else _useless(tables, name, kinds[name], values)
    is_code = name in faults and len(values) <= MAX_CODES
    findings = [*_absences(tables, name)] if there else []
    if reason is not None:
        findings.append(Finding("warning", f"column {name!r} {reason}", "it is left out (leave_out in the file)"))
    elif is_code:
        findings.append(Finding("warning", faults[name], "the file that is written says categorical"))
    elif name in faults:
        findings.append(Finding("error", faults[name]))
    elif kinds[name] == "numeric":
        findings += _beyond_numbers(tables, name)
    missing = 1 - len(there) / len(cells)
    return Column(name, kinds[name], missing, holds(values, kinds[name]), tuple(findings), reason is not None, is_code)


def _useless(tables: Mapping[str, Table], name: str, kind: Kind, values: Sequence[str]) -> str | None:
    """Why a column cannot help, if so."""
    if len(values) < 2:
        return f"has the same value everywhere, {values[0][:40]!r}" if values else "is empty"
    by_site = [[cell for cell in table.column(name) if cell is not None] for table in tables.values()]
    count, distinct = sum(len(cells) for cells in by_site), sum(len(set(cells)) for cells in by_site)
    if kind == "numeric":
        is_counted = distinct == count >= FEW and all(_is_running(cells) for cells in by_site if cells)
        is_named = LIKELY_IDENTIFIER.search(name) is not None and distinct == count >= FEW
        return "looks like an identifier: every row of a site has another value" if is_counted or is_named else None
    if count >= FEW and distinct > 0.9 * count:
        return "looks like an identifier, a date or free text: nearly every row of a site has another value"
    if len(values) > MAX_CATEGORIES:
        return f"has {len(values)} different words, the most is {MAX_CATEGORIES}; group them to use it"
    return None


def _is_running(cells: Sequence[str]) -> bool:
    """Whether different numbers are a count without gaps."""
    numbers = [float(cell) for cell in cells]
    return all(number.is_integer() for number in numbers) and max(numbers) - min(numbers) == len(numbers) - 1


def holds(values: Sequence[str], kind: Kind) -> str:
    if not values:
        return "nothing"
    if kind == "numeric":
        counted = f" ({len(values)} different)" if len(values) <= FEW else ""
        return f"{values[0]} to {values[-1]}{counted}"
    more = f", … ({len(values)} in all)" if len(values) > 5 else ""
    return ", ".join(value[:20] for value in values[:5]) + more


def _beyond_numbers(tables: Mapping[str, Table], name: str) -> Iterator[Finding]:
    for table in tables.values():
        try:
            table.numbers(name)
        except BadInput as error:
            yield Finding("error", str(error))


def _absences(tables: Mapping[str, Table], name: str) -> Iterator[Finding]:
    empty = [site for site, table in tables.items() if all(cell is None for cell in table.column(name))]
    if empty:
        what = f"column {name!r} has no value at {some(empty)}"
        yield Finding(
            "warning", what, "it is read as missing there, which tells a network the site; consider leave_out"
        )


def common(tables: Mapping[str, Table]) -> list[str]:
    """The columns that every site has, in the first one's order."""
    first = next(iter(tables.values()), None)
    names = [] if first is None else [*first.columns]
    return [name for name in names if all(name in table.columns for table in tables.values())]


def column_facts(columns: Sequence[Column]) -> tuple[str, ...]:
    if not columns:
        return ()
    rows = [(column.name, column.kind, f"{column.missing:.0%}", column.holds) for column in columns]
    return tuple(aligned([("column", "kind", "missing", "values"), *rows], right=(2,)))
