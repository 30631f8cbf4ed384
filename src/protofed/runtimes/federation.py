"""The engine: setup, rounds, finish; who takes part, what counts, and what each client remembers."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any

import torch
from annotated_types import Ge, Interval

from protofed import tree, wire
from protofed.errors import BadInput, RunFailed
from protofed.method import Central, ClientId, Local, Method, Reply, Step, Task
from protofed.networks import Networks, Patterns, matching
from protofed.optim import Optimizer, Sgd
from protofed.runtimes.gate import Gate, non_finite
from protofed.runtimes.jobs import Failure, Job, Runtime
from protofed.runtimes.placement import unplaced
from protofed.runtimes.sequential import Sequential
from protofed.seeds import derive_seed, generator
from protofed.tree import Tree

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Traffic:
    """What moved between the server and one client: bytes of tensors, without the names that a wire format adds."""

    down: int = 0
    """Bytes of the messages that the client was sent."""
    up: int = 0
    """Bytes of the uploads that came back and were accepted."""


@dataclass(frozen=True)
class State:
    """Everything that a run is, between two rounds."""

    round: int
    """The number of rounds done."""
    server: Tree
    memories: dict[ClientId, Tree]
    """What each client that has taken part keeps."""
    failures: tuple[Failure, ...] = ()
    """Of the last round, or of the setup if there was none yet."""
    traffic: Mapping[ClientId, Traffic] = field(default_factory=dict)
    """Of the last round, or of the setup if there was none yet."""
    client_seconds: float = 0.0
    """How long the server waited for clients in the last round."""


@dataclass(frozen=True)
class Training:
    """How a federation trains, whatever the method."""

    rounds: Annotated[int, Ge(1)] = 20
    epochs: Annotated[int, Ge(1)] = 5
    """Passes of a client over its data in one round."""
    batch_size: Annotated[int, Ge(1)] = 64
    fraction: Annotated[float, Interval(gt=0, le=1)] = 1.0
    """Share of the clients that take part in a round."""
    minimum_replies: Annotated[int, Ge(1)] = 1
    """A round with fewer good replies ends the run."""
    seed: Annotated[int, Ge(0)] = 0
    """The root of every draw."""
    optimizer: Optimizer = field(default_factory=lambda: Sgd(lr=0.01, momentum=0.9, weight_decay=1e-5))
    """What clients train with; made anew in every round."""


@dataclass(frozen=True)
class Federation:
    method: Method[Any, Any, Any, Any]
    task: Task
    training: Training
    runtime: Runtime = field(default_factory=Sequential)
    on_client: Callable[[ClientId], None] = lambda client: None
    """Told of every client whose step ended."""
    on_trained: Callable[[ClientId, Tree, Reply[Any, Any]], None] = lambda client, message, reply: None
    """Given the message and the reply of every client that trained well in a round, before the server reads it."""
    _networks: dict[ClientId, Networks] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "task", self.runtime.placed(self.task))
        minimum, sampled = self.training.minimum_replies, len(self.sampled(0))
        if minimum > sampled:
            raise BadInput(f"training.minimum_replies is {minimum}, but only {sampled} clients take part in a round")

    def start(self) -> State:
        with self.runtime.open(self):
            clients = Participants(self, State(0, None, {}), self.ids, "setup")
            return clients.after(self.method.setup(self.method.init_server(clients.central), clients))

    def advance(self, state: State) -> State:
        """The state after one more round."""
        with self.runtime.open(self):
            clients = Participants(self, state, self.sampled(state.round), "round")
            state = clients.after(self.method.round(state.server, clients))
            return replace(state, round=state.round + 1)

    def finish(self, state: State) -> State:
        """The state after the method's last word."""
        with self.runtime.open(self):
            clients = Participants(self, state, self.ids, "finish")
            finished = clients.after(self.method.finish(state.server, clients))
        traffic = {
            c: _sum(state.traffic.get(c), finished.traffic.get(c)) for c in {**state.traffic, **finished.traffic}
        }
        return replace(
            finished,
            failures=(*state.failures, *finished.failures),
            traffic=traffic,
            client_seconds=state.client_seconds + finished.client_seconds,
        )

    @cached_property
    def ids(self) -> tuple[ClientId, ...]:
        """All clients, in canonical order."""
        return tuple(sorted(self.task.clients))

    def sampled(self, round: int) -> tuple[ClientId, ...]:
        """Who takes part, in canonical order, drawn from the run's seed and the round alone."""
        count = max(1, round_half_up(self.training.fraction * len(self.ids)))
        if count == len(self.ids):
            return self.ids
        with torch.device("cpu"):
            order = torch.randperm(len(self.ids), generator=generator(self.training.seed, "sample", round))
        return tuple(self.ids[i] for i in sorted(order[:count].tolist()))

    def networks_of(self, client: ClientId) -> Networks:
        """A client's networks; clients with equal ones share them."""
        if client not in self._networks:
            new = Networks(lambda: self.method.networks(self.task, client))
            equal = (n for n in self._networks.values() if n.signature == new.signature)
            self._networks[client] = next(equal, new)
        return self._networks[client]

    def local(self, client: ClientId, round: int, phase: str = "round", run: int = 1) -> Local:
        """What a client's step works with; its place in the run of the federation decides its draws."""
        t = self.training
        return Local(
            client=client,
            round=round,
            num_rounds=t.rounds,
            num_classes=self.task.num_classes,
            networks=self.networks_of(client),
            data=self.task.clients[client],
            transform=self.task.transform,
            optimizer=t.optimizer,
            epochs=t.epochs,
            batch_size=t.batch_size,
            seed=t.seed,
            step_seed=derive_seed(t.seed, "step", client, round, phase, run),
            public=self.task.public,
        )

    def memory_of(self, state: State, client: ClientId, message: Tree) -> Tree:
        """What a client keeps now; made afresh for one that has never taken part."""
        if client in state.memories:
            return state.memories[client]
        return self.method.init_memory(self.local(client, state.round), message)

    def central(self, round: int, phase: str) -> Central:
        t = self.training
        return Central(
            task=self.task,
            networks=self.networks_of(self.ids[0]),
            optimizer=t.optimizer,
            round=round,
            num_rounds=t.rounds,
            seed=t.seed,
            phase_seed=derive_seed(t.seed, phase, round),
            answer=self.runtime.answer,
        )


