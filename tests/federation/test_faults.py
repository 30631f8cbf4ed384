"""What may go wrong between a server and its sites, and at a site. A fault costs at most a client its round."""

import errno
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from clocks import ManualClock
from federation.grids import config_of, grid, remote, sites_of, states
from protofed import tree, wire
from protofed.api.method import Method
from protofed.engine.federation import Federation
from protofed.engine.message import WireMessage, sealed
from protofed.engine.state import State
from protofed.federation.codec import decoded, encoded
from protofed.federation.in_process import InProcess
from protofed.federation.messages import Answer, Done, Failed, Order
from protofed.federation.site import Site
from protofed.federation.site_store import LastFiles, StateFiles
from protofed.methods import METHODS
from protofed.runs.store import disk
from protofed.runtimes.jobs import Reason, Ticket
from protofed.testing.federations import TASK, after, assert_same, federation, memories, scripted

MOST = 10**9
DITTO: Method[Any, Any, Any, Any] = METHODS["ditto"]()
"""Its server knows weights, and each of its clients keeps some."""
EVERYONE = tuple(sorted(TASK.clients))


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """Time stands still unless somebody waits: deadlines must not depend on how busy the machine is."""
    found = ManualClock()
    monkeypatch.setattr("time.monotonic", found.monotonic)
    monkeypatch.setattr("time.sleep", found.advance)
    return found


class Between(InProcess):
    """A link that does something to messages on their way. `orders` counts those of rounds."""

    def __init__(self, sites: dict[str, Site]) -> None:
        super().__init__(sites)
        self.orders: list[tuple[str, Order]] = []
        self.num_resent = 0

    def send(self, site: str, data: bytes, most_bytes: int) -> str:
        message = decoded(data, MOST)
        if isinstance(message, Order):
            self.orders.append((site, message))
        return super().send(site, data, most_bytes)

    def resend(self, sent: str) -> None:
        self.num_resent += 1
        super().resend(sent)

    def receive(self, timeout: float) -> Iterator[tuple[str, bytes]]:
        came = False
        for site, data in super().receive(timeout):
            for each in self.passed(site, data) if isinstance(decoded(data, MOST), Answer) else [data]:
                came = True
                yield site, each
        if not came:  # as a link that waits
            time.sleep(min(timeout, 0.02))

    def passed(self, site: str, data: bytes) -> list[bytes]:
        """What arrives in the place of an answer."""
        return [data]

    @property
    def round(self) -> int:
        """Of the last order."""
        return self.orders[-1][1].ticket.round


def expected(method: Method[Any, Any, Any, Any] = DITTO, absent: dict[int, set[str]] | None = None) -> State:
    """After three rounds in one process, from some of which clients are absent."""
    missing = absent or {}
    of = scripted(method, lambda t: tuple(c for c in EVERYONE if c not in missing.get(t, set())))
    return of.finish(after(3, of))


def ended(link: Between, sites: dict[str, Site], **settings: Any) -> tuple[State, list[State], Federation]:
    options = {key: settings.pop(key) for key in ("resend_after", "on_memory_lost") if key in settings}
    of = remote(link, config_of(DITTO, **settings), **options)
    all_states = [of.start()]
    for _ in range(3):
        all_states.append(of.advance(all_states[-1]))
    return of.finish(all_states[-1]), all_states[1:], of


def assert_is(state: State, sites: dict[str, Site], of: Federation, wanted: State) -> None:
    assert_same(state.server, wanted.server, "the server's state")
    assert_same(states(sites, state, of), memories(wanted), "what clients keep")


# ---- on the way


def test_a_lost_answer_is_asked_for_again_and_changes_nothing(tmp_path: Path) -> None:
    class Losing(Between):
        def passed(self, site: str, data: bytes) -> list[bytes]:
            is_first = site == "south" and self.round == 1 and not self.num_resent
            return [] if is_first else [data]

    sites = sites_of(tmp_path)
    link = Losing(sites)
    state, rounds, of = ended(link, sites, resend_after=0.05)
    assert link.num_resent == 1
    assert not any(each.failures for each in rounds)
    assert_is(state, sites, of, expected())


def test_answers_that_come_twice_count_once(tmp_path: Path) -> None:
    class Doubling(Between):
        def passed(self, site: str, data: bytes) -> list[bytes]:
            return [data, data]

    sites = sites_of(tmp_path)
    state, rounds, of = ended(Doubling(sites), sites)
    assert not any(each.refused for each in rounds)
    assert_is(state, sites, of, expected())


