"""Parquet files as tables; needs pyarrow."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from protofed.datasets.tabular import limits
from protofed.datasets.tabular.parquet_pages import pages_of
from protofed.datasets.tabular.table import Cells, Table, parse_cell
from protofed.errors import BadInput

_SCALAR = r"(null|bool|u?int\d+|halffloat|float|double|(large_)?string)"
SUPPORTED_TYPES = re.compile(rf"{_SCALAR}|dictionary<values={_SCALAR}, .*>")
"""The column types that are read, by pyarrow's names."""
BATCH_ROWS = 262_144
"""Rows that are decoded at once."""


def read_parquet(path: Path) -> Table:
    """Reads a Parquet file whose columns are text, numbers or booleans, not nested."""
    limits.check_file(path)
    pyarrow, parquet = _import_pyarrow()
    pages = pages_of(path)
    if pages.size > limits.MAX_BYTES:
        raise BadInput(
            f"{path}: {pages.size} bytes after decompression; at most {limits.MAX_BYTES} are read. Split the file"
        )
    try:
        with parquet.ParquetFile(path) as file:
            _check_schema(file, path)
            names, num_rows = file.schema_arrow.names, file.metadata.num_rows
        pages.check_rows(str(path))
        # Dictionary encoding keeps one copy of a text that occurs in many rows.
        with parquet.ParquetFile(path, read_dictionary=names) as file:
            columns = {name: tuple(_column(file, name, num_rows, str(path))) for name in names}
    except BadInput:
        raise
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read as Parquet ({error}). Write it again") from None
    return Table(columns, str(path), range(1, num_rows + 1), "row")


def _import_pyarrow() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise BadInput("Parquet files need pyarrow: pip install 'protofed[parquet]', or export them as CSV") from None


def _check_schema(file: Any, path: Path) -> None:
    """Checks names, types and sizes as the file states them, before anything is decompressed."""
    names, types, num_rows = file.schema_arrow.names, file.schema_arrow.types, file.metadata.num_rows
    limits.check_column_names(names, str(path))
    if num_rows == 0:
        raise BadInput(f"{path}: no rows; each example needs one")
    limits.check_shape(num_rows, len(names), str(path))
    for name, kind in zip(names, types, strict=True):
        if not SUPPORTED_TYPES.fullmatch(str(kind)):
            raise BadInput(f"{path}: column {name!r} is of type {kind}; only text, numbers and booleans are read")


def _column(file: Any, name: str, num_rows: int, source: str) -> Iterator[str | None]:
    """The values of a column, decoded a part at a time. Refuses more or fewer rows than the file says it has."""
    count = 0
    dictionary: Any = None
    entries: Cells = ()
    for batch in file.iter_batches(BATCH_ROWS, columns=[name], use_threads=False):
        count += batch.num_rows
        if count > num_rows:  # guard: parquet-rows-are-counted
            break  # guard: parquet-rows-are-counted
        column = batch.column(0)
        column.validate(full=True)  # finds text that is not UTF-8, and dictionary indices that are out of range
        if hasattr(column, "dictionary") and (dictionary is None or not column.dictionary.equals(dictionary)):
            dictionary, entries = column.dictionary, _cells(column.dictionary)
        yield from _cells(column, entries)
    if count != num_rows:
        more = "more" if count > num_rows else "fewer"
        raise BadInput(f"{source}: column {name!r} has {more} rows than the {num_rows} of its file. Write it again")


def _cells(column: Any, entries: Cells = ()) -> Cells:
    """The values of a part of a column; those of a dictionary are its entries, so that equal values are one object."""
    if hasattr(column, "dictionary"):
        return tuple(None if index is None else entries[index] for index in column.indices.to_pylist())
    return tuple(None if value is None else parse_cell(_text(value)) for value in column.to_pylist())


def _text(value: str | float) -> str:
    """The value as CSV would write it. A whole number looks the same whatever its type."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
