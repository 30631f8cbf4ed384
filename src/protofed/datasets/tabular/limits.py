"""Limits on the size of a table, checked before memory is allocated for it."""

from collections.abc import Sequence
from pathlib import Path

from protofed.errors import BadInput

MAX_BYTES = 1 << 29
"""Size of a file, and of its contents after decompression."""
MAX_LINE = 4 * 2**20
"""Characters in one line of CSV. 2 000 columns of a thousand characters each take half of that."""
MAX_ROWS = 1_000_000
MAX_COLUMNS = 2_000
MAX_CELLS = 20_000_000
MAX_CATEGORIES = 200


def check_file(path: Path) -> None:
    """Refuses what is not a regular file, and files that are too large."""
    if not path.is_file():
        raise BadInput(f"{path}: no such file, or not a regular file")
    if path.stat().st_size > MAX_BYTES:
        raise BadInput(f"{path}: {path.stat().st_size} bytes; at most {MAX_BYTES} are read. Split the file")


def check_column_names(names: Sequence[str], source: str) -> list[str]:
    """The names without surrounding blanks. Each must be given, and different from the others."""
    names = [name.strip() for name in names]
    if not names or "" in names or len(set(names)) < len(names):
        raise BadInput(
            f"{source}, line 1: every column needs a name, and no two the same; the names are {', '.join(names[:20])}"
        )
    if len(names) > MAX_COLUMNS:
        raise BadInput(f"{source}: {len(names)} columns; at most {MAX_COLUMNS} are read. Remove some")
    return names


def check_shape(rows: int, columns: int, source: str) -> None:
    if rows > MAX_ROWS or rows * columns > MAX_CELLS:
        raise BadInput(f"{source}: at most {MAX_ROWS} rows and {MAX_CELLS} values are read. Split the file")
