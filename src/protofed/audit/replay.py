"""The last round of a finished run once more, with every upload at hand."""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch

from protofed import tree
from protofed.api.contexts import ServerContext
from protofed.api.method import Group
from protofed.api.task import ClientId
from protofed.engine.federation import Federation
from protofed.engine.state import State
from protofed.errors import BadInput
from protofed.runs.loading import SavedRun
from protofed.runs.runtime_choice import pinned_threads
from protofed.runs.store import checkpoint, verify
from protofed.transforms.stage import Exchange, Uploads
from protofed.tree import Tree

Kind = Literal["exact", "differs", "further"]


@dataclass(frozen=True)
class Sent:
    """What one client sent, and what it had received."""

    client: ClientId
    where: str
    """As in messages: `setup`, `round 8`, `finish`."""
    call: int
    """Clients are asked several times in a phase; the number of the call in the replay."""
    message: Tree
    upload: Tree

    @property
    def is_of_round(self) -> bool:
        return self.where.startswith("round ")


@dataclass
class Tap:
    """A stage that changes nothing and keeps a copy of every upload, as the server reads it from the wire."""

    sent: list[Sent] = field(default_factory=list)
    _calls: Iterator[int] = field(default_factory=count)

    def refusal(self, like: Tree, message: Tree, num_classes: int) -> str | None:
        return None

    def cleaned(self, uploads: Uploads, exchange: Exchange) -> Iterator[tuple[ClientId, Tree]]:
        call = next(self._calls)
        for client, upload in uploads:
            copy = tree.map(torch.clone, upload)
            self.sent.append(Sent(client, exchange.where, call, exchange.message_for(client), copy))
            yield client, upload


@dataclass(frozen=True)
class Replay:
    """A round, what was before and after it, and all that was sent."""

    federation: Federation
    before: State
    after: State
    """After the round, and before what the method does at the end of a run."""
    sent: Sequence[Sent]
    kind: Kind
    """`exact`: the state after it is, bit for bit, that of the run's last checkpoint. `differs`: it is not, as on
    another machine. `further`: the state before the last round is not there, so clients trained once more from the
    state after it."""
    difference: float = 0.0
    """The largest difference of a number of the server's state, or of what a client keeps, from the checkpoint's."""

    @property
    def uploads(self) -> dict[int, dict[ClientId, Sent]]:
        """The uploads of the round, by call and client."""
        found: dict[int, dict[ClientId, Sent]] = {}
        for one in self.sent:
            if one.is_of_round:
                found.setdefault(one.call, {})[one.client] = one
        return found

    def server_after(self, change: Callable[[Sent], Tree] = lambda one: one.upload) -> Tree:
        """What the server would know after the round, had clients sent something else."""
        federation = self.federation
        clients = Again(federation, list(self.uploads.values()), change, self.before.round)
        with federation.runtime.open(federation):
            return federation.method.round(self.before.server, clients)


class Again:
    """The clients of a round that has been: what they sent is given out once more, call by call."""

    summing = None

    def __init__(
        self,
        federation: Federation,
        calls: list[dict[ClientId, Sent]],
        change: Callable[[Sent], Tree],
        round: int,
    ) -> None:
        self._federation, self._change = federation, change
        self._calls = iter(calls)
        self.ids: Sequence[ClientId] = list(dict.fromkeys(client for one in calls for client in one))
        self.server: ServerContext = federation.server_context(round, "round")

    def run(
        self,
        step: Any,
        message_for: Callable[[ClientId], Tree],
        like: Tree,
        group: Group[Any] | None = None,
    ) -> Iterator[tuple[ClientId, Tree]]:
        federation, grouped = self._federation, {} if group is None else {"group": group}
        exchange = Exchange(message_for, federation.task.num_classes, **grouped, where="audit")
        given = ((client, self._change(one)) for client, one in next(self._calls).items())
        return untapped(federation).uploads.staged(given, exchange)


def untapped(federation: Federation) -> Federation:
    stages = tuple(stage for stage in federation.uploads.stages if not isinstance(stage, Tap))
    return replace(federation, uploads=replace(federation.uploads, stages=stages))