class Participants:
    """The clients of one round, as a method sees them. What they remember is committed only when the round ends."""

    def __init__(self, federation: Federation, state: State, ids: tuple[ClientId, ...], phase: str) -> None:
        self._federation = federation
        self._state = state
        self._phase = phase
        self._where = f"round {state.round + 1}" if phase == "round" else phase
        self._kept: dict[ClientId, Tree] = {}
        self._failures: list[Failure] = []
        self._traffic: dict[ClientId, Traffic] = {}
        self._seconds = 0.0
        self._runs = 0
        self._unread = 0
        self.ids = ids

    @cached_property
    def central(self) -> Central:
        return self._federation.central(self._state.round, self._phase)

    def run(
        self, step: Step[Any, Any, Any], message_for: Callable[[ClientId], Tree], like: Tree
    ) -> Iterator[tuple[ClientId, Tree]]:
        """Accepted uploads in canonical order, each given out as soon as it and those before it are there. A client
        that has failed in this phase is not asked again."""
        _refuse_private(like, self._federation.method.private)
        self._unread += 1
        self._runs += 1
        run = self._runs
        failed = {failure.client for failure in self._failures}
        ids = tuple(client for client in self.ids if client not in failed)
        sent: dict[ClientId, Tree] = {}
        jobs = (self._job(client, step, sent.setdefault(client, message_for(client)), run) for client in ids)
        is_training = self._phase == "round" and step == self._federation.method.train
        return self._stream(ids, jobs, sent, like, is_training)

    def _stream(
        self, ids: Sequence[ClientId], jobs: Iterable[Job], sent: dict[ClientId, Tree], like: Tree, is_training: bool
    ) -> Iterator[tuple[ClientId, Tree]]:
        good, failed_before = 0, len(self._failures)
        gate = Gate(like, self._federation.task.num_classes)
        for client, outcome in in_order(ids, self._timed(self._federation.runtime.run(jobs))):
            with unplaced():
                message, upload = sent.pop(client), self._accepted(client, outcome, gate)
                moved = Traffic(wire.num_bytes(message), 0 if upload is None else wire.num_bytes(upload))
                self._traffic[client] = _sum(self._traffic.get(client), moved)
            self._federation.on_client(client)
            if upload is not None:
                good += 1
                if is_training:
                    self._federation.on_trained(client, message, outcome)
                yield client, upload
        self._unread -= 1
        self._require_enough(good, self._failures[failed_before:])

    def after(self, server: Tree) -> State:
        """The state that the phase ends in."""
        if self._unread:
            raise RunFailed(f"{self._where}: the method did not read all uploads; aggregate must read them to the end")
        _refuse_change(self._state.server, server, "server")
        memories = {**self._state.memories, **self._kept}
        return State(self._state.round, server, memories, tuple(self._failures), self._traffic, self._seconds)

    def _timed(self, outcomes: Iterator[tuple[ClientId, Any]]) -> Iterator[tuple[ClientId, Any]]:
        """The outcomes, and a note of how long they were waited for."""
        while True:
            begin = time.perf_counter()
            found = next(outcomes, None)
            self._seconds += time.perf_counter() - begin
            if found is None:
                return
            yield found

    def _job(self, client: ClientId, step: Step[Any, Any, Any], message: Tree, run: int) -> Job:
        local = self._federation.local(client, self._state.round, self._phase, run)
        memory = self._kept.get(client, self._state.memories.get(client))
        return Job(client, step, local, message, memory, self._federation.method.init_memory)

    def _accepted(self, client: ClientId, outcome: Reply[Any, Any] | Failure, gate: Gate[Any]) -> Tree | None:
        """The upload if it counts; a failed client keeps what it had."""
        if isinstance(outcome, Reply):
            upload = gate.admitted(client, outcome.upload)
            failure = upload if isinstance(upload, Failure) else non_finite(client, outcome.memory)
            if failure is None:
                _refuse_change(self._state.memories.get(client), outcome.memory, f"memory of {client}")
                self._kept[client] = outcome.memory
                return upload
            outcome = failure
        log.warning("%s: client %s left out: %s: %s", self._where, client, outcome.reason, outcome.detail)
        self._failures.append(outcome)
        return None

    def _require_enough(self, good: int, failures: Sequence[Failure]) -> None:
        minimum = self._federation.training.minimum_replies
        if good < minimum:
            first = "".join(f" The first failure: {f.client}: {f.reason}: {f.detail}." for f in failures[:1])
            raise RunFailed(
                f"{self._where}: {good} of {len(self.ids)} clients replied well, and the run needs {minimum}.{first}"
            )


