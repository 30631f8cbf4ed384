"""Signed messages: who sent them, to whom, in which run, and that they come for the first time.

The server signs every order, and a site every answer, with its own key. So whoever can reach a SuperLink, or runs it,
can hold messages back, and no more: it cannot order anything, answer for a site, or make a message count twice.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from protofed.federation.keys import PrivateKey, PublicKey
from protofed.runs.store import disk, opening

VALID_FOR = 24 * 3600.0
"""Seconds after which an order that nobody took up is void. A site remembers orders for as long."""
CLOCKS_DIFFER = 300.0
"""Seconds by which the clocks of the server and a site may differ. Flower refuses sites whose clocks differ by more."""
CONTEXT = {"order": b"protofed order 1\0", "answer": b"protofed answer 1\0"}
"""Before what is signed: an order cannot pass for an answer, nor either for anything else that a key signs."""
MAX_HEADER = 2000
"""Bytes."""
MOST_BETWEEN = 100_000
"""Orders that a site takes up until it forgets those that are void."""

Kind = Literal["order", "answer"]


class BadSignature(ValueError):
    """A message that is not what it claims to be. Its sender is told nothing."""


class OutOfDate(BadSignature):
    """A message of the right sender that is too old, or from the future: one of the two clocks may be wrong."""


@dataclass(frozen=True)
class Header:
    """What is signed of a message."""

    kind: Kind
    federation: str
    run: int
    """The number of the run at the SuperLink."""
    site: str
    """To whom an order goes, or from whom an answer comes."""
    nonce: str
    """Of the order. An answer repeats it."""
    issued: float
    """Seconds since 1970."""
    size: int
    digest: str
    """SHA-256 of the body."""

    def data(self) -> bytes:
        """The same bytes wherever they are made."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


@dataclass(frozen=True)
class Signed:
    """A message as it travels."""

    header: bytes
    signature: bytes = field(repr=False)
    body: bytes = field(repr=False)


def signed(
    key: PrivateKey, kind: Kind, federation: str, run: int, site: str, nonce: str, body: bytes, now: float
) -> Signed:
    digest = hashlib.sha256(body).hexdigest()
    header = Header(kind, federation, run, site, nonce, round(now, 3), len(body), digest).data()
    return Signed(header, key.sign(CONTEXT[kind] + header, ec.ECDSA(hashes.SHA384())), body)


def verified(message: Signed, key: PublicKey, kind: Kind, federation: str, run: int, site: str) -> Header:
    """The header of a message that the owner of the key made for this place."""
    try:
        key.verify(message.signature, CONTEXT[kind] + message.header, ec.ECDSA(hashes.SHA384()))
    except InvalidSignature:
        raise BadSignature("its signature is not that of the key enrolled") from None  # guard: federation-signatures
    header = _header(message.header)
    if header.kind != kind or header.federation != federation:
        raise BadSignature("it belongs to another federation")  # guard: federation-signed-for-this-federation
    if header.run != run:
        raise BadSignature("it was signed for another run")  # guard: federation-signed-for-this-run
    if header.site != site:
        raise BadSignature("it was signed for another site")  # guard: federation-signed-for-this-site
    if header.size != len(message.body) or header.digest != hashlib.sha256(message.body).hexdigest():
        raise BadSignature("its content was changed")  # guard: federation-content-is-signed
    return header


class Seen:
    """The orders that a site has taken up, in a file. No order is taken up twice, and none that is too old to be
    remembered."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = path, clock
        self._nonces: dict[str, float] = {}
        """By nonce: when the order was issued."""
        self._tidy_at = MOST_BETWEEN
        if path.exists():
            self._read()
            self._tidy()

    def take_up(self, header: Header) -> None:
        """Remembers an order, on the disk, before anything is done for it."""
        now = self._clock()
        if header.issued < now - VALID_FOR or header.issued > now + CLOCKS_DIFFER:
            hours = f"by this site's clock it was issued {(now - header.issued) / 3600:+.1f} hours ago"
            raise OutOfDate(f"it is too old, or this clock is wrong: {hours}")  # guard: federation-orders-expire
        if header.nonce in self._nonces:
            raise BadSignature("it was taken up before")  # guard: federation-no-order-twice
        self._nonces[header.nonce] = header.issued
        disk.append(self._path.parent, self._path.name, f"{header.issued!r} {header.nonce}\n".encode("ascii"))
        if len(self._nonces) >= self._tidy_at:
            self._tidy()

    def _read(self) -> None:
        for line in self._path.read_text(encoding="ascii").splitlines():
            issued, _, nonce = line.partition(" ")
            try:
                if nonce:
                    self._nonces[nonce] = float(issued)
            except ValueError:  # the machine stopped while it was written: its order was not begun
                continue

    def _tidy(self) -> None:
        """Forgets orders that are void by now."""
        oldest = self._clock() - VALID_FOR - CLOCKS_DIFFER
        self._nonces = {nonce: issued for nonce, issued in self._nonces.items() if issued > oldest}
        text = "".join(f"{issued!r} {nonce}\n" for nonce, issued in self._nonces.items())
        with opening.folder(self._path.parent) as own:
            disk.put(own, self._path.name, text.encode("ascii"))
        self._tidy_at = len(self._nonces) + MOST_BETWEEN


def new_nonce() -> str:
    return os.urandom(16).hex()


def _header(data: bytes) -> Header:
    """The header in bytes whose signature was verified: still, nothing of it is believed to have the right type."""
    try:
        if len(data) > MAX_HEADER:
            raise ValueError
        table: Any = json.loads(data)
        if not isinstance(table, dict) or table.keys() != {f.name for f in fields(Header)}:
            raise ValueError
        numbers, texts = (table["run"], table["size"]), (table["kind"], table["federation"], table["site"])
        if not all(type(number) is int for number in numbers) or not isinstance(table["issued"], float | int):
            raise ValueError
        if not abs(table["issued"]) < 2**63:  # guard: issued-at-a-time
            raise ValueError
        if not all(isinstance(text, str) for text in (*texts, table["nonce"], table["digest"])):
            raise ValueError
        if len(table["nonce"]) != 32 or not table["nonce"].isalnum() or not table["nonce"].isascii():
            raise ValueError
    except (ValueError, RecursionError):
        raise BadSignature("its header is none of ours") from None
    return Header(**table)
