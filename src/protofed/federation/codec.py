"""Messages as bytes and back.

    4 bytes   PFED
    4 bytes   the size of the header, little-endian
    header    JSON: the kind of the message, its values, and the sizes of its blobs
    blobs     bytes one after another, safetensors files

A receiver knows how large a message may be, and looks at every size before it takes a copy. The header holds plain
values of the types that the message's class names, and nothing else.
"""

import json
import re
import types
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from math import isfinite
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from protofed.errors import BadInput
from protofed.federation.messages import (
    Answer,
    Enrolment,
    Message,
    Notice,
    Order,
    Proposal,
    Question,
    Shared,
    Survey,
    Verdict,
)

MAGIC = b"PFED"
MOST_HEADER = 8 * 2**20
"""Bytes of a header: room for the names of some ten thousand clients."""
KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Survey, Shared, Question, Enrolment, Proposal, Verdict, Order, Answer, Notice)
}
NONCE = re.compile("[0-9a-f]{32}")


class Undecodable(ValueError):
    """Bytes that are no message."""


def encoded(message: Message) -> bytes:
    blobs: list[bytes] = []
    values = _plain(message, blobs)
    header = json.dumps(
        {"kind": type(message).__name__, "values": values, "blobs": [len(blob) for blob in blobs]}, allow_nan=False
    ).encode()
    if len(header) > MOST_HEADER:
        raise BadInput(f"a message with a header of {len(header)} bytes; at most {MOST_HEADER} can be sent")
    return b"".join([MAGIC, len(header).to_bytes(4, "little"), header, *blobs])


def decoded(data: bytes, most_bytes: int) -> Message:
    """The message that these bytes are. Raises Undecodable."""
    if len(data) > most_bytes:  # guard: message-sizes-bounded
        raise Undecodable(f"{len(data)} bytes, and at most {most_bytes} are read")
    begin = len(MAGIC) + 4
    if data[: len(MAGIC)] != MAGIC or len(data) < begin:
        raise Undecodable("not a message of protofed")
    size = int.from_bytes(data[len(MAGIC) : begin], "little")
    if size > min(MOST_HEADER, len(data) - begin):  # guard: message-header-bounded
        raise Undecodable(f"its header should have {size} bytes")
    header = _header(data[begin : begin + size])
    match header:
        case {"kind": str(kind), "values": values, "blobs": list(sizes)} if len(header) == 3 and kind in KINDS:
            blobs = _blobs(memoryview(data)[begin + size :], sizes)
        case _:
            raise Undecodable("its header is not that of a message")
    reader = _Reader(blobs)
    message: Message = reader.read(KINDS[kind], values, "it")
    if reader.next_blob != len(blobs):
        raise Undecodable(f"{len(blobs)} blobs, and its header names {reader.next_blob}")
    if not NONCE.fullmatch(message.nonce):  # guard: nonce-is-hexadecimal
        raise Undecodable("its nonce is not 32 hexadecimal digits")
    return message


def _plain(value: Any, blobs: list[bytes]) -> Any:
    """The value as JSON holds it; bytes become the number of a blob."""
    if isinstance(value, bytes):
        blobs.append(value)
        return len(blobs) - 1
    if is_dataclass(value):
        return {own.name: _plain(getattr(value, own.name), blobs) for own in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item, blobs) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item, blobs) for key, item in value.items()}
    return value


def _header(data: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) != len(pairs):  # guard: no-key-twice-message
            raise Undecodable("a key of its header appears twice")
        return found

    def refused(constant: str) -> None:
        raise Undecodable(f"its header holds {constant}")

    try:
        found = json.loads(data, object_pairs_hook=unique, parse_constant=refused)
    except Undecodable:
        raise
    except (ValueError, RecursionError) as error:  # guard: message-header-is-json
        raise Undecodable(f"its header is not JSON: {type(error).__name__}") from error
    if not isinstance(found, dict):
        raise Undecodable("its header is not a table")
    return found


def _blobs(rest: memoryview, sizes: Sequence[Any]) -> list[bytes]:
    fit = all(type(size) is int and size >= 0 for size in sizes) and sum(sizes) == len(rest)
    if not fit:  # guard: blob-sizes-fit
        raise Undecodable(f"its blobs are not the {len(rest)} bytes after its header")
    found, begin = [], 0
    for size in sizes:
        found.append(bytes(rest[begin : begin + size]))
        begin += size
    return found


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _is_text(value: str) -> bool:
    """JSON can hold halves of characters, which cannot be written as UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


class _Reader:
    """Reads plain values as the types that they should have; blobs are taken in their order, each once."""

    def __init__(self, blobs: Sequence[bytes]) -> None:
        self._blobs = blobs
        self.next_blob = 0

    def read(self, kind: Any, value: Any, where: str) -> Any:
        origin, arguments = get_origin(kind), get_args(kind)
        if origin in (Union, types.UnionType):
            one, _ = arguments  # the only unions are with None
            return None if value is None else self.read(one, value, where)
        if origin is Literal:
            return self._checked(type(value) is str and value in arguments, value, where)
        if origin is tuple:
            return self._tuple(arguments, value, where)
        if origin is dict:
            self._checked(type(value) is dict, value, where)
            return {
                self.read(str, key, where): self.read(arguments[1], item, f"{where}.{key[:40]}")
                for key, item in value.items()
            }
        if kind is bytes:
            self._checked(type(value) is int and value == self.next_blob < len(self._blobs), value, where)
            self.next_blob += 1
            return self._blobs[value]
        if kind is float:
            is_number = type(value) in (int, float) and abs(value) < 2**63 and isfinite(value)
            return float(self._checked(is_number, value, where))
        if kind is int:
            return self._checked(type(value) is int and -(2**63) <= value < 2**63, value, where)
        if kind is str and type(value) is str and not _is_text(value):  # guard: message-texts-are-whole
            raise Undecodable(f"{where} holds half a character")
        if kind in (str, bool):
            return self._checked(type(value) is kind, value, where)  # guard: message-values-have-their-types
        return self._record(kind, value, where)

    def _record(self, kind: Any, value: Any, where: str) -> Any:
        hints = _hints(kind)
        names = [own.name for own in fields(kind)]
        if type(value) is not dict or value.keys() != {*names}:  # guard: message-keys-are-its-fields
            raise Undecodable(f"{where} has other keys than {kind.__name__}")
        return kind(**{name: self.read(hints[name], value[name], f"{where}.{name}") for name in names})

    def _tuple(self, arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
        self._checked(type(value) is list, value, where)
        if arguments[-1] is Ellipsis:
            return tuple(self.read(arguments[0], item, where) for item in value)
        self._checked(len(value) == len(arguments), value, where)
        return tuple(self.read(kind, item, where) for kind, item in zip(arguments, value, strict=True))

    @staticmethod
    def _checked(is_good: bool, value: Any, where: str) -> Any:
        if not is_good:
            raise Undecodable(f"{where} is of a wrong type or value")
        return value