def _sum(a: Traffic | None, b: Traffic | None) -> Traffic:
    a, b = a or Traffic(), b or Traffic()
    return Traffic(a.down + b.down, a.up + b.up)


def _refuse_change(before: Tree | None, after: Tree, what: str) -> None:
    """A record that changes its structure could be saved but not be loaded."""
    if before is not None:
        changed = sorted(tree.named_leaves(before).keys() ^ tree.named_leaves(after).keys())
        if changed:
            raise RunFailed(f"the method changed the structure of the {what}: {', '.join(changed)} came or went")


def _refuse_private(like: Tree, private: Patterns) -> None:
    """A method that asks for what it calls private is wrong about one of the two."""
    asked = [path.rpartition("/")[2] for path in tree.named_leaves(like)]
    leaked = matching(dict.fromkeys(asked, torch.empty(0)), private) if private else {}
    names = {name for name in leaked if "." in name}  # entries of Params, not fields of records
    if names:
        raise RunFailed(
            f"the method calls {', '.join(private)} private, but its uploads hold {', '.join(sorted(names))}"
        )


def in_order(ids: Sequence[ClientId], outcomes: Iterable[tuple[ClientId, Any]]) -> Iterator[tuple[ClientId, Any]]:
    """Outcomes in the order of `ids`, whatever order they arrive in; those that came early wait."""
    early: dict[ClientId, Any] = {}
    awaited, waiting = set(ids), iter(ids)
    client = next(waiting, None)
    for arrived, outcome in outcomes:
        if arrived not in awaited:
            raise RunFailed(f"the runtime gave back client {arrived} twice, or without being asked")
        awaited.remove(arrived)
        early[arrived] = outcome
        while client is not None and client in early:
            yield client, early.pop(client)
            client = next(waiting, None)
    if client is not None:
        raise RunFailed(f"the runtime lost client {client}: it gave back neither a reply nor a failure")


def round_half_up(value: float) -> int:
    return int(value + 0.5)
