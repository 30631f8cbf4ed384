"""Tables of rows and named columns, from files to numbers that a network can read, without pooling the rows.

    table = read_table(path)                          one for each site
    kinds = column_kinds(tables, told={"ward": "categorical"})
    encoder = Encoder.fit(sum_of(summary_of(table, kinds) for table in tables))
    x = encoder.encode(table)                         (N, F), float32

A `Summary` holds counts, sums and the categories seen, no rows: sites can send theirs to a server, which adds them up,
and the encoder is the one that the pooled rows would give. Summaries are not anonymous all the same: a category that
one person has is in them, and so are the values of a site with one row.
"""

import csv
import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import reduce
from itertools import islice
from math import fsum
from operator import add
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np
from numpy.typing import NDArray

from protofed.datasets.files import inside
from protofed.datasets.parquet_pages import unfolded_bytes
from protofed.errors import BadInput

Kind = Literal["numeric", "categorical"]
Cells = tuple[str | None, ...]

MISSING = frozenset({"", "?", "NA", "NaN", "nan"})
"""What a missing value is written as, after blanks at both ends are taken off."""
MOST_BYTES = 1 << 29
"""Of a file, and of what is in it once it is decompressed."""
MOST_LINE = 4 * 2**20
"""Letters of one line: 2 000 columns of a thousand letters each are half of it."""
MOST_ROWS = 1_000_000
MOST_COLUMNS = 2_000
MOST_CELLS = 20_000_000
MOST_CATEGORIES = 200
LARGEST = 1e30
"""The largest magnitude of a number: its square still has room in float64."""

_PLAIN = r"(null|bool|u?int\d+|halffloat|float|double|(large_)?string)"
FLAT = re.compile(rf"{_PLAIN}|dictionary<values={_PLAIN}, .*>")
"""The types of Parquet columns that are read, by pyarrow's names."""
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?", re.ASCII)


@dataclass(frozen=True)
class Table:
    """The rows of a file, column by column: text without blanks at its ends, None where a value is missing."""

    columns: Mapping[str, Cells]
    source: str
    """The file, for messages."""
    places: Sequence[int]
    """Where each row stands in the file, for messages."""
    unit: Literal["line", "row"] = "line"
    """What places count."""

    def __len__(self) -> int:
        return len(self.places)

    def column(self, name: str) -> Cells:
        """The values of a column."""
        if name not in self.columns:
            close = get_close_matches(name, self.columns, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(islice(self.columns, 20))}"
            raise BadInput(f"{self.source}: there is no column {name!r}; {hint}")
        return self.columns[name]

    def numbers(self, name: str) -> NDArray[np.float64]:
        """A column as numbers, NaN where one is missing; refuses anything else."""
        cells = self.column(name)
        for row, cell in enumerate(cells):
            if cell is not None and not _is_number(cell):
                raise BadInput(
                    f"{self.place(row)}: column {name!r} has {cell[:40]!r}, expected a number of magnitude up to "
                    f"{LARGEST:g}, or one of {_missing_words()} for a missing one"
                )
        return np.array([np.nan if cell is None else float(cell) for cell in cells], dtype=np.float64)

    def take(self, rows: Iterable[int]) -> "Table":
        """The rows at these positions, in this order."""
        rows = [int(row) for row in rows]
        columns = {name: tuple(cells[row] for row in rows) for name, cells in self.columns.items()}
        return Table(columns, self.source, [self.places[row] for row in rows], self.unit)

    def place(self, row: int) -> str:
        """Where a row comes from, as messages begin: `file, line 3`."""
        return f"{self.source}, {self.unit} {self.places[row]}"


def read_table(path: Path) -> Table:
    """A table with a header, from a file that is called `.csv` or `.parquet`."""
    readers: dict[str, Callable[[Path], Table]] = {".csv": read_csv, ".parquet": read_parquet}
    if path.suffix.lower() not in readers:
        raise BadInput(f"{path}: expected a table in a file called .csv or .parquet")
    return readers[path.suffix.lower()](path)


