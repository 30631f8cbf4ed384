"""How a text file with a table is written: encoding, separator and decimal sign, found from the file itself."""

import codecs
import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from protofed.errors import BadInput

SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
ENCODINGS = {"utf-16": "UTF-16", "utf-16-le": "UTF-16", "utf-16-be": "UTF-16", "cp1252": "Windows-1252 (Latin-1)"}
"""How those are called that are not UTF-8."""
CHUNK = 2**20
SAMPLE = 4096
CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""Bytes that no text has."""
DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+", re.ASCII)
DECIMAL_POINT = re.compile(r"[+-]?\d+\.\d+", re.ASCII)
MAYBE_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2},\d{3}", re.ASCII)


@dataclass(frozen=True)
class TextFormat:
    encoding: str = "utf-8-sig"
    separator: str = ","
    has_decimal_commas: bool = False

    @property
    def described(self) -> str:
        """What is unusual about it; empty if nothing is."""
        said = [
            *([f"{SEPARATORS[self.separator]} between columns"] if self.separator != "," else []),
            *(["decimal commas"] if self.has_decimal_commas else []),
            *([f"text in {ENCODINGS[self.encoding]}"] if self.encoding in ENCODINGS else []),
        ]
        return ", ".join(said)


def encoding_of(path: Path) -> str:
    """UTF-8, or UTF-16 by its mark or its zeros; otherwise Windows-1252. Refuses what is no text."""
    with path.open("rb") as file:
        head = file.read(SAMPLE)
        for mark, encoding in MARKS:
            if head.startswith(mark):
                return encoding
        if b"\x00" in head:
            return _wide(head, path)
        file.seek(0)
        if _is_utf8(iter(lambda: file.read(CHUNK), b"")):
            return "utf-8-sig"
        file.seek(0)
        decoder = codecs.getincrementaldecoder("cp1252")()
        for chunk in iter(lambda: file.read(CHUNK), b""):
            try:
                decoder.decode(chunk)
            except UnicodeDecodeError:
                raise BadInput(_no_text(path)) from None
            if CONTROL.search(chunk):  # guard: tables-are-text
                raise BadInput(_no_text(path))
    return "cp1252"


def separator_of(line: str) -> str:
    """The separator that divides the line with the names of the columns into the most names; a comma if none does."""
    return max(SEPARATORS, key=lambda separator: len(next(csv.reader([line], delimiter=separator), [])))


def with_decimal_points(
    columns: Sequence[tuple[str, Sequence[str | None]]], places: Sequence[int], source: str
) -> list[tuple[str | None, ...]] | None:
    """The columns with points for decimal commas; None if the file has no decimal commas. Refuses a file that writes
    decimals in both ways, and commas that may divide thousands."""
    commas = _places(columns, DECIMAL_COMMA)
    if not commas:
        return None
    points = _places(columns, DECIMAL_POINT)
    if points:
        (name, row), (other, other_row) = commas[0], points[0]
        raise BadInput(
            f"{source}: decimals are written with a comma (line {places[row]}, column {name!r}) and with a point (line "
            f"{places[other_row]}, column {other!r}): write all of them with a point"
        )
    for name, cells in columns:
        found = [cell for cell in cells if cell is not None and DECIMAL_COMMA.fullmatch(cell)]
        if found and all(MAYBE_THOUSANDS.fullmatch(cell) for cell in found):
            raise BadInput(
                f"{source}: column {name!r} has {found[0]!r}, whose comma may stand before decimals or thousands: "
                "write decimals with a point, and thousands without a sign"
            )
    return [
        tuple(cell.replace(",", ".") if cell is not None and DECIMAL_COMMA.fullmatch(cell) else cell for cell in cells)
        for _, cells in columns
    ]


def _places(columns: Sequence[tuple[str, Sequence[str | None]]], pattern: re.Pattern[str]) -> list[tuple[str, int]]:
    """The first cell of each column that matches: column and row."""
    found = []
    for name, cells in columns:
        row = next((row for row, cell in enumerate(cells) if cell is not None and pattern.fullmatch(cell)), None)
        if row is not None:
            found.append((name, row))
    return found


def _wide(head: bytes, path: Path) -> str:
    """UTF-16 without a mark: every second byte of western text is zero."""
    half = len(head) // 2
    for start, encoding in ((1, "utf-16-le"), (0, "utf-16-be")):
        if head[start::2].count(0) > 0.4 * half and head[1 - start :: 2].count(0) == 0:
            return encoding
    raise BadInput(_no_text(path))


def _is_utf8(chunks: Iterable[bytes]) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for chunk in chunks:
            decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _no_text(path: Path) -> str:
    return f"{path}: not text in UTF-8, UTF-16 or Windows-1252. Export it again as CSV in UTF-8"
