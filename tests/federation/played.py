"""A federation in one process with everything of a real one but Flower's SuperLink and forks: the server's link signs
orders, and a process of each site takes them up, works, and signs what goes back. The SuperLink between them is played,
so that a test can let anything happen at a moment that it names. Time stands still unless somebody waits."""

import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from clocks import ManualClock
from federation.grids import CLIENTS, RUN, config_of
from protofed.federation import keys, site_process
from protofed.federation.codec import Undecodable, decoded
from protofed.federation.flower.link import FlowerLink
from protofed.federation.flower.outcomes import Delivery, RunOver, SiteNode, Unreachable
from protofed.federation.messages import Order
from protofed.federation.policy import Identity, Policy, SiteSettings
from protofed.federation.processes import OutOfTime, WorkerDied
from protofed.federation.server import prepared
from protofed.federation.signing import Signed
from protofed.federation.site import Site
from protofed.federation.site_data import SiteData, own_part
from protofed.federation.site_process import SiteProcess
from protofed.federation.site_run import SiteRun
from protofed.methods import METHODS
from protofed.runs.config.config import Config
from protofed.runs.config.recording import task_table
from protofed.runs.config.sections import EvaluationSettings
from protofed.runs.results import Result
from protofed.runs.runner import execute
from protofed.runs.store.folder import RunFolder
from protofed.tasks.minidigits import Minidigits
from protofed.testing.federations import TASK

FEDERATION = "0" * 32
MOST = 10**9
DEADLINE = 60.0
"""Seconds of the played clock."""
SERVER, *_KEYS = (ec.generate_private_key(ec.SECP384R1()) for _ in range(1 + len(CLIENTS)))
KEYS = dict(zip(CLIENTS, _KEYS, strict=True))
DITTO = METHODS["ditto"]()
"""Its server knows weights, and each of its clients keeps some."""


class Killed(BaseException):
    """The end of a process, in the middle of whatever it does."""


class WorkerKilled(BaseException):
    """The same, of the process that does a site's work."""


class WorkerHangs(BaseException):
    """It is at work until somebody ends it."""


class SuperLink:
    """Carries messages, and does to them what the test wants."""

    def __init__(self) -> None:
        self.nodes: dict[str, SiteNode] = {}
        self.orders: dict[str, deque[Delivery]] = {site: deque() for site in CLIENTS}
        self.replies: dict[str, list[Signed | str]] = {}
        self.given: list[tuple[str, Signed | str]] = []
        """All replies that the server was given."""
        self.runs: list[int] = []
        self.away = 0
        """For how many calls more it is not there."""
        self.pump: Callable[[], None] = lambda: None
        self.ordered: Callable[[str, Delivery], list[Delivery]] = lambda site, delivery: [delivery]
        """What becomes of an order."""
        self.replied: Callable[[str, Delivery, Signed], list[Signed | str]] = lambda site, order, message: [message]
        """What becomes of an answer."""

    def call(self, run: int = 0) -> None:
        if self.away:
            self.away -= 1
            raise Unreachable("it is away")
        if run and run != self.runs[-1]:
            raise RunOver("that run has ended")

    def ends_run(self) -> None:
        """It has forgotten all that it carried."""
        self.runs.append(0)
        for queue in self.orders.values():
            queue.clear()
        self.replies.clear()

    def begin(self) -> "Session":
        self.call()
        self.runs.append(100 + len(self.runs))
        return Session(self, self.runs[-1])


@dataclass
class Session:
    """The server's end."""

    superlink: SuperLink
    run: int
    is_over: bool = False
    num_sent: int = 0

    def nodes(self) -> dict[str, SiteNode]:
        self.superlink.call(self.run)
        self.superlink.pump()
        return dict(self.superlink.nodes)

    def send(self, node: int, message: Signed) -> str:
        link = self.superlink
        link.call(self.run)
        (site,) = (name for name, one in link.nodes.items() if one.id == node)
        self.num_sent += 1
        delivery = Delivery(self.run, f"{self.run}-{self.num_sent}", message, 1e12)
        link.orders[site].extend(link.ordered(site, delivery))
        return delivery.id

    def answers(self, sent: Mapping[str, int]) -> Iterator[tuple[str, Signed | str]]:
        self.superlink.call(self.run)
        self.superlink.pump()
        self.superlink.call(self.run)
        for name in sent:
            for message in self.superlink.replies.pop(name, []):
                self.superlink.given.append((name, message))
                yield name, message

    def close(self) -> None:
        pass


@dataclass
class Fleet:
    """A site's end."""

    machine: "Machine"
    node: int = 0

    @property
    def superlink(self) -> SuperLink:
        return self.machine.superlink

    @property
    def site(self) -> str:
        return self.machine.name

    def activate(self, before: int) -> None:
        self.superlink.call()
        self.node = 1 + [*CLIENTS].index(self.site)
        known = self.superlink.nodes.get(self.site)
        self.superlink.nodes[self.site] = SiteNode(self.node, True, str(int(known.since) + 1 if known else 0))

    def deactivate(self) -> None:
        pass

    def beat(self) -> None:
        self.superlink.call()

    def order(self, most_bytes: int) -> Delivery | None:
        self.superlink.call()
        self.machine.is_busy = False
        queue = self.superlink.orders[self.site]
        return queue.popleft() if queue else None

    def answer(self, delivery: Delivery, message: Signed) -> None:
        self.superlink.call(delivery.run)
        for one in self.superlink.replied(self.site, delivery, message):
            self.superlink.replies.setdefault(delivery.id, []).append(one)

    def close(self) -> None:
        pass


