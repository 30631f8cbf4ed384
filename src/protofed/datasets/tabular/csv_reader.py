"""CSV files as tables."""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from protofed.datasets.tabular import limits
from protofed.datasets.tabular.table import Cells, Table, parse_cell
from protofed.errors import BadInput


def read_csv(path: Path, names: Sequence[str] | None = None) -> Table:
    """Reads comma-separated values in UTF-8. The first row names the columns, unless `names` does.

    Empty lines are skipped. Every row must have as many fields as there are columns.
    """
    limits.check_file(path)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(_lines(file, path), strict=True)
        try:
            names = limits.check_column_names(next(reader, []) if names is None else names, str(path))
            rows = list(_rows(reader, len(names), path))
        except (csv.Error, UnicodeDecodeError) as error:
            raise BadInput(
                f"{path}, after line {reader.line_num}: not comma-separated text in UTF-8 ({error}). "
                "Export it again as CSV"
            ) from None
    if not rows:
        raise BadInput(f"{path}: no rows; each example needs one line below the names of the columns")
    columns = zip(*(cells for _, cells in rows), strict=True)
    return Table(dict(zip(names, columns, strict=True)), str(path), [line for line, _ in rows])


def _lines(file: TextIO, path: Path) -> Iterator[str]:
    """The lines of a file. A line that is too long is refused before all of it is read."""
    while line := file.readline(limits.MAX_LINE + 1):
        if len(line) > limits.MAX_LINE:
            raise BadInput(f"{path}: a line has more than {limits.MAX_LINE} characters. Export it again as CSV")
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
        limits.check_shape(count, width, str(path))
        yield reader.line_num, tuple(parse_cell(field) for field in fields)
