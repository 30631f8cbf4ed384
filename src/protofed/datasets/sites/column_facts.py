"""What a site can say of a column without a value of it, and the kind that the column has at all sites."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from protofed.datasets.tabular import Kind, Table, is_number

DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+", re.ASCII)


@dataclass(frozen=True)
class ColumnFacts:
    """How many of a column's values are numbers."""

    present: Annotated[int, Ge(0)]
    numbers: Annotated[int, Ge(0)]
    """Of these, values that are written as numbers."""
    meant: Annotated[int, Ge(0)]
    """Of these, values that are numbers, or would be with a point for the comma."""

    @property
    def has_words(self) -> bool:
        return self.numbers < self.present

    @property
    def is_numeric(self) -> bool:
        """Whether it has values, and all are numbers."""
        return 0 < self.present == self.numbers


def facts_of(table: Table, name: str) -> ColumnFacts:
    cells = [cell for cell in table.column(name) if cell is not None]
    numbers = sum(map(is_number, cells))
    return ColumnFacts(len(cells), numbers, numbers + sum(DECIMAL_COMMA.fullmatch(cell) is not None for cell in cells))


def sites_with_words(facts: Mapping[str, ColumnFacts]) -> list[str]:
    return [site for site, own in facts.items() if own.has_words]


def numeric_sites(facts: Mapping[str, ColumnFacts]) -> list[str]:
    """The sites that have numbers and no words in this column."""
    return [site for site, own in facts.items() if own.is_numeric]


def kinds_from(
    facts: Mapping[str, Mapping[str, ColumnFacts]], names: Iterable[str], categorical: Iterable[str] = ()
) -> tuple[dict[str, Kind], dict[str, tuple[Sequence[str], Sequence[str]]]]:
    """The kind of each column, from what each site says of it. For columns that mix numbers and words by mistake also
    the sites that have words and those that have only numbers.

    A column is meant to be numeric if some site has only numbers in it, or if most of its values are numbers.
    """
    kinds: dict[str, Kind] = {}
    mixed: dict[str, tuple[Sequence[str], Sequence[str]]] = {}
    declared = set(categorical)
    for name in names:
        column = {site: own[name] for site, own in facts.items()}
        words, numeric = sites_with_words(column), numeric_sites(column)
        kinds[name] = "categorical" if name in declared or words else "numeric"
        if name not in declared and words and (numeric or _mostly_numbers(column.values())):
            mixed[name] = words, numeric
    return kinds, mixed


def _mostly_numbers(facts: Iterable[ColumnFacts]) -> bool:
    everyone = [*facts]
    return 2 * sum(own.meant for own in everyone) > sum(own.present for own in everyone)
