"""How names and counts are written for a person."""

from collections.abc import Sequence

from rich.cells import cell_len

NAMED = 10
"""How many files of a kind are named."""


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int]) -> list[str]:
    """Rows as lines, their cells below each other."""
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
    """The first few, each on a line of its own, and how many more there are."""
    more = [f"… and {len(names) - NAMED} more"] if len(names) > NAMED else []
    return "".join(f"\n       {name}" for name in [*names[:NAMED], *more])


def some(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def number_of(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def printable(text: str) -> str:
    """Names may hold characters that command a terminal."""
    return "".join(letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in text)
