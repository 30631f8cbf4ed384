"""What examples belong to, such as a patient: a column of tables, or a part of the names of image files."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from protofed.datasets.images import composed
from protofed.datasets.sites.tables import first_few
from protofed.datasets.tabular import Table
from protofed.errors import BadInput


def group_problem(pattern: str) -> str:
    """Why a pattern cannot find a group in the name of a file; empty if it can."""
    try:
        brackets = re.compile(pattern).groups
    except re.error as error:
        return f"is not a regular expression: {error}"
    return "" if brackets == 1 else f"has {brackets} pairs of brackets; put one around what names the patient"


def group_finder(pattern: str | None) -> Callable[[Path], list[str]]:
    """Finds the group of an image file in its name; nothing without a pattern. Refuses a file without a group."""
    if pattern is None:
        return lambda path: []
    if why := group_problem(pattern):
        raise BadInput(f"group = {pattern!r} {why}")
    compiled = re.compile(pattern)

    def group_of(path: Path) -> list[str]:
        found = compiled.search(composed(path.name))
        if found is None or not found[1]:
            raise BadInput(f"{path}: group = {pattern!r} finds nothing in its name; rename it, or correct the pattern")
        return [found[1]]

    return group_of


def group_faults(tables: Mapping[str, Table], column: str | None) -> list[str]:
    """What is wrong with the column of groups: cells without a value."""
    if column is None:
        return []
    gaps = [
        table.place(row) for table in tables.values() for row, cell in enumerate(table.column(column)) if cell is None
    ]
    if not gaps:
        return []
    return [
        f"{len(gaps)} rows have no value in column {column!r}, by which rows are kept together: {first_few(gaps)}. "
        "Fill it in, or remove the rows"
    ]
