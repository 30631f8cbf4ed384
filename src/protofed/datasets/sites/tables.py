"""The tables of the sites: read, compared by column, and their codes normalised."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from protofed.datasets.images import check_inside, composed
from protofed.datasets.sites.layout import table_files
from protofed.datasets.tabular import Kind, Table, is_number, read_table
from protofed.errors import BadInput

INTEGRAL = re.compile(r"(-?(?:0|[1-9]\d*))\.0", re.ASCII)
"""An integer as many programs write it when its column has gaps: `1.0`."""
DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+", re.ASCII)
MAX_NAMED = 5
"""Sites named in one message."""


def read_tables(root: Path) -> tuple[dict[str, Table], list[str]]:
    """The table of each site, and what is wrong with those that cannot be read."""
    tables: dict[str, Table] = {}
    faults = []
    for path in table_files(root):
        site = composed(path.stem)
        try:
            check_inside(path, root)
            for other in (other for other in tables if other.casefold() == site.casefold()):
                raise BadInput(f"{path}: site {site!r} has another table, {tables[other].source}; keep one")
            tables[site] = read_table(path)
        except BadInput as error:
            faults.append(str(error))
    return tables, faults


def column_faults(tables: Mapping[str, Table], leave_out: Iterable[str] = ()) -> list[str]:
    """A sentence for each column that some sites have and others lack."""
    faults = []
    for name in sorted({name for table in tables.values() for name in table.columns} - set(leave_out)):
        present = [site for site, table in tables.items() if name in table.columns]
        absent = [site for site in tables if site not in present]
        if absent:
            faults.append(
                f"column {name!r} is at {first_few(present)}, but not at {first_few(absent)}: add it there (cells may "
                "stay empty), spell it the same everywhere, remove it everywhere, or name it in leave_out"
            )
    return faults


def kinds_of(
    tables: Mapping[str, Table], names: Iterable[str], categorical: Iterable[str] = ()
) -> tuple[dict[str, Kind], dict[str, str]]:
    """The kind of each column; and for columns that mix numbers and words by mistake, a sentence that says so.

    A column is meant to be numeric if some site has only numbers in it, or if most of its values are numbers.
    """
    kinds: dict[str, Kind] = {}
    faults = {}
    declared = set(categorical)
    for name in names:
        words = word_rows(tables, name)
        kinds[name] = "categorical" if name in declared or any(words.values()) else "numeric"
        numeric = numeric_sites(tables, name, words)
        if name not in declared and any(words.values()) and (numeric or _mostly_numbers(tables.values(), name)):
            faults[name] = _mixed_column(tables, name, words, numeric)
    return kinds, faults


def with_normalised_codes(table: Table, names: Iterable[str]) -> Table:
    """The table with the codes of these columns in one spelling: `1.0` becomes `1`."""
    columns = {name: tuple(cell and normalised_code(cell) for cell in table.column(name)) for name in names}
    return replace(table, columns={**table.columns, **columns})


def normalised_code(cell: str) -> str:
    """A category in the spelling by which categories are compared."""
    integral = INTEGRAL.fullmatch(cell)
    return integral[1] if integral else composed(cell)


def word_rows(tables: Mapping[str, Table], name: str) -> dict[str, list[int]]:
    """The rows of each site whose value in this column is present and not a number."""
    return {
        site: [row for row, cell in enumerate(table.column(name)) if cell is not None and not is_number(cell)]
        for site, table in tables.items()
    }


def numeric_sites(tables: Mapping[str, Table], name: str, words: Mapping[str, Sequence[int]]) -> list[str]:
    """The sites that have numbers and no words in this column."""
    return [site for site, table in tables.items() if has_values(table, name) and not words[site]]


def has_values(table: Table, name: str) -> bool:
    return any(cell is not None for cell in table.column(name))


def first_word(tables: Mapping[str, Table], name: str, words: Mapping[str, Sequence[int]]) -> tuple[str, str]:
    """Where the first value stands that is not a number, and the value."""
    site = next(site for site in tables if words[site])
    row = words[site][0]
    return tables[site].place(row), tables[site].column(name)[row] or ""


def first_few(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def _mostly_numbers(tables: Iterable[Table], name: str) -> bool:
    cells = [cell for table in tables for cell in table.column(name) if cell is not None]
    return 2 * sum(is_number(cell) or DECIMAL_COMMA.fullmatch(cell) is not None for cell in cells) > len(cells)


def _mixed_column(
    tables: Mapping[str, Table], name: str, words: Mapping[str, Sequence[int]], numeric: Sequence[str]
) -> str:
    where, word = first_word(tables, name, words)
    others = f"only numbers at {first_few(numeric)}" if numeric else "numbers elsewhere"
    more = sum(len(rows) for rows in words.values()) - 1
    count = f" ({more} more such values)" if more else ""
    correction = "write decimals with a point" if DECIMAL_COMMA.fullmatch(word) else "correct it"
    return (
        f"{where}: column {name!r} has {word[:40]!r}, but {others}{count}: {correction}, leave the cell empty if the "
        "value is missing, or name the column in categorical if its numbers are codes"
    )
