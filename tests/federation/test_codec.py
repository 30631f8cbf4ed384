"""Messages as bytes: what is sent arrives, and whatever else comes is refused before anything is made of it."""

import json
import random
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from protofed.federation import codec
from protofed.federation.codec import MAGIC, Undecodable, decoded, encoded
from protofed.federation.messages import (
    Answer,
    Description,
    Done,
    Enrolment,
    Failed,
    Limits,
    Notice,
    Order,
    Proposal,
    Question,
    RosterEntry,
    Shared,
    Survey,
    Verdict,
    Versions,
    Work,
)
from protofed.runtimes.jobs import Ticket

MOST = 10**6
NONCE = "0123456789abcdef" * 2
VERSIONS = Versions(1, "0.2", "2.9")
WORKS = (Work("ann", "", 0, 5, 8, 0, 2**62), Work("bob", "ab" * 32, 0, 5, 8, 1, 3))
ORDER = Order(NONCE, "d", Ticket("run", 3, "round", 1, "m", 1), "train", "none", False, 1.5, WORKS, b"tensors")
ANSWER = Answer(NONCE, (Done("ann", b"upload", True), Done("eve", b"")), (Failed("bob", "DIVERGED", "it grew"),))
DESCRIPTION = Description("run", "[task]", VERSIONS, "c", (RosterEntry("ann", None), RosterEntry("b", "ink", True)))
MESSAGES = [
    Survey(NONCE, "[task]"),
    Shared(NONCE, "{}", (("FEW_ROWS", "5"),)),
    Question(NONCE),
    Question(NONCE, "{}"),
    Enrolment(NONCE, VERSIONS, "{}", ("ann",), (), {"fedavg": "e"}, Limits(("fedavg",), hours=3)),
    Proposal(NONCE, DESCRIPTION),
    Verdict(NONCE, "d", (("TOO_MANY_EPOCHS", "100"),)),
    ORDER,
    ANSWER,
    Notice(NONCE, ("OTHER_CODE: its code of fpl",)),
]


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(data[4:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def framed(header: Any, rest: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return MAGIC + len(text).to_bytes(4, "little") + text + rest


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was(message: Any) -> None:
    data = encoded(message)
    assert decoded(data, len(data)) == message


def test_more_bytes_than_are_read_are_refused() -> None:
    data = encoded(ORDER)
    with pytest.raises(Undecodable, match="at most"):
        decoded(data, len(data) - 1)


def test_a_size_that_is_only_claimed_takes_no_memory() -> None:
    claims = MAGIC + (2**32 - 1).to_bytes(4, "little") + b"{}"
    header, rest = header_of(encoded(ORDER))
    of_blob = framed(header | {"blobs": [2**40]}, rest)
    tracemalloc.start()
    for data in (claims, of_blob):
        with pytest.raises(Undecodable):
            decoded(data, 2**50)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**6


def test_a_large_header_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(ORDER)
    monkeypatch.setattr(codec, "MOST_HEADER", 50)
    with pytest.raises(Undecodable, match="its header should have"):
        decoded(data, MOST)


def without(table: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name != key}


def bad() -> Iterator[Any]:
    header, rest = header_of(encoded(ORDER))
    values = header["values"]
    yield pytest.param(b"", id="nothing")
    yield pytest.param(b"PK" + encoded(ORDER), id="another format")
    yield pytest.param(framed(b"\xff\xfe"), id="not text")
    yield pytest.param(framed(b"[" * 100_000), id="deep nesting")
    yield pytest.param(framed(b"[]"), id="no table")
    yield pytest.param(framed(b'{"kind": "Question", "values": {"nonce": 1}, "blobs": []}'), id="a number for a text")
    yield pytest.param(framed(b'{"kind": "os.system", "values": {}, "blobs": []}'), id="an unknown kind")
    yield pytest.param(
        framed(f'{{"kind": "Question", "kind": "Question", "values": {{"nonce": "{NONCE}"}}, "blobs": []}}'.encode()),
        id="a key twice",
    )
    yield pytest.param(
        framed({"kind": "Question", "values": {"nonce": "../../etc"}, "blobs": []}), id="a path as nonce"
    )
    halves = {"nonce": NONCE, "shares": "\ud800", "refusals": []}
    yield pytest.param(framed({"kind": "Shared", "values": halves, "blobs": []}), id="half a character")
    named, _ = header_of(encoded(Enrolment(NONCE, VERSIONS, "", (), (), {"\udfff": ""}, Limits())))
    yield pytest.param(framed(named), id="half a character in a name")
    yield pytest.param(framed(header | {"blobs": [-1, 8]}, rest), id="a negative size")
    yield pytest.param(framed(header | {"blobs": []}, rest), id="bytes that nothing names")
    yield pytest.param(framed(header | {"blobs": [7, 0]}, rest), id="a blob that nothing names")
    yield pytest.param(framed(header | {"values": values | {"messages": 1}}, rest), id="a blob that is not there")
    yield pytest.param(framed(header | {"values": values | {"more": 1}}, rest), id="an unknown field")
    yield pytest.param(framed(header | {"values": without(values, "step")}, rest), id="a field that is missing")
    yield pytest.param(framed(header | {"values": values | {"tests": "everything"}}, rest), id="none of the choices")
    yield pytest.param(framed(header | {"values": values | {"evaluates": 1}}, rest), id="a number for a truth value")
    yield pytest.param(framed(header | {"values": values | {"seconds": 10**400}}, rest), id="a number without bounds")
    yield pytest.param(framed(json.dumps(header).replace("1.5", "NaN").encode(), rest), id="not a number")
    yield pytest.param(framed(json.dumps(header).replace("1.5", "1e999").encode(), rest), id="infinite")


@pytest.mark.parametrize("data", [*bad()])
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(Undecodable):
        decoded(data, 10**6)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_noise_is_refused_or_is_another_message(message: Any) -> None:
    """Nothing but Undecodable is ever raised."""
    draws, good, kinds = random.Random(4), encoded(message), tuple(type(one) for one in MESSAGES)
    for _ in range(400):
        data = bytearray(good)
        for _ in range(draws.randint(1, 4)):
            place = draws.randrange(len(data))
            match draws.randrange(4):
                case 0:
                    data[place] = draws.randrange(256)
                case 1:
                    del data[place : place + draws.randint(1, 20)]
                case 2:
                    data[place:place] = draws.randbytes(draws.randint(1, 20))
                case 3:
                    data[place : place + 4] = draws.choice([b"null", b"-1e9", b"[[[[", b'""{}'])
            if not data:
                break
        try:
            found = decoded(bytes(data), len(good) + 50)
        except Undecodable:
            continue
        assert isinstance(found, kinds)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    yield path
    for key, child in children:
        yield from leaves(child, (*path, key))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_value_of_another_type_is_refused_wherever_it_stands(message: Any) -> None:
    header, rest = header_of(encoded(message))
    for path in list(leaves(header["values"])):
        copy = json.loads(json.dumps(header))
        where, holder = copy["values"], None
        for key in path:
            holder, where = where, where[key]
        for odd in ([[[]]], {"a": {}}, 0.5):
            if holder is None:
                copy["values"] = odd
            else:
                holder[path[-1]] = odd
            try:
                decoded(framed(copy, rest), 10**6)
            except Undecodable:
                continue
            assert odd == 0.5, f"{odd} is taken for {path}"