def test_a_late_answer_costs_its_clients_a_round_and_harms_no_other(tmp_path: Path) -> None:
    class Delaying(Between):
        held: bytes = b""

        def passed(self, site: str, data: bytes) -> list[bytes]:
            if site == "south" and self.round == 1:
                self.held = data
                return []
            if site == "south" and self.held:
                held, self.held = self.held, b""
                return [held, data]
            return [data]

    sites = sites_of(tmp_path)
    of = remote(Delaying(sites), replace_deadline(config_of(DITTO), 1.0))
    first = of.advance(of.start())
    second = of.advance(first)
    third = of.advance(second)
    assert {(f.client, f.reason) for f in second.failures} == {("cyd", Reason.LATE), ("dan", Reason.LATE)}
    assert not third.failures
    assert of.runtime.dropped == {Reason.STALE_ROUND: 1}  # type: ignore[attr-defined]
    assert_is(of.finish(third), sites, of, expected(absent={1: {"cyd", "dan"}}))


def replace_deadline(config: Any, seconds: float) -> Any:
    return replace(config, training=replace(config.training, deadline=seconds))


def changed(data: bytes, change: Callable[[Done], Done]) -> bytes:
    answer = decoded(data, MOST)
    assert isinstance(answer, Answer)
    return encoded(replace(answer, done=tuple(map(change, answer.done))))


def resealed(done: Done, ticket: Callable[[Ticket], Ticket] = lambda t: t, leaf: Any = lambda x: x) -> Done:
    """The same upload with another ticket or other numbers."""
    message = WireMessage(done.upload)
    arrays = {path: leaf(value) for path, value in wire.decode_arrays(done.upload).items()}
    value = {path: each for path, each in arrays.items() if "/" not in path}
    for path, each in arrays.items():
        *folders, name = path.split("/")
        where: Any = value
        for folder in folders:
            where = where.setdefault(folder, {})
        where[name] = each
    assert tree.named_leaves(value).keys() == arrays.keys()
    return replace(done, upload=sealed(ticket(message.ticket), value, message.receipt, message.loss).data)


def nan(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, torch.nan) if x.is_floating_point() else x


FORGED: dict[Reason, Callable[[bytes], bytes]] = {
    Reason.WRONG_RUN: lambda data: changed(data, lambda d: resealed(d, lambda t: replace(t, run="another"))),
    Reason.STALE_ROUND: lambda data: changed(data, lambda d: resealed(d, lambda t: replace(t, round=t.round + 1))),
    Reason.WRONG_MODEL: lambda data: changed(data, lambda d: resealed(d, lambda t: replace(t, model="another"))),
    Reason.NON_FINITE: lambda data: changed(data, lambda d: resealed(d, leaf=nan)),
    Reason.SHAPE_MISMATCH: lambda data: changed(data, lambda d: resealed(d, leaf=lambda x: x.flatten()[:1])),
    Reason.DTYPE_MISMATCH: lambda data: changed(data, lambda d: resealed(d, leaf=lambda x: x.to(torch.float16))),
    Reason.TOO_LARGE: lambda data: changed(data, lambda d: replace(d, upload=d.upload + bytes(8000))),
}


@pytest.mark.parametrize("reason", FORGED)
def test_an_upload_that_is_not_what_was_asked_for_is_refused(reason: Reason, tmp_path: Path) -> None:
    class Forging(Between):
        def passed(self, site: str, data: bytes) -> list[bytes]:
            return [FORGED[reason](data) if site == "west" and self.round == 1 else data]

    sites = sites_of(tmp_path)
    state, rounds, of = ended(Forging(sites), sites)
    assert [(f.client, f.reason) for f in rounds[1].failures] == [("eve", reason)]
    assert_is(state, sites, of, expected(absent={1: {"eve"}}))


def renamed(data: bytes, names: dict[str, str]) -> bytes:
    return changed(data, lambda d: replace(d, client=names.get(d.client, d.client)))


WRONG_ANSWERS: dict[str, Callable[[bytes], bytes]] = {
    "for a client of another site": lambda data: renamed(data, {"eve": "ann"}),
    "for nobody": lambda data: encoded(replace(answer_of(data), done=())),
    "twice for one": lambda data: encoded(replace(answer_of(data), done=answer_of(data).done * 2)),
    "without a receipt": lambda data: changed(
        data, lambda d: replace(d, upload=d.upload.replace(b"receipt", b"nothing"))
    ),
    "too late, it says": lambda data: encoded(replace(answer_of(data), done=(), failed=(Failed("eve", "LATE", ""),))),
}


