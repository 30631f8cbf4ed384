"""CSV files as tables."""

import csv
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from protofed.datasets.tabular import limits
from protofed.datasets.tabular.table import Cells, Table, parse_cell
from protofed.datasets.tabular.text_format import TextFormat, encoding_of, separator_of, with_decimal_points
from protofed.errors import BadInput


def read_csv(path: Path, names: Sequence[str] | None = None) -> Table:
    """Reads a table in text. The first row names the columns, unless `names` does: then columns have commas between
    them. Otherwise the separator and the decimal sign are found from the file.

    Empty lines are skipped. Every row must have as many fields as there are columns.
    """
    limits.check_file(path)
    encoding, separator = encoding_of(path), ","
    reader: Any = None
    with path.open(encoding=encoding, newline="") as file:
        try:
            lines = _lines(file, path)
            if names is None:
                first = next(lines, "")
                separator, lines = separator_of(first), chain([first] if first else [], lines)
            reader = csv.reader(lines, delimiter=separator, strict=True)
            names = limits.check_column_names(next(reader, []) if names is None else names, str(path))
            rows = list(_rows(reader, len(names), path))
        except (csv.Error, UnicodeError) as error:
            after = f", after line {reader.line_num}" if reader else ""
            raise BadInput(
                f"{path}{after}: not a table in text ({error}). Export it again as CSV, with commas, in UTF-8"
            ) from None
    if not rows:
        raise BadInput(f"{path}: no rows; each example needs one line below the names of the columns")
    columns, places = list(zip(*(cells for _, cells in rows), strict=True)), [line for line, _ in rows]
    pointed = None
    if separator != ",":
        pointed = with_decimal_points(list(zip(names, columns, strict=True)), places, str(path))
    form = TextFormat(encoding, separator, pointed is not None)
    return Table(dict(zip(names, pointed or columns, strict=True)), str(path), places, form=form.described)


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
