"""Faults of a site, the server, the SuperLink and messages, each at three moments: before a step, in the middle of it
(one client of the site is done, the other is not), and after its answer was written. The run ends, and is the
uninterrupted one but for rounds in which clients were left out by a named reason."""

import errno
import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="messages are signed, which needs what the extra flower brings")

from federation.grids import CLIENTS
from federation.played import (
    DEADLINE,
    DITTO,
    FEDERATION,
    KEYS,
    MOST,
    SERVER,
    Killed,
    Played,
    WorkerHangs,
    WorkerKilled,
    copied,
    played,
)
from protofed import wire
from protofed.engine.state import State
from protofed.federation.codec import decoded
from protofed.federation.messages import Order
from protofed.federation.signing import Signed, new_nonce, signed
from protofed.runs.results import Result
from protofed.runs.store import disk
from protofed.runtimes.jobs import Reason
from protofed.testing.federations import TASK, after, assert_same, memories, scripted

MOMENTS = ("before", "during", "after")
SOUTH = CLIENTS["south"]
"""The clients of the site to which things happen, in round 2 of 3."""
ROUND = 1


@cache
def expected(absent: frozenset[tuple[int, str]] = frozenset()) -> State:
    """After three rounds in one process, without these clients in these rounds."""
    everyone = tuple(sorted(TASK.clients))
    of = scripted(DITTO, lambda t: tuple(c for c in everyone if (t, c) not in absent))
    return of.finish(after(3, of))


@dataclass
class Fault:
    """Something that happens to the site once, at a moment of round 2."""

    moment: str = ""
    action: Callable[[], None] = lambda: None
    num_done: int = 0
    seen: list[str] = field(default_factory=list)

    def __call__(self, moment: str, site: str, order: Order) -> None:
        if site == "south" and order.ticket.round == ROUND:
            self.seen.append(moment)
            if moment == self.moment and not self.num_done:
                self.num_done += 1
                self.action()


@pytest.fixture
def fault() -> Fault:
    return Fault()


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault) -> Played:
    return played(tmp_path, monkeypatch, fault)


def left_out(result: Result) -> dict[tuple[int, str], str]:
    """Who failed, in which round from 0 on, and why."""
    return {(number, client): text.partition(":")[0] for (number, client), text in details(result).items()}


def details(result: Result) -> dict[tuple[int, str], str]:
    return {(each.round - 1, client): text for each in result.rounds for client, text in each.failures.items()}


def assert_is_uninterrupted(whole: Played, result: Result, but_for: dict[tuple[int, str], str] | None = None) -> None:
    """The same numbers at the server and on the sites' disks, but for these clients in these rounds."""
    assert left_out(result) == (but_for or {})
    wanted = expected(frozenset(but_for or {}))
    assert_same(result.server, wanted.server, "the server's state")
    for client, memory in memories(wanted).items():
        data = wire.encode(memory)
        digest = hashlib.sha256(data).hexdigest()
        assert result.state.receipts[client] == digest, f"the server knows of another state of {client}"
        (site,) = (name for name, own in CLIENTS.items() if client in own)
        found = [*whole.machines[site].settings.state.glob(f"runs/*/clients/{client}-*/*-{digest}")]
        assert [path.read_bytes() for path in found] == [data], f"{client}'s state is lost"


def failing(reason: Reason, *rounds: int) -> dict[tuple[int, str], str]:
    return {(number, client): reason for number in rounds or (ROUND,) for client in SOUTH}


def test_nothing_happens(whole: Played, fault: Fault) -> None:
    assert_is_uninterrupted(whole, whole.serve())
    assert fault.seen == [*MOMENTS]


