"""Parquet files written by hand, byte by byte, so that their parts can contradict each other."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

I32, I64, BINARY, LIST, STRUCT = 5, 6, 8, 9, 12
PLAIN, PLACES = 0, 8
"""Encodings: values as they are, and places in a dictionary."""
MOST = 2**31 - 1

Field = tuple[int, int, object]


def packed(number: int) -> bytes:
    """In groups of seven bits, lowest first."""
    groups = []
    while number > 127:
        groups.append(number & 127 | 128)
        number >>= 7
    return bytes([*groups, number])


def struct_of(*fields: Field) -> bytes:
    """A struct of Thrift's compact protocol."""
    return b"".join(bytes([kind]) + packed(number << 1) + _value(kind, value) for number, kind, value in fields) + b"\0"


def list_of(kind: int, values: Sequence[object]) -> bytes:
    return bytes([len(values) << 4 | kind]) + b"".join(_value(kind, value) for value in values)


def _value(kind: int, value: object) -> bytes:
    if isinstance(value, int):
        return packed(value << 1)
    assert isinstance(value, bytes)
    return packed(len(value)) + value if kind == BINARY else value


@dataclass(frozen=True)
class Claims:
    """What the parts of a file say about its rows; by default the truth."""

    rows: int
    """In the footer, for the whole file."""
    group: int
    values: int
    """Of the column."""
    page: int
    entries: int = 1
    """Of the dictionary."""


def column_file(claims: Claims, pages: int = 1, name: bytes = b"a") -> bytes:
    """A column of `claims.page` times the text `x` in each page: a dictionary of one text, and its place over and over,
    which takes a few bytes however often that is."""
    dictionary = struct.pack("<I", 1) + b"x"
    first = _page(2, dictionary, (7, STRUCT, struct_of((1, I32, claims.entries), (2, I32, PLAIN))))
    places = b"\x01" + packed(claims.page << 1) + b"\0"
    facts = struct_of((1, I32, claims.page), (2, I32, PLACES), (3, I32, 3), (4, I32, 3))
    return _file(first, _page(0, places, (5, STRUCT, facts)) * pages, claims, name)


def honest(rows: int) -> Claims:
    return Claims(rows, rows, rows, rows)


def _page(kind: int, content: bytes, facts: Field) -> bytes:
    return struct_of((1, I32, kind), (2, I32, len(content)), (3, I32, len(content)), facts) + content


def _file(dictionary: bytes, data: bytes, claims: Claims, name: bytes) -> bytes:
    body = dictionary + data
    text = 6
    root = struct_of((4, BINARY, b"schema"), (5, I32, 1))
    leaf = struct_of((1, I32, text), (3, I32, 0), (4, BINARY, name), (6, I32, 0))
    column = struct_of(
        (1, I32, text),
        (2, LIST, list_of(I32, [PLAIN, PLACES])),
        (3, LIST, list_of(BINARY, [name])),
        (4, I32, 0),
        (5, I64, claims.values),
        (6, I64, len(body)),
        (7, I64, len(body)),
        (9, I64, 4 + len(dictionary)),
        (11, I64, 4),
    )
    chunk = struct_of((2, I64, 4), (3, STRUCT, column))
    group = struct_of((1, LIST, list_of(STRUCT, [chunk])), (2, I64, len(body)), (3, I64, claims.group))
    footer = struct_of(
        (1, I32, 1),
        (2, LIST, list_of(STRUCT, [root, leaf])),
        (3, I64, claims.rows),
        (4, LIST, list_of(STRUCT, [group])),
    )
    return b"PAR1" + body + footer + struct.pack("<I", len(footer)) + b"PAR1"
