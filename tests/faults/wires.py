"""Runtimes that stand for a bad network: clients vanish, and messages are lost, doubled, held back, mixed up, spoiled.

A network runtime gives the server envelopes. The ones here make them in this process: `Wired` trains as the sequential
runtime does and seals every reply, with the clients' memories at the clients' end.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from faults.census import Arrival, History
from protofed.api.task import ClientId
from protofed.engine.federation import Federation
from protofed.engine.message import WireMessage, sealed
from protofed.engine.state import State
from protofed.runtimes.client_store import Receipt
from protofed.runtimes.jobs import Answer, Failure, Job, Reason, Ticket
from protofed.runtimes.sequential import Sequential
from protofed.tree import Tree

Outcomes = Iterator[tuple[ClientId, Any]]


class DropOut(Sequential):
    """A share of the clients fails in each round; the others reply. Writes the history."""

    def __init__(self, share: float, seed: int, history: History) -> None:
        super().__init__()
        self.share, self.history, self.random = share, history, random.Random(seed)

    def run(self, jobs: Iterable[Job]) -> Outcomes:
        self.history.begin()
        for job in jobs:
            is_there = self.random.random() >= self.share
            self.history.asked[-1].append(job.client)
            self.history.arrivals[-1].append(Arrival(job.client, is_there))
            if is_there:
                yield from super().run([job])
            else:
                yield job.client, Failure(job.client, Reason.CLIENT_ERROR, "it vanished")


@dataclass(frozen=True)
class Mail:
    """One message under way."""

    client: ClientId
    envelope: WireMessage
    ticket: Ticket
    """What it answers."""
    upload: Tree = None
    is_whole: bool = True
    is_legible: bool = True
    """Whether its ticket can be read."""


class Elsewhere:
    """The clients' states are not here: a server that asks for one is wrong."""

    def keep(self, client: ClientId, state: Tree) -> Receipt:
        raise AssertionError(f"the server keeps the state of {client}")

    def load(self, client: ClientId, receipt: Receipt) -> Tree:
        raise AssertionError(f"the server reads the state of {client}")


class Wired(Sequential):
    """Every reply is sealed; a subclass says in `carried` what becomes of the mail of a call."""

    def __init__(self, history: History | None = None) -> None:
        super().__init__()
        self.store = Elsewhere()
        self.site = Sequential()
        """Where clients work. What they keep is named by receipts, and never leaves it."""
        self.receipts: dict[str, Receipt] = {}
        """Of everything that clients keep."""
        self.history = history or History()
        self.memories: dict[ClientId, Tree] = {}
        """What clients keep that counted, as of the last `tell`."""

    def open(self, federation: Federation) -> Any:
        self.federation = federation
        return super().open(federation)

    def run(self, jobs: Iterable[Job]) -> Outcomes:
        self.history.begin()
        mail = []
        for job in jobs:
            self.history.asked[-1].append(job.client)
            [(_, outcome)] = self.site.run([replace(job, receipt=self.receipts.get(job.receipt or ""))])
            assert isinstance(outcome, Answer), outcome
            assert outcome.receipt is not None
            self.receipts[str(outcome.receipt)] = outcome.receipt
            mail.append(self.posted(job, outcome.upload, outcome.receipt, outcome.loss))
        yield from self.delivered(mail[0].ticket, list(self.carried(mail)))

    def posted(self, job: Job, upload: Tree, receipt: Receipt, loss: float | None = None) -> Mail:
        return Mail(job.client, sealed(job.ticket, upload, receipt, loss), job.ticket, upload)

    def carried(self, mail: list[Mail]) -> Iterable[Mail]:
        """What arrives, in this order."""
        return mail

    def delivered(self, now: Ticket, mail: Sequence[Mail]) -> Outcomes:
        """The mail; then everybody from whom nothing came at all is given up."""
        for one in mail:
            self.history.arrivals[-1].append(Arrival(one.client, one.is_legible and one.ticket == now, one.is_whole))
            yield one.client, one.envelope
        for client in self.history.asked[-1]:
            if client not in {one.client for one in mail}:
                yield client, Failure(client, Reason.LATE, "nothing came")

    def tell(self, state: State) -> None:
        """Looks up what the clients keep that the server holds receipts of."""
        kept = {client: self.receipts[receipt] for client, receipt in state.receipts.items()}
        self.memories = {client: self.site.store.load(client, receipt) for client, receipt in kept.items()}


@dataclass(frozen=True)
class Weather:
    """How likely what is for a message."""

    lost: float = 0.0
    doubled: float = 0.0
    delayed: float = 0.0
    """Into one of the next three rounds."""
    spoiled: float = 0.0
    replayed: float = 0.0
    """So likely an old message of the same client comes too."""


class Unruly(Wired):
    """A wire with weather. What it did is counted in `deeds`."""

    def __init__(self, weather: Weather, seed: int, foreign: Sequence[Mail] = ()) -> None:
        super().__init__()
        self.weather, self.foreign, self.random = weather, list(foreign), random.Random(seed)
        self.archive: list[Mail] = []
        self.held: list[tuple[int, Mail]] = []
        """Mail that will arrive when so many calls have been made."""
        self.deeds: dict[str, int] = {}

    def carried(self, mail: list[Mail]) -> Iterable[Mail]:
        arriving = [one for sent in mail for one in self._fate(sent)]
        number = len(self.history.asked)
        arriving += [one for due, one in self.held if due == number]
        self.archive += mail
        self.random.shuffle(arriving)
        return arriving

    def _fate(self, one: Mail) -> Iterator[Mail]:
        if self._happens("replayed") and self.archive:
            yield self.random.choice(self.archive)
        if self.foreign and self._happens("replayed"):
            yield replace(self.random.choice(self.foreign), client=one.client)
        if self._happens("lost"):
            return
        if self._happens("delayed"):
            self.held.append((len(self.history.asked) + self.random.randint(1, 3), one))
            return
        yield spoiled(one, self.random) if self._happens("spoiled") else one
        if self._happens("doubled"):
            yield one

    def _happens(self, deed: str) -> bool:
        does = self.random.random() < getattr(self.weather, deed)
        self.deeds[deed] = self.deeds.get(deed, 0) + does
        return does


def relabelled(one: Mail, **change: Any) -> Mail:
    """The same upload under another ticket."""
    ticket = replace(one.ticket, **change)
    return replace(one, ticket=ticket, envelope=sealed(ticket, one.upload))


def spoiled(one: Mail, draw: random.Random) -> Mail:
    """The message cut short."""
    data = one.envelope.data
    cut, start = draw.randrange(len(data)), 8 + int.from_bytes(data[:8], "little")
    return replace(one, envelope=WireMessage(data[:cut]), is_whole=False, is_legible=cut >= start)


@dataclass
class Scripted(Sequential):
    """Gives out what a test says, for jobs that it does once: rounds from one state cost no training but the first."""

    change: Callable[[ClientId, Answer], Any] = lambda client, answer: answer
    done: dict[tuple[ClientId, int], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def run(self, jobs: Iterable[Job]) -> Outcomes:
        for job in jobs:
            key = job.client, job.context.step_seed
            if key not in self.done:
                [(_, self.done[key])] = super().run([job])
            yield job.client, self.change(job.client, self.done[key])
