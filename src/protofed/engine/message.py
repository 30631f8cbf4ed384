"""Uploads as they come over a wire: bytes that nobody believes until they have been looked at.

A wire message is a safetensors file whose metadata hold a ticket: which run, round, phase and call it answers, and a
digest of the names and shapes that were asked for. Everything that its header claims is compared with what was asked
for before any tensor is made.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import isfinite
from typing import Any

from safetensors.torch import save
from torch import Tensor

from protofed import wire
from protofed.api.private import KINDS, Charge
from protofed.runtimes.client_store import Receipt
from protofed.runtimes.jobs import Reason, Ticket
from protofed.tree import Tree

HEADER_BYTES = 4096
"""Allowed for a header beside the names of its tensors."""
NAME_BYTES = 256
"""Allowed for what a header says of one tensor, beside its name."""

MOST_TOLD = 300
"""Characters of what is said of a message that was refused; it may quote the message."""


class Refused(Exception):
    """This message cannot be used."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, printable(detail)


@dataclass(frozen=True)
class WireMessage:
    data: bytes

    @property
    def ticket(self) -> Ticket:
        """What the message says that it answers."""
        try:
            found = json.loads(wire.header(self.data)["__metadata__"]["ticket"])
            ticket = Ticket(**found)
        except (wire.WireError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise Refused(Reason.UNDECODABLE, f"no ticket: {error}") from error
        for own in fields(Ticket):
            if type(getattr(ticket, own.name)) is not own.type:  # guard: ticket-s-fields-have-their-types
                raise Refused(Reason.UNDECODABLE, f"its ticket's {own.name} is not a {own.type}")
        return ticket

    @property
    def receipt(self) -> Receipt | None:
        """Of the state that its client keeps, if it says so."""
        try:
            receipt = wire.header(self.data)["__metadata__"].get("receipt")
        except (wire.WireError, KeyError, AttributeError) as error:
            raise Refused(Reason.UNDECODABLE, f"no receipt: {error}") from error
        if receipt is None:
            return None
        if not (isinstance(receipt, str) and receipt.isprintable() and len(receipt) <= MOST_TOLD):
            raise Refused(Reason.UNDECODABLE, "its receipt is not a short line of text")
        return Receipt(receipt)

    @property
    def loss(self) -> float | None:
        """The mean loss of its client's main training, if it says so."""
        try:
            text = wire.header(self.data)["__metadata__"].get("loss")
            loss = None if text is None else float(text)
        except (wire.WireError, KeyError, AttributeError, TypeError, ValueError) as error:
            raise Refused(Reason.UNDECODABLE, f"no loss: {error}") from error
        if loss is not None and not isfinite(loss):  # guard: loss-of-message-finite
            raise Refused(Reason.NON_FINITE, "its training loss is not finite")
        return loss

    @property
    def charges(self) -> tuple[Charge, ...]:
        """What its client says that it released under differential privacy."""
        try:
            text = wire.header(self.data)["__metadata__"].get("spent")
            rows = [] if text is None else json.loads(text)
            charges = tuple(Charge(kind, releases, cost) for kind, releases, cost in rows)
        except (wire.WireError, KeyError, AttributeError, TypeError, ValueError, RecursionError) as error:
            raise Refused(Reason.UNDECODABLE, f"it does not say what it released: {error}") from error
        for one in charges:
            is_number = type(one.releases) is int and type(one.cost) is float and isfinite(one.cost)
            if one.kind not in KINDS or not is_number or one.releases < 0 or one.cost < 0:
                raise Refused(Reason.UNDECODABLE, "what it released is none of our kinds")
        return charges


def printable(text: str) -> str:
    """What a stranger wrote, fit for logs and files: no line breaks, no control codes, no half characters."""
    # guard: what-message-says-printable
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:MOST_TOLD])


def sealed(
    ticket: Ticket,
    upload: Tree,
    receipt: Receipt | None = None,
    loss: float | None = None,
    charges: Sequence[Charge] = (),
) -> WireMessage:
    """An upload as bytes, with what it answers, the receipt of what its client keeps, its training loss and what it
    released under differential privacy."""
    arrays = {path: leaf.detach().cpu().contiguous().clone() for path, leaf in wire.to_arrays(upload).items()}
    metadata = {"ticket": json.dumps(asdict(ticket))} | ({} if receipt is None else {"receipt": str(receipt)})
    metadata |= {} if loss is None else {"loss": repr(loss)}
    metadata |= {"spent": json.dumps([[c.kind, c.releases, c.cost] for c in charges])} if charges else {}
    return WireMessage(save(arrays, metadata=metadata))


def digest(expected: Mapping[str, Tensor]) -> str:
    """Of the names, types and shapes of an upload."""
    # guard: digest-shapes
    facts = [(path, str(leaf.dtype), list(leaf.shape)) for path, leaf in sorted(expected.items())]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Bounds:
    """More than any good message has, in bytes: a transport need not take in more, and nobody reads more."""

    header: int
    total: int

    def check(self, message: WireMessage) -> None:
        size, header = len(message.data), int.from_bytes(message.data[:8], "little")
        if size > self.total:  # guard: total-size-bounded
            raise Refused(Reason.TOO_LARGE, f"{size} bytes, and a good message has at most {self.total}")
        if header > self.header:  # guard: header-s-size-bounded
            raise Refused(Reason.TOO_LARGE, f"a header of {header} bytes, and a good one has at most {self.header}")


def bounds(expected: Mapping[str, Tensor]) -> Bounds:
    header = HEADER_BYTES + sum(len(json.dumps(path)) + NAME_BYTES for path in expected)
    return Bounds(header, 8 + header + sum(leaf.numel() * leaf.element_size() for leaf in expected.values()))


def opened(message: WireMessage, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a message, if its size and its header are those of what was asked for."""
    bounds(expected).check(message)  # guard: bounds-checked-before-envelope-opened
    try:
        header = wire.header(message.data)
        header.pop("__metadata__", None)
        _compare(header, expected)  # guard: header-compared-with-what-was-asked-for
        return wire.decode_arrays(message.data)
    except wire.WireError as error:
        raise Refused(Reason.UNDECODABLE, str(error)) from error


def _compare(header: Mapping[str, Any], expected: Mapping[str, Tensor]) -> None:
    """Names, types and shapes as they are declared; that they fit the bytes is for the decoder to check."""
    for path in expected:
        if path not in header:
            raise Refused(Reason.KEY_MISSING, f"{path} is missing")
    for path, declared in header.items():
        if path not in expected:
            raise Refused(Reason.KEY_UNEXPECTED, f"{path[:80]!r} was not asked for")
        like = expected[path]
        kind, shape = declared.get("dtype"), declared.get("shape")
        if kind != wire.KINDS.get(like.dtype):
            raise Refused(Reason.DTYPE_MISMATCH, f"{path}: is {str(kind)[:20]}, not {like.dtype}")
        if shape != list(like.shape):
            raise Refused(Reason.SHAPE_MISMATCH, f"{path}: has shape {str(shape)[:80]}, not {list(like.shape)}")