def answer_of(data: bytes) -> Answer:
    answer = decoded(data, MOST)
    assert isinstance(answer, Answer)
    return answer


@pytest.mark.parametrize("what", WRONG_ANSWERS)
def test_a_site_that_answers_wrongly_is_left_out(what: str, tmp_path: Path) -> None:
    class Lying(Between):
        def passed(self, site: str, data: bytes) -> list[bytes]:
            return [WRONG_ANSWERS[what](data) if site == "west" and self.round == 1 else data]

    sites = sites_of(tmp_path)
    state, rounds, of = ended(Lying(sites), sites)
    assert [(f.client, f.reason) for f in rounds[1].failures] == [("eve", Reason.UNDECODABLE)]
    assert_is(state, sites, of, expected(absent={1: {"eve"}}))


@pytest.mark.parametrize("noise", [b"noise", b"PFED", b"PFED" + bytes(10**6)], ids=["noise", "cut off", "too large"])
def test_noise_instead_of_an_answer_is_refused_at_the_deadline(noise: bytes, tmp_path: Path) -> None:
    class Noisy(Between):
        def receive(self, timeout: float) -> Iterator[tuple[str, bytes]]:
            for site, data in super().receive(timeout):
                yield site, noise if site == "west" and self.orders and self.round == 1 else data

    sites = sites_of(tmp_path)
    of = remote(Noisy(sites), replace_deadline(config_of(DITTO), 0.5))
    state = of.advance(of.advance(of.start()))
    assert [(f.client, f.reason) for f in state.failures] == [("eve", Reason.UNDECODABLE)]


def test_one_site_cannot_answer_for_another(tmp_path: Path) -> None:
    class Crossing(Between):
        def receive(self, timeout: float) -> Iterator[tuple[str, bytes]]:
            for site, data in super().receive(timeout):
                is_in_round = bool(self.orders) and self.round == 1
                yield ("west" if site == "north" and is_in_round else site), data

    sites = sites_of(tmp_path)
    of = remote(Crossing(sites), replace_deadline(config_of(DITTO), 1.0))
    state = of.advance(of.advance(of.start()))
    assert {(f.client, f.reason) for f in state.failures} == {("ann", Reason.LATE), ("bob", Reason.LATE)}


def test_a_site_that_is_gone_is_not_waited_for_without_end(tmp_path: Path) -> None:
    """Evaluations have no deadline of their own."""

    class Leaving(Between):
        num_idle = 0

        def passed(self, site: str, data: bytes) -> list[bytes]:
            return [] if site == "west" and self.orders[-1][1].ticket.phase == "evaluate" else [data]

        def receive(self, timeout: float) -> Iterator[tuple[str, bytes]]:
            self.num_idle += 1
            assert self.num_idle < 200, "it waits without end"
            yield from super().receive(timeout)

    of = remote(Leaving(sites_of(tmp_path)), replace_deadline(config_of(DITTO), 0.5))
    assert set(of.evaluated(of.advance(of.start()))) == {*EVERYONE} - {"eve"}


# ---- at a site


class Killed(BaseException):
    """Stands for the end of a site's process."""


class Restarting(Between):
    """A link to sites of which one is killed once, and starts again with the folder that it left."""

    def __init__(self, sites: dict[str, Site]) -> None:
        super().__init__(sites)
        self.num_killed = 0

    def receive(self, timeout: float) -> Iterator[tuple[str, bytes]]:
        try:
            yield from super().receive(timeout)
        except Killed:
            self.num_killed += 1
            for name, site in self._sites.items():
                assert isinstance(site, Site)
                self._sites[name] = Site(site.folder, site.data, site.limits)