# ---- killed


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_site_s_worker_is_killed(moment: str, whole: Played, fault: Fault) -> None:
    def kill() -> None:
        raise WorkerKilled

    fault.moment, fault.action = moment, kill
    assert_is_uninterrupted(whole, whole.serve(), failing(Reason.CLIENT_ERROR))
    assert fault.num_done == 1


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_site_is_killed_and_starts_again(moment: str, whole: Played, fault: Fault) -> None:
    def kill() -> None:
        raise Killed

    fault.moment, fault.action = moment, kill
    assert_is_uninterrupted(whole, whole.serve())
    assert whole.machines["south"].num_starts == 2


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_server_is_killed_and_resumed(moment: str, whole: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before all orders were sent, when some answers came, and when all came but the round was not saved."""
    link, real = whole.superlink, disk.put_folder
    is_dead: list[int] = []

    def kill() -> None:
        if not is_dead:
            is_dead.append(1)
            raise Killed

    def ordered(site: str, order: Any) -> list[Any]:
        if moment == "before" and site == "south" and is_of_round(order.message.body):
            kill()
        return [order]

    def replied(site: str, order: Any, message: Signed) -> list[Any]:
        if moment == "during" and site == "south" and is_of_round(order.message.body):
            monkeypatch.setattr(link, "pump", kill)
        return [message]

    def put_folder(folder: int, name: str, files: dict[str, bytes]) -> None:
        if moment == "after" and name == f"{ROUND + 1:06d}":
            kill()
        real(folder, name, files)

    link.ordered, link.replied = ordered, replied
    monkeypatch.setattr(disk, "put_folder", put_folder)
    with pytest.raises(Killed):
        whole.serve()
    link.pump = whole.pump
    assert_is_uninterrupted(whole, whole.serve(resume=True))


def is_of_round(body: bytes) -> bool:
    message = decoded(body, MOST)
    return isinstance(message, Order) and (message.ticket.round, message.ticket.phase) == (ROUND, "round")


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("knows", [pytest.param("its runs", marks=pytest.mark.slow), "nothing"])
def test_the_superlink_is_killed_and_starts_again(moment: str, knows: str, whole: Played, fault: Fault) -> None:
    """Its database has kept everything, or the run has ended there since it was away for too long."""

    def kill() -> None:
        whole.superlink.away = 7
        if knows == "nothing":
            whole.superlink.ends_run()

    fault.moment, fault.action = moment, kill
    assert_is_uninterrupted(whole, whole.serve())
    assert fault.num_done == 1


# ---- a site in trouble


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_step_that_hangs_is_ended(moment: str, whole: Played, fault: Fault) -> None:
    def hang() -> None:
        raise WorkerHangs

    fault.moment, fault.action = moment, hang
    assert_is_uninterrupted(whole, whole.serve(), failing(Reason.CLIENT_ERROR))
    assert any("for 1 minutes at most" in text for text in whole.machines["south"].told)


def leave(whole: Played, fault: Fault, moment: str, seconds: float) -> None:
    """The machine of the site stands still from a moment on, and for so long."""
    machine = whole.machines["south"]
    real = whole.pump
    back = [0.0]

    def pump() -> None:
        machine.is_frozen = time.monotonic() < back[0]
        real()

    def go() -> None:
        back[0] = time.monotonic() + seconds
        raise Killed

    whole.superlink.pump = pump
    fault.moment, fault.action = moment, go


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_site_that_comes_back_before_the_deadline_is_asked_again(moment: str, whole: Played, fault: Fault) -> None:
    leave(whole, fault, moment, DEADLINE / 2)
    assert_is_uninterrupted(whole, whole.serve())


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_site_that_comes_back_later_has_missed_a_round(moment: str, whole: Played, fault: Fault) -> None:
    leave(whole, fault, moment, DEADLINE * 1.2)
    assert_is_uninterrupted(whole, whole.serve(), failing(Reason.LATE))


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_site_that_is_gone_for_good_is_left_out(moment: str, whole: Played, fault: Fault) -> None:
    leave(whole, fault, moment, 1e9)
    assert_is_uninterrupted(whole, whole.serve(), failing(Reason.LATE, 1, 2))


@pytest.mark.parametrize("moment", ["orders.seen", "clients", "answers"])
def test_a_site_s_disk_is_full(moment: str, whole: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it takes up the order, when it keeps a client's state, when it keeps its answer."""
    state = whole.machines["south"].settings.state
    real = os.write

    def write(handle: int, data: Any) -> int:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if is_full[0] and path.is_relative_to(state) and moment in str(path):
            num_refused[0] += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(handle, data)

    is_full, num_refused = [False], [0]

    def ordered(site: str, order: Any) -> list[Any]:
        is_full[0] = is_of_round(order.message.body)
        return [order]

    whole.superlink.ordered = ordered
    monkeypatch.setattr(os, "write", write)
    result = whole.serve()
    assert num_refused[0] > 0
    assert_is_uninterrupted(whole, result, failing(Reason.CLIENT_ERROR))
    assert "No space left" in details(result)[ROUND, "dan"]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("hours", [-1.0, pytest.param(30.0, marks=pytest.mark.slow)])
def test_a_site_s_clock_goes_wrong(moment: str, hours: float, whole: Played, fault: Fault) -> None:
    """It matters only when an order is taken up."""
    seen = whole.machines["south"].process._seen

    def change() -> None:
        seen._clock = lambda: time.time() + hours * 3600

    def ordered(site: str, order: Any) -> list[Any]:
        if site == "south":
            seen._clock = time.time
            if moment == "before" and is_of_round(order.message.body):
                change()
        return [order]

    whole.superlink.ordered = ordered
    fault.moment, fault.action = moment, change
    result = whole.serve()
    assert_is_uninterrupted(whole, result, failing(Reason.CLIENT_ERROR) if moment == "before" else {})
    assert moment != "before" or "this clock is wrong" in details(result)[ROUND, "cyd"]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("on_memory_lost", ["leave out", "start afresh"])
def test_a_site_restores_an_old_state(
    moment: str, on_memory_lost: str, whole: Played, fault: Fault, tmp_path: Path
) -> None:
    """A copy of its folder from before round 1: it has no state that the server knows of. A client that is not left out
    begins afresh, and is a client like any other then."""
    state = whole.machines["south"].settings.state
    whole.on_memory_lost = on_memory_lost

    def restore() -> None:
        for path in (state / "runs").glob("*/clients"):
            copied(tmp_path / "empty", path)

    (tmp_path / "empty").mkdir()
    fault.moment, fault.action = moment, restore
    result = whole.serve()
    assert fault.num_done == 1
    if on_memory_lost == "start afresh":
        assert left_out(result) == {}
        return
    lost = {"before": [(1, "cyd"), (1, "dan")], "during": [(1, "dan")], "after": []}[moment]
    wanted = dict.fromkeys([*lost, (2, "cyd"), (2, "dan")], str(Reason.MEMORY_LOST))
    assert left_out(result) == wanted
    assert_same(result.server, expected(frozenset(wanted)).server, "the server's state")


# ---- messages


@pytest.mark.parametrize("moment", ["order", "answer", "answer that Flower knows to be lost"])
def test_a_message_is_lost(moment: str, whole: Played) -> None:
    lost: list[Any] = []

    def ordered(site: str, order: Any) -> list[Any]:
        if moment == "order" and site == "south" and is_of_round(order.message.body) and not lost:
            lost.append(order)
            return []
        return [order]

    def replied(site: str, order: Any, message: Signed) -> list[Signed | str]:
        if moment != "order" and site == "south" and is_of_round(order.message.body) and not lost:
            lost.append(message)
            return [] if moment == "answer" else ["Flower says 5: the object is gone"]
        return [message]

    whole.superlink.ordered, whole.superlink.replied = ordered, replied
    assert_is_uninterrupted(whole, whole.serve())
    assert len(lost) == 1


@pytest.mark.parametrize("moment", ["order", "answer", "order, before it is answered"])
def test_a_message_comes_twice(moment: str, whole: Played, fault: Fault) -> None:
    def ordered(site: str, order: Any) -> list[Any]:
        return [order, order] if moment == "order" else [order]

    def replied(site: str, order: Any, message: Signed) -> list[Signed | str]:
        return [message, message] if moment == "answer" else [message]

    def ask_again() -> None:
        for name in list(whole.link._waiting):
            whole.link.resend(name)

    if moment == "order, before it is answered":
        fault.moment, fault.action = "during", ask_again
    whole.superlink.ordered, whole.superlink.replied = ordered, replied
    assert_is_uninterrupted(whole, whole.serve())


@pytest.mark.parametrize("moment", ["order", "answer", "answer that comes when nobody waits for it"])
def test_a_message_comes_late(moment: str, whole: Played) -> None:
    whole.resend_after = 1e9
    held: list[Any] = []

    def ordered(site: str, order: Any) -> list[Any]:
        is_first = site == "south" and is_of_round(order.message.body)
        if moment == "order" and is_first:
            held.append(order)
            return []
        found, held[:] = (held[:], []) if moment == "order" and site == "south" else ([], held[:])
        return [*found, order]

    def replied(site: str, order: Any, message: Signed) -> list[Signed | str]:
        if moment == "order" or site != "south":
            return [message]
        if is_of_round(order.message.body):
            held.append((order.id, message))
            return []
        for name, late in held:
            whole.superlink.replies.setdefault(name if moment == "answer" else order.id, []).append(late)
        held.clear()
        return [message]

    whole.superlink.ordered, whole.superlink.replied = ordered, replied
    assert_is_uninterrupted(whole, whole.serve(), failing(Reason.LATE))
    assert not held


OTHER = new_nonce()
FOREIGN: dict[str, Callable[[Any], Any]] = {
    "another run at the SuperLink": lambda order: order._replace(run=order.run + 1),
    "another federation": lambda order: order._replace(message=by(SERVER, "1" * 32, order)),
    "somebody else": lambda order: order._replace(message=by(KEYS["north"], FEDERATION, order)),
}


def by(key: Any, federation: str, order: Any) -> Signed:
    return signed(key, "order", federation, order.run, "south", OTHER, order.message.body, time.time())


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("what", FOREIGN)
def test_an_order_from_elsewhere_comes_too(what: str, moment: str, whole: Played) -> None:
    def ordered(site: str, order: Any) -> list[Any]:
        if site != "south" or not is_of_round(order.message.body):
            return [order]
        foreign = FOREIGN[what](order)
        return [foreign, order] if moment == "before" else [order, foreign]

    whole.superlink.ordered = ordered
    assert_is_uninterrupted(whole, whole.serve())
    text = (whole.machines["south"].settings.state / "refused.log").read_text()
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize("what", ["another run", "another site", "an earlier round"])
def test_an_answer_from_elsewhere_comes_first(what: str, whole: Played) -> None:
    """It is taken for what it is, and the site is asked again. In a batch with it the true one is not looked at."""
    old: list[Signed] = []
    num_forged = [0]

    def replied(site: str, order: Any, message: Signed) -> list[Signed | str]:
        if site != "south":
            return [message]
        if not is_of_round(order.message.body):
            old.append(message)
            return [message]
        num_forged[0] += 1
        if num_forged[0] > 1:
            return [message]
        key, run = KEYS["north" if what == "another site" else "south"], order.run + (what == "another run")
        forged = signed(key, "answer", FEDERATION, run, "south", OTHER, message.body, time.time())
        return [old[-1] if what == "an earlier round" else forged, message]

    whole.superlink.replied = replied
    assert_is_uninterrupted(whole, whole.serve())
    assert len([text for text in whole.told if "south: an answer is refused" in text]) == 1
    assert num_forged == [2]
