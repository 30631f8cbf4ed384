"""Parquet files as tables; needs pyarrow."""

import importlib
import re
from pathlib import Path
from typing import Any

from protofed.datasets.tabular import limits
from protofed.datasets.tabular.parquet_pages import uncompressed_bytes
from protofed.datasets.tabular.table import Cells, Table, parse_cell
from protofed.errors import BadInput

_SCALAR = r"(null|bool|u?int\d+|halffloat|float|double|(large_)?string)"
SUPPORTED_TYPES = re.compile(rf"{_SCALAR}|dictionary<values={_SCALAR}, .*>")
"""The column types that are read, by pyarrow's names."""


def read_parquet(path: Path) -> Table:
    """Reads a Parquet file whose columns are text, numbers or booleans, not nested."""
    limits.check_file(path)
    pyarrow, parquet = _import_pyarrow()
    size = uncompressed_bytes(path)
    if size > limits.MAX_BYTES:
        raise BadInput(f"{path}: {size} bytes after decompression; at most {limits.MAX_BYTES} are read. Split the file")
    try:
        with parquet.ParquetFile(path) as file:
            _check_schema(file, path)
            names, num_rows = file.schema_arrow.names, file.metadata.num_rows
        # Dictionary encoding keeps one copy of a text that occurs in many rows.
        with parquet.ParquetFile(path, read_dictionary=names) as file:
            columns = {name: _column(file, name) for name in names}
    except (pyarrow.ArrowException, OSError) as error:
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


def _column(file: Any, name: str) -> Cells:
    column = file.read(columns=[name]).column(name)
    column.validate(full=True)  # finds text that is not UTF-8, and dictionary indices that are out of range
    return tuple(cell for chunk in column.chunks for cell in _cells(chunk))


def _cells(chunk: Any) -> list[str | None]:
    """The values of a chunk of a column. Equal values of a dictionary are one object."""
    if hasattr(chunk, "dictionary"):
        entries = _cells(chunk.dictionary)
        return [None if index is None else entries[index] for index in chunk.indices.to_pylist()]
    return [None if value is None else parse_cell(_text(value)) for value in chunk.to_pylist()]


def _text(value: str | float) -> str:
    """The value as CSV would write it. A whole number looks the same whatever its type."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