def read_csv(path: Path, names: Sequence[str] | None = None) -> Table:
    """Comma-separated values in UTF-8; the first row names the columns, unless `names` does. Empty lines are skipped.

    Every row must have as many fields as there are columns.
    """
    check_size(path)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(_lines(file, path), strict=True)
        try:
            names = _names(next(reader, []) if names is None else names, str(path))
            rows = list(_rows(reader, len(names), path))
        except (csv.Error, UnicodeDecodeError) as error:
            raise BadInput(
                f"{path}, after line {reader.line_num}: is not comma-separated text in UTF-8 ({error}); "
                "export it again as CSV"
            ) from None
    if not rows:
        raise BadInput(f"{path}: has no rows; expected one line for each example")
    columns = zip(*(cells for _, cells in rows), strict=True)
    return Table(dict(zip(names, columns, strict=True)), str(path), [line for line, _ in rows])


def read_parquet(path: Path) -> Table:
    """A Parquet file with flat columns of text, numbers and truth values; needs pyarrow."""
    check_size(path)
    pyarrow, parquet = _pyarrow()
    size = unfolded_bytes(path)
    if size > MOST_BYTES:
        raise BadInput(f"{path}: holds {size} bytes, the most is {MOST_BYTES}; divide it")
    try:
        with parquet.ParquetFile(path) as file:
            _check_parquet(file, path)
            names, rows = file.schema_arrow.names, file.metadata.num_rows
        # As a dictionary, a long text that comes a million times is there once.
        with parquet.ParquetFile(path, read_dictionary=names) as file:
            columns = {name: _column(file, name) for name in names}
    except (pyarrow.ArrowException, OSError) as error:
        raise BadInput(f"{path}: cannot be read as Parquet ({error}); write it again") from None
    return Table(columns, str(path), range(1, rows + 1), "row")


def file_below(root: Path, name: str, obtain: str) -> Path:
    """The file of this name, such as `set/part.csv`, below the root; `obtain` says how to get it if it is missing."""
    path = root / name
    if not path.is_file():
        raise BadInput(f"{path}: there is no such file. {obtain}")
    if not inside(root, path):
        raise BadInput(f"{path}: leads out of {root}; put the file itself there")
    return path


def check_size(path: Path) -> None:
    """Refuses what is not a plain file, or too large."""
    if not path.is_file():
        raise BadInput(f"{path}: there is no such file, or it is no ordinary one")
    if path.stat().st_size > MOST_BYTES:
        raise BadInput(f"{path}: has {path.stat().st_size} bytes, the most is {MOST_BYTES}; divide it")


def column_kinds(tables: Sequence[Table], told: Mapping[str, Kind] | None = None) -> dict[str, Kind]:
    """The kind of every column: as told, otherwise numeric if all that is there at all sites are numbers.

    Sites must have the same columns; their order is the first one's.
    """
    told = told or {}
    first = tables[0]
    for table in tables:
        for name in told:
            table.column(name)
        if table.columns.keys() != first.columns.keys():
            odd = ", ".join(sorted(table.columns.keys() ^ first.columns.keys())[:5])
            raise BadInput(f"{table.source} and {first.source}: expected the same columns, but only one has {odd}")
    return {name: told.get(name) or _found_kind(tables, name) for name in first.columns}


@dataclass(frozen=True)
class Moments:
    """A numeric column of some rows."""

    count: int = 0
    """Of values that are there."""
    missing: int = 0
    total: float = 0.0
    squares: float = 0.0
    """The sum of squared deviations from these rows' own mean, which loses nothing where the mean is large."""

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
    """A categorical column of some rows."""

    seen: frozenset[str] = frozenset()

    def __add__(self, other: "Categories") -> "Categories":
        return Categories(self.seen | other.seen)


@dataclass(frozen=True)
class Summary:
    """What an encoder needs to know of some rows; summaries of disjoint rows can be added."""

    columns: Mapping[str, Moments | Categories]

    def __add__(self, other: "Summary") -> "Summary":
        if self.columns.keys() != other.columns.keys():
            odd = ", ".join(sorted(self.columns.keys() ^ other.columns.keys())[:5])
            raise BadInput(f"summaries cannot be added: only one of them has the columns {odd}")
        return Summary({name: _added(name, own, other.columns[name]) for name, own in self.columns.items()})


