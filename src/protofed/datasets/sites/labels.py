"""The label column of the sites' tables."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from protofed.datasets.images import composed
from protofed.datasets.sites.column_facts import facts_of, numeric_sites, sites_with_words
from protofed.datasets.sites.tables import first_few, first_word, has_values, word_rows
from protofed.datasets.tabular import Table, is_number

MAX_CLASSES = 50
"""A label with more values than that is checked more strictly for being a measurement."""


@dataclass(frozen=True)
class LabelledRows:
    """The rows of a site that have a label."""

    table: Table
    labels: tuple[str, ...]
    dropped: int
    """Number of rows without a label."""


def labelled_rows(tables: Mapping[str, Table], label: str) -> dict[str, LabelledRows]:
    """The rows of each site that have a label. Equal numbers are one class, however they are written."""
    cells = [cell for table in tables.values() for cell in table.column(label) if cell is not None]
    is_numeric = all(is_number(cell) for cell in cells)
    result = {}
    for site, table in tables.items():
        rows = [row for row, cell in enumerate(table.column(label)) if cell is not None]
        labels = tuple(composed(cell) for cell in table.take(rows).column(label) if cell is not None)
        if is_numeric:
            labels = tuple(normalised_number(cell) for cell in labels)
        result[site] = LabelledRows(table.take(rows), labels, len(table) - len(rows))
    return result


def label_faults(tables: Mapping[str, Table], label: str) -> list[str]:
    """What is wrong with a label column."""
    for table in tables.values():
        table.column(label)
    faults = [
        f"{table.source}: no row has a label in column {label!r}: fill it in, or remove the file"
        for table in tables.values()
        if not has_values(table, label)
    ]
    facts = {site: facts_of(table, label) for site, table in tables.items()}
    if (numeric := numeric_sites(facts)) and sites_with_words(facts):
        faults.append(_mixed_labels(tables, label, word_rows(tables, label), numeric))
    values = [cell for table in tables.values() for cell in table.column(label) if cell is not None]
    return [*faults, *measurement_faults(label, len(set(values)), len(values))]


def measurement_faults(label: str, distinct: int, count: int) -> list[str]:
    """Whether a label with so many different values among so many is no class."""
    if distinct * 2 > count > 20 or (distinct > MAX_CLASSES and distinct * 5 > count):
        return [
            f"column {label!r} has {distinct} different values in {count} rows: that is a measurement or an "
            "identifier, not a class. Choose another label, or group its values into a few classes"
        ]
    return []


def sorted_classes(labels: Iterable[str]) -> tuple[str, ...]:
    """The classes that occur among the labels: numbers by value, words alphabetically."""
    names = set(labels)
    if all(is_number(name) for name in names):
        return tuple(sorted(names, key=lambda name: (float(name), name)))
    return tuple(sorted(names))


def normalised_number(cell: str) -> str:
    """A number in its shortest spelling."""
    number = float(cell)
    return str(int(number)) if number.is_integer() else repr(number)


def _mixed_labels(
    tables: Mapping[str, Table], label: str, words: Mapping[str, Sequence[int]], numeric: Sequence[str]
) -> str:
    where, word = first_word(tables, label, words)
    return (
        f"{where}: the label {label!r} is {word[:40]!r}, but only numbers at {first_few(numeric)}: "
        "write the classes in the same way at every site"
    )
