"""Signed messages: who can say what to whom, and how often."""

import dataclasses
import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="signatures need cryptography, which the extra flower brings")

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from protofed.federation import signing
from protofed.federation.signing import VALID_FOR, BadSignature, Header, Seen, Signed, new_nonce, signed, verified

FEDERATION = "0" * 32
SERVER, A, B = (ec.generate_private_key(ec.SECP384R1()) for _ in range(3))


def order(body: bytes = b"do this", run: int = 7, site: str = "A", now: float | None = None) -> Signed:
    return signed(SERVER, "order", FEDERATION, run, site, new_nonce(), body, time.time() if now is None else now)


def test_an_order_is_read_by_the_site_that_it_is_for() -> None:
    header = verified(order(), SERVER.public_key(), "order", FEDERATION, 7, "A")
    assert (header.site, header.run, header.size) == ("A", 7, len(b"do this"))


@pytest.mark.parametrize(
    ("why", "message", "place"),
    [
        ("another run", order(run=8), {}),
        ("another site", order(site="B"), {}),
        ("content", dataclasses.replace(order(), body=b"do that"), {}),
        ("content", dataclasses.replace(order(), body=b""), {}),
        ("not that of the key", dataclasses.replace(order(), header=order().header), {}),
        ("not that of the key", dataclasses.replace(order(), signature=b"x" * 100), {}),
        ("not that of the key", dataclasses.replace(order(), signature=b""), {}),
        ("another federation", order(), {"federation": "1" * 32}),
        ("not that of the key", order(), {"kind": "answer"}),
    ],
)
def test_an_order_counts_in_its_place_alone(why: str, message: Signed, place: dict[str, str]) -> None:
    with pytest.raises(BadSignature, match=why):
        verified(
            message, SERVER.public_key(), **{"kind": "order", "federation": FEDERATION, "run": 7, "site": "A", **place}
        )


def test_a_stranger_orders_nothing() -> None:
    stranger = ec.generate_private_key(ec.SECP384R1())
    message = signed(stranger, "order", FEDERATION, 7, "A", new_nonce(), b"do this", time.time())
    with pytest.raises(BadSignature, match="not that of the key"):
        verified(message, SERVER.public_key(), "order", FEDERATION, 7, "A")


def test_a_site_cannot_answer_for_another() -> None:
    nonce = new_nonce()
    as_itself = signed(A, "answer", FEDERATION, 7, "A", nonce, b"done", time.time())
    as_the_other = signed(A, "answer", FEDERATION, 7, "B", nonce, b"done", time.time())
    verified(as_itself, A.public_key(), "answer", FEDERATION, 7, "A")
    for message, key, name in ((as_the_other, B, "B"), (as_itself, B, "B"), (as_the_other, A, "A")):
        with pytest.raises(BadSignature):
            verified(message, key.public_key(), "answer", FEDERATION, 7, name)


def test_what_flower_has_a_site_sign_is_no_answer() -> None:
    """Flower signs the time with the same key. Nothing of ours can look like it, nor the other way round."""
    stamp = b"2026-01-01T00:00:00+00:00"
    message = Signed(stamp, A.sign(stamp, ec.ECDSA(hashes.SHA256())), b"")
    with pytest.raises(BadSignature, match="not that of the key"):
        verified(message, A.public_key(), "answer", FEDERATION, 7, "A")


def with_header(change: Callable[[dict[str, object]], object]) -> Signed:
    """A message that the server itself signed, with another header."""
    table = json.loads(order().header)
    table["nonce"] = new_nonce()
    header = json.dumps(change(table)).encode()
    return Signed(header, SERVER.sign(b"protofed order 1\0" + header, ec.ECDSA(hashes.SHA384())), b"do this")


