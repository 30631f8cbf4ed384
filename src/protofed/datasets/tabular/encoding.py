"""Rows as vectors. The encoder is fitted on summaries of the sites' training rows, not on the rows themselves."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from math import fsum
from operator import add

import numpy as np
from numpy.typing import NDArray

from protofed.datasets.tabular import limits
from protofed.datasets.tabular.schema import Kind
from protofed.datasets.tabular.table import Table
from protofed.errors import BadInput

# ---- summaries of rows


@dataclass(frozen=True)
class Moments:
    """Summary of a numeric column."""

    count: int = 0
    """Number of values that are present."""
    missing: int = 0
    total: float = 0.0
    squares: float = 0.0
    """Sum of squared deviations from the mean of these rows. Unlike a sum of squares, it stays exact when the mean is
    large."""

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def __add__(self, other: "Moments") -> "Moments":
        count = self.count + other.count
        between = (self.mean - other.mean) ** 2 * self.count * other.count / count if count else 0.0
        squares = self.squares + other.squares + between
        return Moments(count, self.missing + other.missing, self.total + other.total, squares)


@dataclass(frozen=True)
class Categories:
    """Summary of a categorical column."""

    values: frozenset[str] = frozenset()

    def __add__(self, other: "Categories") -> "Categories":
        return Categories(self.values | other.values)


@dataclass(frozen=True)
class Summary:
    """All that an encoder needs of some rows. Summaries of disjoint rows can be added."""

    columns: Mapping[str, Moments | Categories]

    def __add__(self, other: "Summary") -> "Summary":
        if self.columns.keys() != other.columns.keys():
            odd = ", ".join(sorted(self.columns.keys() ^ other.columns.keys())[:5])
            raise BadInput(f"summaries cannot be added: only one of them has the columns {odd}")
        return Summary({name: _added(name, column, other.columns[name]) for name, column in self.columns.items()})


def summary_of(table: Table, kinds: Mapping[str, Kind], min_rows: int = 1) -> Summary:
    """The summary of a site's training rows. Columns that `kinds` does not name are left out. Of fewer than `min_rows`
    rows nothing is said: neither the words that only they have, nor the sums of a column that only they have values in.
    """
    return Summary({name: _column_summary(table, name, kind, min_rows) for name, kind in kinds.items()})


def sum_of(summaries: Iterable[Summary]) -> Summary:
    """The summary of all rows together."""
    return reduce(add, summaries)


def _column_summary(table: Table, name: str, kind: Kind, min_rows: int) -> Moments | Categories:
    if kind == "categorical":
        count = Counter(cell for cell in table.column(name) if cell is not None)
        # guard: rare-words-are-not-told
        categories = Categories(frozenset(cell for cell, rows in count.items() if rows >= min_rows))
        _check_categories(name, categories, f"{table.source}: ")
        return categories
    values = table.numbers(name)
    present = values[~np.isnan(values)].tolist()
    missing = len(values) - len(present)
    if len(present) < min_rows:  # guard: few-rows-are-not-summed-up
        return Moments(missing=missing)
    mean = fsum(present) / max(len(present), 1)
    squares = fsum((value - mean) ** 2 for value in present)
    return Moments(len(present), missing, fsum(present), squares)


def _added(name: str, left: Moments | Categories, right: Moments | Categories) -> Moments | Categories:
    if isinstance(left, Moments) and isinstance(right, Moments):
        return left + right
    if isinstance(left, Categories) and isinstance(right, Categories):
        _check_categories(name, left + right)
        return left + right
    raise BadInput(f"summaries cannot be added: column {name!r} is numeric in one and categorical in the other")


def _check_categories(name: str, categories: Categories, where: str = "") -> None:
    if len(categories.values) > limits.MAX_CATEGORIES:
        raise BadInput(
            f"{where}column {name!r} has {len(categories.values)} categories; at most {limits.MAX_CATEGORIES} are "
            "encoded. Leave it out if it is an identifier, declare it numeric if it is a number, or group its values"
        )


# ---- the encoder


@dataclass(frozen=True)
class Numeric:
    """A standardised number, 0 where it is missing. If training rows had gaps, a second feature marks them."""

    column: str
    mean: float
    deviation: float
    has_indicator: bool

    @property
    def features(self) -> tuple[str, ...]:
        return (self.column, f"{self.column} missing") if self.has_indicator else (self.column,)

    def encode(self, table: Table) -> NDArray[np.float64]:
        values = table.numbers(self.column)
        is_missing = np.isnan(values)
        scaled = np.where(is_missing, 0.0, (values - self.mean) / self.deviation)
        return np.stack([scaled, is_missing][: len(self.features)], axis=1)


@dataclass(frozen=True)
class OneHot:
    """One feature for each category, one for categories that training rows did not have, and one for missing values."""

    column: str
    categories: tuple[str, ...]

    @property
    def features(self) -> tuple[str, ...]:
        named = (f"{self.column}={category}" for category in self.categories)
        return (*named, f"{self.column} other", f"{self.column} missing")

    def encode(self, table: Table) -> NDArray[np.float64]:
        position = {category: k for k, category in enumerate(self.categories)}
        other = len(position)
        chosen = [other + 1 if cell is None else position.get(cell, other) for cell in table.column(self.column)]
        hot = np.zeros((len(table), other + 2))
        hot[np.arange(len(table)), chosen] = 1
        return hot


@dataclass(frozen=True)
class Encoder:
    """Maps rows to vectors, in the same way at every site."""

    columns: tuple[Numeric | OneHot, ...]

    @classmethod
    def fit(cls, summary: Summary) -> "Encoder":
        """The encoder for the summarised training rows."""
        return cls(tuple(_fitted(name, column) for name, column in summary.columns.items()))

    @property
    def features(self) -> tuple[str, ...]:
        """The name of each of the F numbers of a row."""
        return tuple(name for column in self.columns for name in column.features)

    def encode(self, table: Table) -> NDArray[np.float32]:
        """The rows of a table, (N, F)."""
        rows, features = len(table), len(self.features)
        if rows * features > limits.MAX_CELLS:
            raise BadInput(
                f"{table.source}: {rows} rows of {features} numbers; at most {limits.MAX_CELLS} numbers are encoded. "
                "Leave out columns, or split the file"
            )
        with np.errstate(over="ignore"):
            x = np.concatenate([column.encode(table) for column in self.columns], axis=1).astype(np.float32)
        if not np.isfinite(x).all():
            row, feature = np.argwhere(~np.isfinite(x))[0]
            raise BadInput(
                f"{table.place(row)}: {self.features[feature]!r} is too far from the values of the training rows; "
                "correct the value, or leave the cell empty"
            )
        return x


def _fitted(name: str, column: Moments | Categories) -> Numeric | OneHot:
    if isinstance(column, Categories):
        return OneHot(name, tuple(sorted(column.values)))
    deviation = float(np.sqrt(column.squares / max(column.count, 1)))
    # Rounding may give a constant column a tiny deviation instead of 0. Dividing by it would amplify noise.
    is_constant = deviation <= 1e-12 * abs(column.mean)
    return Numeric(name, column.mean, 1.0 if is_constant else deviation, column.missing > 0)