def summary_of(table: Table, kinds: Mapping[str, Kind]) -> Summary:
    """The summary of a site's training rows; columns that `kinds` does not name are left out."""
    return Summary({name: _summarised(table, name, kind) for name, kind in kinds.items()})


def sum_of(summaries: Iterable[Summary]) -> Summary:
    """The summary of all rows together."""
    return reduce(add, summaries)


@dataclass(frozen=True)
class Numeric:
    """A number, standardised; 0 where it is missing, and a second feature that says so if training had such rows."""

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
    """A 1 at the value's category, at `other` if training never saw it, or at `missing`."""

    column: str
    categories: tuple[str, ...]

    @property
    def features(self) -> tuple[str, ...]:
        return (*(f"{self.column}={category}" for category in self.categories), *self._special)

    @property
    def _special(self) -> tuple[str, str]:
        return f"{self.column} other", f"{self.column} missing"

    def encode(self, table: Table) -> NDArray[np.float64]:
        slots = {category: slot for slot, category in enumerate(self.categories)}
        other = len(slots)
        chosen = [other + 1 if cell is None else slots.get(cell, other) for cell in table.column(self.column)]
        hot = np.zeros((len(table), other + 2))
        hot[np.arange(len(table)), chosen] = 1
        return hot


@dataclass(frozen=True)
class Encoder:
    """Rows as vectors, the same way at every site."""

    columns: tuple[Numeric | OneHot, ...]

    @classmethod
    def fit(cls, summary: Summary) -> "Encoder":
        """The encoder for the training rows that were summarised."""
        return cls(tuple(_fitted(name, column) for name, column in summary.columns.items()))

    @property
    def features(self) -> tuple[str, ...]:
        """What each of the F numbers of a row is."""
        return tuple(name for column in self.columns for name in column.features)

    def encode(self, table: Table) -> NDArray[np.float32]:
        """The rows of a table, (N, F)."""
        if len(table) * len(self.features) > MOST_CELLS:
            raise BadInput(f"{table.source}: {len(table)} rows of {len(self.features)} numbers are over {MOST_CELLS}")
        with np.errstate(over="ignore"):
            x = np.concatenate([column.encode(table) for column in self.columns], axis=1).astype(np.float32)
        if not np.isfinite(x).all():
            row, feature = np.argwhere(~np.isfinite(x))[0]
            raise BadInput(f"{table.place(row)}: {self.features[feature]!r} is too far from what training rows have")
        return x


def _missing_words() -> str:
    return ", ".join(repr(word) for word in sorted(MISSING))


def _is_number(cell: str) -> bool:
    return NUMBER.fullmatch(cell) is not None and abs(float(cell)) <= LARGEST


def _names(found: Sequence[str], source: str) -> list[str]:
    names = [name.strip() for name in found]
    if not names or "" in names or len(set(names)) < len(names):
        raise BadInput(f"{source}, line 1: expected a name for every column, each another, not {', '.join(names[:20])}")
    if len(names) > MOST_COLUMNS:
        raise BadInput(f"{source}: has {len(names)} columns, the most is {MOST_COLUMNS}; leave some out")
    return names


def _lines(file: TextIO, path: Path) -> Iterator[str]:
    """The lines of a file; one that is too long is refused before all of it is read."""
    while line := file.readline(MOST_LINE + 1):
        if len(line) > MOST_LINE:
            raise BadInput(f"{path}: a line has more than {MOST_LINE} letters; export it again as CSV")
        yield line


def _rows(reader: Any, width: int, path: Path) -> Iterator[tuple[int, Cells]]:
    """The line on which each row ends, and its cells."""
    count = 0
    for fields in reader:
        if not fields:
            continue
        if len(fields) != width:
            raise BadInput(f"{path}, line {reader.line_num}: has {len(fields)} fields, expected {width}")
        count += 1
        _check_rows(count, width, str(path))
        yield reader.line_num, tuple(_cell(field) for field in fields)


