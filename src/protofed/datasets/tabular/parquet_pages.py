"""The uncompressed size of a Parquet file, according to its page headers.

The totals in the footer are only what the writer claims. A reader allocates memory by the header of each page, so this
module adds up those headers. It runs before pyarrow opens the file, and decompresses nothing.

Footer and page headers are structs of Thrift's compact protocol, with numbered fields. The field numbers below are
those of parquet.thrift.
"""

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from protofed.errors import BadInput

MAGIC = b"PAR1"
MAX_FOOTER = 8 * 2**20
MAX_PAGES = 100_000
"""In one file. Usual pages hold a megabyte or some thousand rows."""
MAX_DEPTH = 16
"""Levels of nested structs. A footer has half as many."""

ROW_GROUPS, COLUMN_CHUNKS = 4, 1
FILE_PATH, COLUMN_METADATA = 1, 3
CHUNK_COMPRESSED_SIZE, DATA_PAGE_OFFSET, DICTIONARY_PAGE_OFFSET = 7, 9, 11
PAGE_UNCOMPRESSED_SIZE, PAGE_COMPRESSED_SIZE = 2, 3

STOP, TRUE, FALSE, BYTE, DOUBLE, BINARY, LIST, SET, STRUCT = 0, 1, 2, 3, 7, 8, 9, 10, 12
INTEGERS = (4, 5, 6)

Fields = dict[int, Any]


def uncompressed_bytes(path: Path) -> int:
    """The uncompressed size of all pages of the file together."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            total = 0
            for number, size in enumerate(_page_sizes(data)):
                total += size
                if number >= MAX_PAGES:
                    raise ValueError(f"more than {MAX_PAGES} pages")
            return total
    except (AttributeError, IndexError, KeyError, OSError, TypeError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read as Parquet ({error}). Write it again") from error


def _page_sizes(data: mmap.mmap) -> Iterator[int]:
    """The uncompressed size of each page."""
    end = len(data) - 8
    size = int.from_bytes(data[end : end + 4], "little")
    if data[:4] != MAGIC or data[-4:] != MAGIC or not 0 < size <= min(MAX_FOOTER, end - 4):
        raise ValueError(f"no {MAGIC.decode()} at both ends, or a footer of {size} bytes")
    footer, _ = _struct(data, end - size, MAX_DEPTH)
    for group in footer[ROW_GROUPS]:
        for chunk in group[COLUMN_CHUNKS]:
            if chunk.get(FILE_PATH):
                raise ValueError("a column is stored in another file")
            yield from _chunk_page_sizes(data, chunk[COLUMN_METADATA])


def _chunk_page_sizes(data: mmap.mmap, column: Fields) -> Iterator[int]:
    offsets = (column[DATA_PAGE_OFFSET], column.get(DICTIONARY_PAGE_OFFSET))
    at = min(offset for offset in offsets if offset)  # some writers store 0 for "no dictionary page"
    end = at + column[CHUNK_COMPRESSED_SIZE]
    if not 0 <= at <= end <= len(data):
        raise ValueError(f"a column from byte {at} to {end} of {len(data)}")
    while at < end:
        header, at = _struct(data, at, MAX_DEPTH)
        if min(header[PAGE_UNCOMPRESSED_SIZE], header[PAGE_COMPRESSED_SIZE]) < 0:
            raise ValueError("a page of negative size")
        yield header[PAGE_UNCOMPRESSED_SIZE]
        at += header[PAGE_COMPRESSED_SIZE]


def _struct(data: mmap.mmap, at: int, depth: int) -> tuple[Fields, int]:
    """The fields of a struct, and the offset behind it."""
    fields: Fields = {}
    number = 0
    while (byte := data[at]) != STOP:
        number, at = (number + (byte >> 4), at + 1) if byte >> 4 else _integer(data, at + 1)
        kind = byte & 15
        if number in fields:  # readers differ in which of the two they use
            raise ValueError(f"field {number} twice")
        fields[number], at = (kind == TRUE, at) if kind in (TRUE, FALSE) else _value(data, at, kind, depth)
    return fields, at + 1


def _value(data: mmap.mmap, at: int, kind: int, depth: int) -> tuple[Any, int]:
    """A value of this type, and the offset behind it. Bytes and floats are not needed: their size stands for them."""
    if kind in INTEGERS:
        return _integer(data, at)
    if kind == BINARY:
        size, at = _varint(data, at)
        return size, at + size
    if kind in (TRUE, FALSE, BYTE, DOUBLE):
        size = 8 if kind == DOUBLE else 1
        return size, at + size
    if kind in (LIST, SET) and depth:
        return _list(data, at, depth - 1)
    if kind == STRUCT and depth:
        return _struct(data, at, depth - 1)
    raise ValueError(f"a value of type {kind}")


def _list(data: mmap.mmap, at: int, depth: int) -> tuple[list[Any], int]:
    size, kind, at = data[at] >> 4, data[at] & 15, at + 1
    if size == 15:
        size, at = _varint(data, at)
    values = []
    for _ in range(size):
        value, at = _value(data, at, kind, depth)
        values.append(value)
        if at > len(data):
            raise ValueError("a list beyond the end of the file")
    return values, at


def _integer(data: mmap.mmap, at: int) -> tuple[int, int]:
    """A zigzag-encoded integer, with its sign in the lowest bit, and the offset behind it."""
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    """An integer in groups of seven bits, lowest first, and the offset behind it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("an integer of more than ten bytes")
