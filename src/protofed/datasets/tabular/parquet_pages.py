"""The size and the rows of a Parquet file, according to its page headers.

The totals in the footer are only what the writer claims. A reader allocates memory by the header of each page, so this
module adds up those headers. A page of a few bytes can stand for two thousand million rows: its header says so too. So
rows are counted in four places, which must agree: the file, its row groups, their columns, and the pages. This module
runs before pyarrow opens the file, and decompresses nothing.

Footer and page headers are structs of Thrift's compact protocol, with numbered fields. The field numbers below are
those of parquet.thrift.
"""

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protofed.datasets.tabular import limits
from protofed.errors import BadInput

MAGIC = b"PAR1"
MAX_FOOTER = 8 * 2**20
MAX_PAGES = 100_000
"""In one file. Usual pages hold a megabyte or some thousand rows."""
MAX_DEPTH = 16
"""Levels of nested structs. A footer has half as many."""

NUM_ROWS, ROW_GROUPS = 3, 4
COLUMN_CHUNKS, GROUP_ROWS = 1, 3
FILE_PATH, COLUMN_METADATA = 1, 3
NUM_VALUES, CHUNK_COMPRESSED_SIZE, DATA_PAGE_OFFSET, DICTIONARY_PAGE_OFFSET = 5, 7, 9, 11
PAGE_UNCOMPRESSED_SIZE, PAGE_COMPRESSED_SIZE, DATA_PAGE, DICTIONARY_PAGE, DATA_PAGE_2 = 2, 3, 5, 7, 8
PAGE_VALUES, PAGE_ENCODING, PAGE_2_ENCODING = 1, 2, 4
DELTA_BYTE_ARRAY = 7
"""An encoding by which a few bytes can stand for any amount of text. pyarrow does not read it as a dictionary."""

STOP, TRUE, FALSE, BYTE, DOUBLE, BINARY, LIST, SET, STRUCT = 0, 1, 2, 3, 7, 8, 9, 10, 12
INTEGERS = (4, 5, 6)

Fields = dict[int, Any]


@dataclass(frozen=True)
class Chunk:
    """A column of a row group."""

    rows: int
    """Of the row group, as the footer says."""
    values: int
    """Of the column, as the footer says."""
    sizes: Sequence[int]
    """The uncompressed size of each page."""
    page_values: int
    """Of all pages, as their headers say."""


@dataclass(frozen=True)
class Pages:
    """What the footer and the page headers of a file say."""

    rows: int
    group_rows: int
    """Of all row groups together."""
    chunks: Sequence[Chunk]

    @property
    def size(self) -> int:
        """The uncompressed size of all pages together."""
        return sum(size for chunk in self.chunks for size in chunk.sizes)

    def check_rows(self, source: str) -> None:
        """Refuses a file whose parts do not agree on the number of rows. Columns must not be nested."""
        counts = [
            ("row groups", self.group_rows, self.rows),
            *(("a column", chunk.values, chunk.rows) for chunk in self.chunks),
            *(("the pages of a column", chunk.page_values, chunk.values) for chunk in self.chunks),
        ]
        for what, count, expected in counts:
            if count != expected:  # guard: parquet-rows-agree
                raise BadInput(
                    f"{source}: {what} with {count} rows instead of {expected}: its parts do not agree on the rows "
                    "that there are. Write it again"
                )


def pages_of(path: Path) -> Pages:
    """What the file says about its pages and rows."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _pages(data)
    except (AttributeError, IndexError, KeyError, OSError, TypeError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read as Parquet ({error}). Write it again") from error


def _pages(data: mmap.mmap) -> Pages:
    end = len(data) - 8
    size = int.from_bytes(data[end : end + 4], "little")
    if data[:4] != MAGIC or data[-4:] != MAGIC or not 0 < size <= min(MAX_FOOTER, end - 4):
        raise ValueError(f"no {MAGIC.decode()} at both ends, or a footer of {size} bytes")
    footer, _ = _struct(data, end - size, MAX_DEPTH)
    chunks: list[Chunk] = []
    num_pages = 0
    for group in footer[ROW_GROUPS]:
        for column in group[COLUMN_CHUNKS]:
            if column.get(FILE_PATH):
                raise ValueError("a column is stored in another file")
            chunks.append(_chunk(data, column[COLUMN_METADATA], group[GROUP_ROWS], MAX_PAGES - num_pages))
            num_pages += len(chunks[-1].sizes)
    return Pages(footer[NUM_ROWS], sum(group[GROUP_ROWS] for group in footer[ROW_GROUPS]), chunks)


def _chunk(data: mmap.mmap, column: Fields, rows: int, most_pages: int) -> Chunk:
    sizes: list[int] = []
    values = 0
    for header in _page_headers(data, column):
        if len(sizes) >= most_pages:
            raise ValueError(f"more than {MAX_PAGES} pages")
        sizes.append(header[PAGE_UNCOMPRESSED_SIZE])
        values += _page_values(header)
    return Chunk(rows, column[NUM_VALUES], sizes, values)


def _page_values(header: Fields) -> int:
    """How many values of its column a page holds. A dictionary holds none."""
    if DICTIONARY_PAGE in header:
        entries, size = header[DICTIONARY_PAGE][PAGE_VALUES], header[PAGE_UNCOMPRESSED_SIZE]
        if not 0 <= entries <= min(size, limits.MAX_ROWS):  # guard: parquet-dictionaries-fit-their-pages
            raise ValueError(f"a dictionary of {entries} values in {size} bytes")
        return 0
    kind, encoding = (DATA_PAGE, PAGE_ENCODING) if DATA_PAGE in header else (DATA_PAGE_2, PAGE_2_ENCODING)
    if kind not in header:
        return 0
    page = header[kind]
    if page[encoding] == DELTA_BYTE_ARRAY:  # guard: parquet-text-is-in-its-pages
        raise ValueError("a column in the encoding DELTA_BYTE_ARRAY")
    if page[PAGE_VALUES] < 0:
        raise ValueError("a page with a negative number of values")
    return int(page[PAGE_VALUES])


def _page_headers(data: mmap.mmap, column: Fields) -> Iterator[Fields]:
    offsets = (column[DATA_PAGE_OFFSET], column.get(DICTIONARY_PAGE_OFFSET))
    at = min(offset for offset in offsets if offset)  # some writers store 0 for "no dictionary page"
    end = at + column[CHUNK_COMPRESSED_SIZE]
    if not 0 <= at <= end <= len(data):
        raise ValueError(f"a column from byte {at} to {end} of {len(data)}")
    while at < end:
        header, at = _struct(data, at, MAX_DEPTH)
        if min(header[PAGE_UNCOMPRESSED_SIZE], header[PAGE_COMPRESSED_SIZE]) < 0:
            raise ValueError("a page of negative size")
        yield header
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