def _check_rows(rows: int, columns: int, source: str) -> None:
    if rows > MOST_ROWS or rows * columns > MOST_CELLS:
        raise BadInput(f"{source}: the most is {MOST_ROWS} rows and {MOST_CELLS} values; divide it")


def _cell(text: str) -> str | None:
    text = text.strip()
    return None if text in MISSING else text


def _pyarrow() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise BadInput("Parquet files need pyarrow: pip install 'protofed[parquet]', or export them as CSV") from None


def _check_parquet(file: Any, path: Path) -> None:
    """Sizes as the file states them, before anything is decompressed."""
    _names(file.schema_arrow.names, str(path))
    if file.metadata.num_rows == 0:
        raise BadInput(f"{path}: has no rows; expected one for each example")
    _check_rows(file.metadata.num_rows, len(file.schema_arrow.names), str(path))
    for name, kind in zip(file.schema_arrow.names, file.schema_arrow.types, strict=True):
        if not FLAT.fullmatch(str(kind)):
            raise BadInput(f"{path}: column {name!r} has values of type {kind}, expected text, numbers or truth values")


def _column(file: Any, name: str) -> Cells:
    column = file.read(columns=[name]).column(name)
    column.validate(full=True)  # text may be no text, and a place in a dictionary may lie outside of it
    return tuple(cell for chunk in column.chunks for cell in _cells(chunk))


def _cells(chunk: Any) -> list[str | None]:
    """The values of a part of a column; equal ones of a dictionary are one object."""
    if hasattr(chunk, "dictionary"):
        known = _cells(chunk.dictionary)
        return [None if index is None else known[index] for index in chunk.indices.to_pylist()]
    return [None if value is None else _cell(_text(value)) for value in chunk.to_pylist()]


def _text(value: str | float) -> str:
    """As a CSV file would have it; a whole number is written alike whatever its type."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _found_kind(tables: Sequence[Table], name: str) -> Kind:
    cells = (cell for table in tables for cell in table.columns[name] if cell is not None)
    return "numeric" if all(_is_number(cell) for cell in cells) else "categorical"


def _summarised(table: Table, name: str, kind: Kind) -> Moments | Categories:
    if kind == "categorical":
        categories = Categories(frozenset(cell for cell in table.column(name) if cell is not None))
        _check_categories(name, categories, f"{table.source}: ")
        return categories
    values = table.numbers(name)
    there = values[~np.isnan(values)].tolist()
    mean = fsum(there) / max(len(there), 1)
    return Moments(len(there), len(values) - len(there), fsum(there), fsum((value - mean) ** 2 for value in there))


def _check_categories(name: str, categories: Categories, where: str = "") -> None:
    if len(categories.seen) > MOST_CATEGORIES:
        raise BadInput(
            f"{where}column {name!r} has {len(categories.seen)} categories, the most is {MOST_CATEGORIES}; "
            "leave it out if it is an identifier, tell its kind if it is numeric, or group its values"
        )


def _added(name: str, own: Moments | Categories, other: Moments | Categories) -> Moments | Categories:
    if isinstance(own, Moments) and isinstance(other, Moments):
        return own + other
    if isinstance(own, Categories) and isinstance(other, Categories):
        _check_categories(name, own + other)
        return own + other
    raise BadInput(f"summaries cannot be added: column {name!r} is numeric in one and categorical in the other")


def _fitted(name: str, column: Moments | Categories) -> Numeric | OneHot:
    if isinstance(column, Categories):
        return OneHot(name, tuple(sorted(column.seen)))
    deviation = float(np.sqrt(column.squares / max(column.count, 1)))
    # Rounding leaves a constant column a deviation that is tiny, not 0; dividing by it would magnify noise.
    is_constant = deviation <= 1e-12 * abs(column.mean)
    return Numeric(name, column.mean, 1.0 if is_constant else deviation, column.missing > 0)
