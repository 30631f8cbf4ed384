"""A table in memory: text by column, with the place of every row in its file."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from protofed.errors import BadInput

Cells = tuple[str | None, ...]

MISSING = frozenset({"", "?", "NA", "NaN", "nan"})
"""How files write a missing value, once surrounding blanks are removed."""
MAX_MAGNITUDE = 1e30
"""Of a number. Its square still fits into float64."""
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?", re.ASCII)


@dataclass(frozen=True)
class Table:
    """The rows of a file by column. Cells are text without surrounding blanks, or None where a value is missing."""

    columns: Mapping[str, Cells]
    source: str
    """Name of the file, for messages."""
    places: Sequence[int]
    """Line or row of the file in which each row stands, for messages."""
    unit: Literal["line", "row"] = "line"
    """What `places` counts."""
    form: str = ""
    """How the file is written, if that is not with commas, points and UTF-8."""

    def __len__(self) -> int:
        return len(self.places)

    def column(self, name: str) -> Cells:
        """The values of a column."""
        if name not in self.columns:
            close = get_close_matches(name, self.columns, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the columns are {', '.join(islice(self.columns, 20))}"
            raise BadInput(f"{self.source}: there is no column {name!r}; {hint}")
        return self.columns[name]

    def numbers(self, name: str) -> NDArray[np.float64]:
        """A column as numbers, NaN where a value is missing. Refuses a column with other text in it."""
        cells = self.column(name)
        for row, cell in enumerate(cells):
            if cell is not None and not is_bounded_number(cell):
                missing = ", ".join(repr(word) for word in sorted(MISSING))
                raise BadInput(
                    f"{self.place(row)}: column {name!r} has {cell[:40]!r}; write a number between "
                    f"-{MAX_MAGNITUDE:g} and {MAX_MAGNITUDE:g}, or one of {missing} for a missing value"
                )
        return np.array([np.nan if cell is None else float(cell) for cell in cells], dtype=np.float64)

    def take(self, rows: Iterable[int]) -> "Table":
        """The rows at these positions, in this order."""
        rows = [int(row) for row in rows]
        columns = {name: tuple(cells[row] for row in rows) for name, cells in self.columns.items()}
        return Table(columns, self.source, [self.places[row] for row in rows], self.unit, self.form)

    def place(self, row: int) -> str:
        """Where a row comes from, to begin a message with: `file, line 3`."""
        return f"{self.source}, {self.unit} {self.places[row]}"


def is_number(cell: str) -> bool:
    """Whether a cell is written as a number, however large."""
    return NUMBER.fullmatch(cell) is not None


def is_bounded_number(cell: str) -> bool:
    """Whether a cell is a number that a numeric column may hold."""
    return is_number(cell) and abs(float(cell)) <= MAX_MAGNITUDE


def parse_cell(text: str) -> str | None:
    """The text without surrounding blanks; None if it stands for a missing value."""
    text = text.strip()
    return None if text in MISSING else text
