"""The tables of the sites: read, compared by column, and their codes normalised."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from protofed.datasets.images import check_inside, composed
from protofed.datasets.sites.column_facts import DECIMAL_COMMA, facts_of, kinds_from
from protofed.datasets.sites.layout import table_files
from protofed.datasets.tabular import Kind, Table, is_number, read_table
from protofed.errors import BadInput

INTEGRAL = re.compile(r"(-?(?:0|[1-9]\d*))\.0", re.ASCII)
"""An integer as many programs write it when its column has gaps: `1.0`."""
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
    return missing_columns({site: table.columns.keys() for site, table in tables.items()}, leave_out)


def missing_columns(columns: Mapping[str, Collection[str]], leave_out: Iterable[str] = ()) -> list[str]:
    """The same from the names of each site's columns."""
    faults = []
    for name in sorted({name for names in columns.values() for name in names} - set(leave_out)):
        present = [site for site, names in columns.items() if name in names]
        absent = [site for site in columns if site not in present]
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
    names = [*names]
    facts = {site: {name: facts_of(table, name) for name in names} for site, table in tables.items()}
    kinds, mixed = kinds_from(facts, names, categorical)
    return kinds, {name: _mixed_column(tables, name, numeric) for name, (_, numeric) in mixed.items()}


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


def _mixed_column(tables: Mapping[str, Table], name: str, numeric: Sequence[str]) -> str:
    words = word_rows(tables, name)
    where, word = first_word(tables, name, words)
    others = f"only numbers at {first_few(numeric)}" if numeric else "numbers elsewhere"
    more = sum(len(rows) for rows in words.values()) - 1
    count = f" ({more} more such values)" if more else ""
    correction = "write decimals with a point" if DECIMAL_COMMA.fullmatch(word) else "correct it"
    return (
        f"{where}: column {name!r} has {word[:40]!r}, but {others}{count}: {correction}, leave the cell empty if the "
        "value is missing, or name the column in categorical if its numbers are codes"
    )
