"""Which columns hold numbers and which hold categories."""

from collections.abc import Mapping, Sequence
from typing import Literal

from protofed.datasets.tabular.table import Table, is_bounded_number
from protofed.errors import BadInput

Kind = Literal["numeric", "categorical"]


def column_kinds(tables: Sequence[Table], given: Mapping[str, Kind] | None = None) -> dict[str, Kind]:
    """The kind of every column: as given, otherwise numeric if all values at all sites are numbers.

    Sites must have the same columns. The order is that of the first site.
    """
    given = given or {}
    first = tables[0]
    for table in tables:
        for name in given:
            table.column(name)
        if table.columns.keys() != first.columns.keys():
            odd = ", ".join(sorted(table.columns.keys() ^ first.columns.keys())[:5])
            raise BadInput(f"{table.source} and {first.source} must have the same columns, but only one has {odd}")
    return {name: given.get(name) or _detected_kind(tables, name) for name in first.columns}


def _detected_kind(tables: Sequence[Table], name: str) -> Kind:
    cells = (cell for table in tables for cell in table.columns[name] if cell is not None)
    return "numeric" if all(is_bounded_number(cell) for cell in cells) else "categorical"