@pytest.mark.parametrize(
    "change",
    [
        lambda t: [1],
        lambda t: {**t, "more": 1},
        lambda t: {k: v for k, v in t.items() if k != "run"},
        lambda t: {**t, "run": True},
        lambda t: {**t, "run": "7"},
        lambda t: {**t, "issued": None},
        lambda t: {**t, "issued": float("nan")},
        lambda t: {**t, "issued": 10**400},
        lambda t: {**t, "nonce": "short"},
        lambda t: {**t, "nonce": "0123456789abcdef0123456789abcde\n"},
        lambda t: {**t, "site": ["A"]},
        lambda t: {**t, "site": "A" * 3000},
    ],
)
def test_a_header_of_another_form_is_refused(change: Callable[[dict[str, object]], object]) -> None:
    with pytest.raises(BadSignature, match="none of ours"):
        verified(with_header(change), SERVER.public_key(), "order", FEDERATION, 7, "A")


# ---- replays


def header(nonce: str, issued: float) -> Header:
    return Header("order", FEDERATION, 7, "A", nonce, issued, 0, "")


def test_no_order_is_taken_up_twice_even_after_a_restart(tmp_path: Path) -> None:
    clock = lambda: 1000.0  # noqa: E731
    first, second = header(new_nonce(), 999.0), header(new_nonce(), 999.5)
    seen = Seen(tmp_path / "seen", clock)
    seen.take_up(first)
    with pytest.raises(BadSignature, match="before"):
        seen.take_up(first)
    again = Seen(tmp_path / "seen", clock)
    with pytest.raises(BadSignature, match="before"):
        again.take_up(first)
    again.take_up(second)
    with pytest.raises(BadSignature, match="before"):
        Seen(tmp_path / "seen", clock).take_up(second)


def test_orders_are_void_before_they_are_forgotten(tmp_path: Path) -> None:
    now = [1000.0]
    one = header(new_nonce(), 1000.0)
    Seen(tmp_path / "seen", lambda: now[0]).take_up(one)
    for later in (VALID_FOR - 1, VALID_FOR + 1, VALID_FOR + 1000, 100 * VALID_FOR):
        now[0] = 1000.0 + later
        with pytest.raises(BadSignature):
            Seen(tmp_path / "seen", lambda: now[0]).take_up(one)
    assert (tmp_path / "seen").read_text() == ""


def test_orders_that_are_void_are_forgotten_while_the_site_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site that works for months keeps those of a day."""
    monkeypatch.setattr(signing, "MOST_BETWEEN", 10)
    now = [1000.0]
    seen = Seen(tmp_path / "seen", lambda: now[0])
    taken = []
    for _ in range(100):
        now[0] += VALID_FOR / 5
        taken.append(header(new_nonce(), now[0]))
        seen.take_up(taken[-1])
        assert len((tmp_path / "seen").read_text().splitlines()) <= 20
    for again in (seen, Seen(tmp_path / "seen", lambda: now[0])):
        for one in taken:
            with pytest.raises(BadSignature):
                again.take_up(one)


def test_an_order_from_the_future_is_refused(tmp_path: Path) -> None:
    seen = Seen(tmp_path / "seen", lambda: 1000.0)
    seen.take_up(header(new_nonce(), 1299.0))
    with pytest.raises(BadSignature, match="clock"):
        seen.take_up(header(new_nonce(), 1301.0))


def test_a_line_that_was_cut_off_does_no_harm(tmp_path: Path) -> None:
    one = header(new_nonce(), 999.0)
    Seen(tmp_path / "seen", lambda: 1000.0).take_up(one)
    with open(tmp_path / "seen", "a") as file:
        file.write("99")
    seen = Seen(tmp_path / "seen", lambda: 1000.0)
    with pytest.raises(BadSignature, match="before"):
        seen.take_up(one)
    two = header(new_nonce(), 999.0)
    seen.take_up(two)
    with pytest.raises(BadSignature, match="before"):
        Seen(tmp_path / "seen", lambda: 1000.0).take_up(two)


def test_an_order_for_which_there_is_no_room_spoils_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = header(new_nonce(), 999.0), header(new_nonce(), 999.0)
    seen = Seen(tmp_path / "seen", lambda: 1000.0)
    real = os.write

    def half(handle: int, data: memoryview) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, data[: len(data) - 10])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        with pytest.raises(OSError, match="No space"):
            seen.take_up(one)
    seen.take_up(two)
    with pytest.raises(BadSignature, match="before"):
        Seen(tmp_path / "seen", lambda: 1000.0).take_up(two)