class Worker:
    """Works in this process. What ends a forked one is raised by the test."""

    def __init__(self, machine: "Machine") -> None:
        self.machine = machine

    def answer(self, data: bytes, seconds: float) -> bytes | None:
        self.machine.is_busy = True
        try:
            self.machine.reaches("before", data)
            answer = self.machine.handler.handle(data)
            self.machine.reaches("after", data)
        except WorkerKilled:
            self.machine.forget()
            raise WorkerDied("the process that did the work died (signal 9)") from None
        except WorkerHangs:
            self.machine.forget()
            raise OutOfTime from None
        return answer

    def close(self) -> None:
        pass


@dataclass
class Machine:
    """A site: its folder, and a process that is started again when it was killed."""

    superlink: SuperLink
    name: str
    folder: Path
    happens: Callable[[str, str, Order], None]
    """Called with a moment, the site and the order."""
    is_frozen: bool = False
    """Whether its process does nothing now."""
    is_busy: bool = False
    """Whether it has an order that it has not answered."""
    told: list[str] = field(default_factory=list)
    num_starts: int = 0
    order: Order | None = None
    """The one that it works at, if it is of a round."""

    def __post_init__(self) -> None:
        keys.private_folder(self.settings.state)
        if not self.settings.key.exists():
            keys.write_private(self.settings.key, _pem(KEYS[self.name]))
            keys.write_public(self.settings.server_key, keys.public_text(SERVER.public_key()))
        self.start()

    @property
    def settings(self) -> SiteSettings:
        identity = Identity(self.name, FEDERATION, "127.0.0.1:1")
        return SiteSettings(self.folder, identity, Minidigits(), (), Policy(min_class_count=1, order_minutes=1.0))

    def forget(self) -> None:
        """What the worker knew beyond its files is gone."""
        self.handler = Site(self.settings.state, SiteData(own_part(TASK, CLIENTS[self.name]), task_table(TASK)))

    def start(self) -> None:
        self.num_starts += 1
        self.forget()
        self.is_busy = False
        self.process = SiteProcess(
            self.settings, self.handler, lambda: Fleet(self), self.told.append, lambda: self.is_idle
        )
        self.process._worker = Worker(self)  # type: ignore[assignment]

    @property
    def is_idle(self) -> bool:
        is_connected = self.process._fleet is not None and not self.superlink.away
        return is_connected and not self.is_busy and not self.superlink.orders[self.name]

    def work(self) -> None:
        """Does what there is to do."""
        if self.is_frozen:
            return
        try:
            self.process.run()
        except Killed:
            self.start()

    def reaches(self, moment: str, data: bytes) -> None:
        try:
            message = decoded(data, MOST)
        except Undecodable:
            return
        self.order = message if isinstance(message, Order) and message.ticket.phase == "round" else None
        self.is_reached(moment)

    def is_reached(self, moment: str) -> None:
        if self.order is not None:
            self.happens(moment, self.name, self.order)


@dataclass
class Played:
    """The whole of it."""

    folder: Path
    superlink: SuperLink
    machines: dict[str, Machine]
    told: list[str]
    clock: ManualClock
    link: FlowerLink
    resend_after: float = 10.0
    on_memory_lost: Any = "leave out"

    def serve(self, resume: bool = False) -> Result:
        """Does the run, or goes on with it, as a server that was just started."""
        self.link = FlowerLink(
            self.superlink.begin,
            FEDERATION,
            SERVER,
            {n: k.public_key() for n, k in KEYS.items()},
            tell=self.told.append,
        )
        found = prepared(
            self.link,
            config(),
            RUN,
            seconds=600.0,
            resend_after=self.resend_after,
            on_memory_lost=self.on_memory_lost,
        )
        return execute(found, RunFolder(self.folder / "run"), resume=resume)

    def pump(self) -> None:
        for machine in self.machines.values():
            machine.work()


def config() -> Config:
    found = config_of(DITTO, evaluation=EvaluationSettings(every=3))
    return replace(found, training=replace(found.training, deadline=DEADLINE))


def played(folder: Path, monkeypatch: pytest.MonkeyPatch, happens: Callable[[str, str, Order], None]) -> Played:
    """`happens` is called with "before", "during" and "after", the site and the order."""
    clock, superlink = ManualClock(), SuperLink()
    monkeypatch.setattr("time.monotonic", clock.monotonic)
    monkeypatch.setattr("time.sleep", clock.advance)
    monkeypatch.setattr("os.fsync", lambda handle: None)  # processes are killed here, and no machine loses its power
    monkeypatch.setattr(site_process, "POLLS", 0.0)
    monkeypatch.setattr(site_process, "POLLS_IDLE", 0.0)
    real = SiteRun._one

    def one(self: SiteRun, job: Any) -> Any:
        """The second client of a site is asked in the middle of an order."""
        machine = next((m for m in machines.values() if m.handler._runs.get(RUN) is self), None)
        if machine is not None and job.client == CLIENTS[machine.name][-1]:
            machine.is_reached("during")
        return real(self, job)

    monkeypatch.setattr(SiteRun, "_one", one)
    machines = {name: Machine(superlink, name, _folder(folder / name), happens) for name in CLIENTS}
    whole = Played(folder, superlink, machines, [], clock, None)  # type: ignore[arg-type]
    superlink.pump = whole.pump
    return whole


def _folder(path: Path) -> Path:
    path.mkdir(mode=0o700)
    return path


def _pem(key: keys.PrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def copied(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
