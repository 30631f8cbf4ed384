"""Envelopes: what they say can be read back, and nothing that they claim is believed before it is looked at."""

import json
import struct
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from protofed.engine.message import (
    MOST_TOLD,
    Bounds,
    Refused,
    Ticket,
    WireMessage,
    bounds,
    digest,
    opened,
    printable,
    sealed,
)
from protofed.runtimes.jobs import Reason

ASKED: dict[str, Tensor] = {"w": torch.arange(6.0).view(2, 3), "count": torch.tensor(3), "h": torch.ones(2).half()}
TICKET = Ticket("run", 4, "round", 1, digest(ASKED), 1)


def message(ticket: Any = None, bodies: bool = True, **entries: Any) -> WireMessage:
    """A good message but for what is said."""
    data = sealed(TICKET, ASKED).data
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header |= entries
    if ticket is not None:
        header["__metadata__"] = {"ticket": ticket if isinstance(ticket, str) else json.dumps(ticket)}
    return raw(json.dumps(header), data[8 + size :] if bodies else b"")


def raw(text: str | bytes, body: bytes = b"") -> WireMessage:
    text = text.encode() if isinstance(text, str) else text
    return WireMessage(struct.pack("<Q", len(text)) + text + body)


F32 = {"dtype": "F32", "shape": [2, 3], "data_offsets": [8, 32]}
"""What the header of a good message may say of w."""


def refused(act: Any) -> Refused:
    with pytest.raises(Refused) as found:
        act()
    return found.value


def test_what_is_sealed_is_read_back_bit_for_bit() -> None:
    envelope = sealed(TICKET, ASKED)
    assert envelope.ticket == TICKET
    found = opened(envelope, ASKED)
    assert found.keys() == ASKED.keys()
    for name, leaf in found.items():
        assert (leaf.dtype, leaf.shape) == (ASKED[name].dtype, ASKED[name].shape)
        assert torch.equal(leaf, ASKED[name])


def test_the_message_that_these_tests_change_is_good() -> None:
    assert message().ticket == TICKET
    assert opened(message(), ASKED).keys() == ASKED.keys()


def test_a_digest_is_of_names_types_and_shapes_and_of_nothing_else() -> None:
    same = {name: torch.zeros_like(leaf) for name, leaf in reversed(ASKED.items())}
    others = [
        {**ASKED, "w": torch.zeros(3, 2)},
        {**ASKED, "w": torch.zeros(2, 3).double()},
        {**ASKED, "v": torch.zeros(1)},
        {name: leaf for name, leaf in ASKED.items() if name != "h"},
    ]
    assert digest(same) == digest(ASKED)
    assert len({digest(ASKED), *map(digest, others)}) == 5


