"""How many bytes the pages of a Parquet file unfold to, as the pages themselves say.

The sums in the footer of a file are what its writer claims. A reader makes room by the header in front of each page,
and so does this: footer and headers are read here, before pyarrow opens the file, and nothing is unfolded.

Footer and headers are structures of Thrift's compact protocol, of numbered fields; the numbers below are those of
parquet.thrift.
"""

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from protofed.errors import BadInput

MARK = b"PAR1"
MOST_FOOTER = 8 * 2**20
MOST_PAGES = 100_000
"""Of a file; writers make pages of a megabyte or of some thousand rows."""
DEEPEST = 16
"""Structures within structures; a footer has half as many."""

GROUPS, CHUNKS = 4, 1
FILE, COLUMN = 1, 3
FOLDED_CHUNK, DATA_PAGE, DICTIONARY_PAGE = 7, 9, 11
UNFOLDED, FOLDED = 2, 3

STOP, TRUE, FALSE, BYTE, DOUBLE, BINARY, LIST, SET, STRUCT = 0, 1, 2, 3, 7, 8, 9, 10, 12
WHOLE_NUMBERS = (4, 5, 6)

Fields = dict[int, Any]


def unfolded_bytes(path: Path) -> int:
    """What all pages of the file unfold to."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            total = 0
            for number, size in enumerate(_page_sizes(data)):
                total += size
                if number >= MOST_PAGES:
                    raise ValueError(f"more than {MOST_PAGES} pages")
            return total
    except (AttributeError, IndexError, KeyError, OSError, TypeError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read as Parquet ({error}); write it again") from error


def _page_sizes(data: mmap.mmap) -> Iterator[int]:
    """Of each page of the file, once unfolded."""
    end = len(data) - 8
    size = int.from_bytes(data[end : end + 4], "little")
    if data[:4] != MARK or data[-4:] != MARK or not 0 < size <= min(MOST_FOOTER, end - 4):
        raise ValueError(f"no {MARK.decode()} at both ends, or a footer of {size} bytes")
    footer, _ = _struct(data, end - size, DEEPEST)
    for group in footer[GROUPS]:
        for chunk in group[CHUNKS]:
            if chunk.get(FILE):
                raise ValueError("a column that lies in another file")
            yield from _chunk_sizes(data, chunk[COLUMN])


def _chunk_sizes(data: mmap.mmap, column: Fields) -> Iterator[int]:
    at = min(place for place in (column[DATA_PAGE], column.get(DICTIONARY_PAGE)) if place)  # 0 is no place
    end = at + column[FOLDED_CHUNK]
    if not 0 <= at <= end <= len(data):
        raise ValueError(f"a column from byte {at} to {end} of {len(data)}")
    while at < end:
        header, at = _struct(data, at, DEEPEST)
        if min(header[UNFOLDED], header[FOLDED]) < 0:
            raise ValueError("a page of less than no bytes")
        yield header[UNFOLDED]
        at += header[FOLDED]


def _struct(data: mmap.mmap, at: int, depth: int) -> tuple[Fields, int]:
    """The fields of a structure, and the place after it."""
    found: Fields = {}
    number = 0
    while (byte := data[at]) != STOP:
        number, at = (number + (byte >> 4), at + 1) if byte >> 4 else _whole(data, at + 1)
        kind = byte & 15
        if number in found:  # readers differ in which of the two they take
            raise ValueError(f"field {number} twice")
        found[number], at = (kind == TRUE, at) if kind in (TRUE, FALSE) else _value(data, at, kind, depth)
    return found, at + 1


def _value(data: mmap.mmap, at: int, kind: int, depth: int) -> tuple[Any, int]:
    """A value of this type, and the place after it; bytes and fractions, which nobody asks for, only by their size."""
    if kind in WHOLE_NUMBERS:
        return _whole(data, at)
    if kind == BINARY:
        size, at = _varint(data, at)
        return size, at + size
    if kind in (TRUE, FALSE, BYTE, DOUBLE):
        size = 8 if kind == DOUBLE else 1
        return size, at + size
    if kind in (LIST, SET) and depth:
        return _values(data, at, depth - 1)
    if kind == STRUCT and depth:
        return _struct(data, at, depth - 1)
    raise ValueError(f"a value of type {kind}")


def _values(data: mmap.mmap, at: int, depth: int) -> tuple[list[Any], int]:
    size, kind, at = data[at] >> 4, data[at] & 15, at + 1
    if size == 15:
        size, at = _varint(data, at)
    found = []
    for _ in range(size):
        value, at = _value(data, at, kind, depth)
        found.append(value)
        if at > len(data):
            raise ValueError("a list beyond the end")
    return found, at


def _whole(data: mmap.mmap, at: int) -> tuple[int, int]:
    """A number with its sign in its last bit, and the place after it."""
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    """A number in groups of seven bits, the lowest first, and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a number without an end")