@pytest.mark.parametrize("moment", ["before its state is written", "after its state is written", "after its answer is"])
def test_a_site_that_is_killed_and_starts_again_ends_as_if_nothing_had_been(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls, name, is_late = {
        "before its state is written": (StateFiles, "keep", False),
        "after its state is written": (StateFiles, "keep", True),
        "after its answer is": (LastFiles, "put", True),
    }[moment]
    real, calls = getattr(cls, name), [0]

    def deadly(self: Any, *arguments: Any, **more: Any) -> Any:
        is_of_answers = cls is StateFiles or self._path.name == "answers"
        calls[0] += is_of_answers
        dies = is_of_answers and calls[0] == 5
        if dies and not is_late:
            raise Killed
        found = real(self, *arguments, **more)
        if dies:
            raise Killed
        return found

    monkeypatch.setattr(cls, name, deadly)
    sites = sites_of(tmp_path)
    link = Restarting(sites)
    state, rounds, of = ended(link, sites, resend_after=0.05)
    assert link.num_killed == 1
    assert not any(each.failures for each in rounds)
    assert_is(state, {**link._sites}, of, expected())  # type: ignore[arg-type]


def files_of(site: Site, client: str) -> list[Path]:
    return sorted(site.folder.glob(f"runs/*/clients/{client}-*/*"))


@pytest.mark.parametrize("fault", ["spoiled", "gone", "a link"])
def test_a_client_whose_state_is_lost_is_left_out_until_it_is_back(fault: str, tmp_path: Path) -> None:
    of, sites = grid(tmp_path, DITTO)
    first = of.advance(of.start())
    newest = files_of(sites["west"], "eve")[-1]
    content = newest.read_bytes()
    newest.unlink()
    if fault == "spoiled":
        newest.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif fault == "a link":
        (tmp_path / "elsewhere").write_bytes(content)
        newest.symlink_to(tmp_path / "elsewhere")
    second = of.advance(first)
    assert [(f.client, f.reason) for f in second.failures] == [("eve", Reason.MEMORY_LOST)]
    assert second.receipts["eve"] == first.receipts["eve"]
    assert not second.strikes
    newest.unlink(missing_ok=True)
    newest.write_bytes(content)
    assert_is(of.finish(of.advance(second)), sites, of, expected(absent={1: {"eve"}}))


def test_a_client_whose_state_is_lost_may_begin_afresh(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sites = sites_of(tmp_path)
    of = remote(InProcess(sites), config_of(DITTO), on_memory_lost="start afresh")
    first = of.advance(of.start())
    for path in files_of(sites["west"], "eve"):
        path.unlink()
    second = of.advance(first)
    assert not second.failures
    assert "MEMORY_LOST: client eve" in caplog.text
    near = federation(DITTO)
    before = near.advance(near.start())
    forgotten = replace(before, receipts={c: r for c, r in before.receipts.items() if c != "eve"})
    assert_is(second, sites, of, near.advance(forgotten))


def test_a_state_from_before_goes_on_from_what_clients_had_then(tmp_path: Path) -> None:
    of, sites = grid(tmp_path, DITTO)
    first = of.advance(of.start())
    after(2, of, first)
    again = after(2, of, first)
    assert not again.failures
    assert_is(of.finish(again), sites, of, expected())


def test_old_versions_of_a_state_go_and_the_one_in_use_stays(tmp_path: Path) -> None:
    files = LastFiles(tmp_path / "files", most=3)
    for k in range(6):
        files.put(f"v{k}", b"content", stays="v0")
    assert files.labels() == ["v0", "v3", "v4", "v5"]
    assert files.read("v1") is None
    files.put("v3", b"again")
    assert files.labels() == ["v4", "v5", "v3"]
    assert files.read("v3") == b"again"


def test_a_site_with_a_full_disk_fails_and_sends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of, sites = grid(tmp_path, DITTO)
    first = of.advance(of.start())
    real = disk.write

    def full(folder: int, name: str, data: bytes) -> None:
        if os.readlink(f"/proc/self/fd/{folder}").startswith(str(sites["west"].folder)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(folder, name, data)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write", full)
        second = of.advance(first)
    [failure] = second.failures
    assert (failure.client, failure.reason) == ("eve", Reason.CLIENT_ERROR)
    assert "No space left" in failure.detail
    assert_is(of.finish(of.advance(second)), sites, of, expected(absent={1: {"eve"}}))


def test_nothing_leaves_a_site_that_cannot_write_its_log(tmp_path: Path) -> None:
    of, sites = grid(tmp_path, DITTO)
    first = of.advance(of.start())
    path = sites["west"].folder / "log.jsonl"
    path.rename(tmp_path / "log")
    path.mkdir()
    second = of.advance(first)
    assert [(f.client, f.reason) for f in second.failures] == [("eve", Reason.CLIENT_ERROR)]
