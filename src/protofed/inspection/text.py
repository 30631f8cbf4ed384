"""Names, counts and tables as text."""

from collections.abc import Sequence

from rich.cells import cell_len

from protofed.printable import one_line

MAX_NAMED = 10
"""Largest number of names in one finding."""


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int]) -> list[str]:
    """Rows as lines with aligned columns. `right` lists the right-aligned columns."""
    widths = [max(cell_len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        blanks = [" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]
        cells = [
            blank + cell if k in right else cell + blank
            for k, (cell, blank) in enumerate(zip(row, blanks, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def listed(names: Sequence[str]) -> str:
    """The first few names, one on each line, and how many more there are."""
    more = [f"… and {len(names) - MAX_NAMED} more"] if len(names) > MAX_NAMED else []
    return "".join(f"\n       {name}" for name in [*map(one_line, names[:MAX_NAMED]), *more])


def some(names: Sequence[str]) -> str:
    return ", ".join(map(one_line, names[:MAX_NAMED])) + (
        f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    )


def number_of(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