@pytest.mark.parametrize(
    "ticket",
    [
        "",
        "{",
        "[]",
        "3",
        "null",
        "[" * 3000,
        {},
        {**vars(TICKET), "more": 1},
        {**vars(TICKET), "\ud800\n": 1},
        {key: value for key, value in vars(TICKET).items() if key != "call"},
        {**vars(TICKET), "round": True},
        {**vars(TICKET), "round": 4.0},
        {**vars(TICKET), "round": "4"},
        {**vars(TICKET), "run": None},
        {**vars(TICKET), "run": ["run"]},
        {**vars(TICKET), "phase": 0},
        {**vars(TICKET), "model": {}},
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_ticket_is_undecodable(ticket: Any) -> None:
    found = refused(lambda: message(ticket).ticket)
    assert found.reason == Reason.UNDECODABLE
    assert found.detail.isprintable()
    assert len(found.detail) <= 8 * MOST_TOLD


@pytest.mark.parametrize(
    "envelope",
    [
        WireMessage(b""),
        WireMessage(b"\0" * 7),
        raw("{}"),
        raw("[]"),
        raw('{"__metadata__": 3}'),
        raw('{"__metadata__": {}}'),
        raw('{"__metadata__": {"ticket": 3}}'),
        raw('{"__metadata__": {"ticket": "a", "ticket": "b"}}'),
        raw(b"\xff\xfe\xff"),
        raw("{" * 3000),
        raw("9" * 5000),
    ],
    ids=range(11),
)
def test_what_has_no_ticket_is_undecodable(envelope: WireMessage) -> None:
    assert refused(lambda: envelope.ticket).reason == Reason.UNDECODABLE


@pytest.mark.parametrize(
    ("envelope", "reason", "detail"),
    [
        (message(more={"dtype": "F32", "shape": [], "data_offsets": [0, 4]}), Reason.KEY_UNEXPECTED, "'more' was not"),
        (message(w={"dtype": "F64", "shape": [2, 3]}), Reason.DTYPE_MISMATCH, "w: is F64, not torch.float32"),
        (message(w={"dtype": "\ud800\n\x1b[2J", "shape": []}), Reason.DTYPE_MISMATCH, r"w: is \ud800\n\x1b[2J, not"),
        (message(w={}), Reason.DTYPE_MISMATCH, "w: is None, not torch.float32"),
        (message(w={"dtype": "F32", "shape": [3, 2]}), Reason.SHAPE_MISMATCH, "w: has shape [3, 2], not [2, 3]"),
        (message(w={"dtype": "F32", "shape": [6]}), Reason.SHAPE_MISMATCH, "w: has shape [6], not [2, 3]"),
        (message(w={"dtype": "F32"}), Reason.SHAPE_MISMATCH, "w: has shape None"),
        (message(w=F32 | {"data_offsets": [0, 2**62]}), Reason.UNDECODABLE, "not a safetensors"),
        (message(w=F32 | {"shape": [2.0, 3.0]}), Reason.UNDECODABLE, "not a safetensors"),
        (message(bodies=False), Reason.UNDECODABLE, "not a safetensors"),
        (WireMessage(message().data + b"\0"), Reason.UNDECODABLE, "not a safetensors"),
        (WireMessage(message().data[:-1]), Reason.UNDECODABLE, "not a safetensors"),
    ],
    ids=range(12),
)
def test_what_a_header_claims_is_compared_with_what_was_asked_for(
    envelope: WireMessage, reason: Reason, detail: str
) -> None:
    found = refused(lambda: opened(envelope, ASKED))
    assert found.reason == reason
    assert found.detail.startswith(detail) or detail in found.detail
    assert found.detail.isprintable()


def test_a_missing_tensor_is_named() -> None:
    found = refused(lambda: opened(sealed(TICKET, {"w": ASKED["w"], "h": ASKED["h"]}), ASKED))
    assert (found.reason, found.detail) == (Reason.KEY_MISSING, "count is missing")


def test_a_good_message_is_within_its_bounds_whatever_it_holds() -> None:
    """Long names, many tensors, large shapes, and a ticket of some length."""
    for names in (["w"], ["é" * 200, '"\\' * 50], [f"features.{i}.weight" for i in range(300)]):
        asked = {name: torch.zeros(7, 1, 1, 1, 1, 3) for name in names}
        ticket = Ticket("r" * 64, 10**9, "finish", 99, digest(asked), 1)
        bounds(asked).check(sealed(ticket, asked))
    bounds({}).check(sealed(replace(TICKET, model=digest({})), {}))


def test_one_byte_more_than_the_bounds_is_too_large() -> None:
    limit = bounds(ASKED)
    size = int.from_bytes(message().data[:8], "little")
    limit.check(WireMessage(bytes(limit.total)))
    assert refused(lambda: limit.check(WireMessage(bytes(limit.total + 1)))).reason == Reason.TOO_LARGE
    Bounds(size, 10**6).check(message())
    assert refused(lambda: Bounds(size - 1, 10**6).check(message())).reason == Reason.TOO_LARGE
    assert limit.total < 10_000  # bounds that nothing exceeds would be none


def test_an_envelope_is_within_its_bounds_before_it_is_opened() -> None:
    header = raw(json.dumps({"__metadata__": {"ticket": " " * 10_000}}))
    assert refused(lambda: opened(header, ASKED)).reason == Reason.TOO_LARGE


def test_what_a_stranger_wrote_can_be_printed() -> None:
    assert printable("params/é was not asked for") == "params/é was not asked for"
    assert printable("a\nb\x1b[2J\ud800") == r"a\nb\x1b[2J\ud800"
    assert printable("x" * 10_000) == "x" * MOST_TOLD
