"""Reads a table by the suffix of its file."""

from collections.abc import Callable
from pathlib import Path

from protofed.datasets.tabular.csv_reader import read_csv
from protofed.datasets.tabular.parquet_reader import read_parquet
from protofed.datasets.tabular.table import Table
from protofed.errors import BadInput

READERS: dict[str, Callable[[Path], Table]] = {".csv": read_csv, ".parquet": read_parquet}


def read_table(path: Path) -> Table:
    """Reads a table with named columns from a `.csv` or `.parquet` file."""
    suffix = path.suffix.lower()
    if suffix not in READERS:
        raise BadInput(f"{path}: tables are read from .csv and .parquet files only")
    return READERS[suffix](path)