def replayed(run: SavedRun) -> Replay:
    """The last round of a run, on this machine's CPU."""
    refuse_unfit(run)
    tap, plain = Tap(), run.federation
    uploads = replace(plain.uploads, stages=(tap, *plain.uploads.stages))
    federation = replace(plain, uploads=uploads, name=_name(run))
    last = run.rounds[-1].round
    with pinned_threads(run.config.runtime.threads), _sent_before(run, federation):
        end = _state(run, federation, last)
        federation.start()
        if f"{last - 1:06d}" not in _whole(run):
            return _further(federation, end, tap)
        before = _state(run, federation, last - 1)
        after = federation.advance(before)
        finished = federation.finish(after)
    gap = _difference_of_states(federation, finished, end)  # guard: audit-compares-states
    return Replay(federation, before, after, tap.sent, "differs" if gap else "exact", gap)


def _further(federation: Federation, end: State, tap: Tap) -> Replay:
    """One round more, with the draws of the last one."""
    if federation.private is not None:
        raise BadInput(
            "the state before the last round is not there, and a private run (privacy.level) cannot train once more: "
            "that would release more than its ε"
        )
    before = replace(end, round=end.round - 1)
    return Replay(federation, before, federation.advance(before), tap.sent, "further")


@contextmanager
def _sent_before(run: SavedRun, federation: Federation) -> Iterator[None]:
    """Secret noise cannot be drawn again, so what clients of a private run sent is read from a copy of what they
    kept of it. Simulated noise is drawn again."""
    private = federation.private
    if private is None or private.settings.noise != "secret":
        yield
        return
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(run.folder.privacy, copy, dirs_exist_ok=True)
        private.keep_in(Path(copy))
        yield


def refuse_unfit(run: SavedRun) -> None:
    where = run.folder.path
    if not run.folder.is_done or not run.rounds:
        raise BadInput(f"{where}: the run has not ended; let it go on with --resume, then audit it")
    if run.config.secure.sums:  # guard: audit-needs-uploads
        raise BadInput(
            f"{where}: its server saw sums alone (secure.sums = true), and no upload that could be audited; audit a "
            "run without secure.sums to see what each upload would have told"
        )
    if not _whole(run):
        raise BadInput(f"{where}: none of its checkpoints is whole; put the folder back from a copy")
    receipts = [verify.manifest_of(run.folder.checkpoints, name)["receipts"] for name in _whole(run)]
    if any(receipts):  # guard: audit-needs-states
        raise BadInput(f"{where}: the states and data of its clients are at their sites; audit a simulation of it")
    if not run.federation.task.has_data:  # guard: audit-needs-data
        raise BadInput(f"{where}: the data are not at hand: its task was made in Python, so audit it from Python")


def _difference_of_states(federation: Federation, a: State, b: State) -> float:
    """Of what the server knows, and of what each client keeps."""
    if a.receipts.keys() != b.receipts.keys():
        return float("inf")
    load = federation.runtime.store.load
    kept = (difference(load(client, one), load(client, b.receipts[client])) for client, one in a.receipts.items())
    return max(difference(a.server, b.server), *kept, 0.0)  # guard: audit-compares-memories


def difference(a: Tree, b: Tree) -> float:
    """The largest difference of two numbers at the same place; infinite if places differ. 0 only if all bits that
    count are equal."""
    first, second = tree.named_leaves(a), tree.named_leaves(b)
    if first.keys() != second.keys() or any(first[path].shape != second[path].shape for path in first):
        return float("inf")
    gaps = [(first[path].double() - second[path].double()).abs().max().item() for path in first if first[path].numel()]
    return max(gaps, default=0.0)


def _name(run: SavedRun) -> str:
    """Of the run, by which what was sent before is found."""
    name: str = verify.manifest_of(run.folder.checkpoints, _whole(run)[0])["run"]
    return name


def _whole(run: SavedRun) -> list[str]:
    """The checkpoints that can be read: of a finished run the last two, if nothing has happened to them."""
    folder = run.folder.checkpoints
    return [name for name in verify.numbered(folder) if verify.is_whole(folder, name)]


def _state(run: SavedRun, federation: Federation, round: int) -> State:
    identity = run.config.identity if not run.has_own_objects else None
    return checkpoint.load_round(run.folder.checkpoints, round, federation, identity).state
