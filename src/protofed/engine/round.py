"""The clients of one round, as a method sees them: asked, awaited, checked, and what they remember kept."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any

import torch

from protofed import tree, wire
from protofed.api.contexts import Reply, ServerContext
from protofed.api.method import Step
from protofed.api.task import ClientId
from protofed.engine.collector import Collector
from protofed.engine.message import WireMessage
from protofed.engine.state import State, Traffic
from protofed.engine.upload_validation import UploadValidator, non_finite
from protofed.errors import RoundAbandoned, RunFailed
from protofed.nn.networks import Patterns, matching
from protofed.optim.optimizers import halved
from protofed.runtimes.base import TROUBLES, Failure, Job, Reason, Ticket
from protofed.runtimes.device import unplaced
from protofed.tree import Nothing, Tree

if TYPE_CHECKING:
    from protofed.engine.federation import Federation

log = logging.getLogger(__name__)

MOST_HALVINGS = 5
"""A client that diverges at a 32nd of its learning rate is left out."""


class RoundClients:
    """The clients of one round, as a method sees them. What they remember is committed only when the round ends."""

    def __init__(self, federation: "Federation", state: State, ids: tuple[ClientId, ...], phase: str) -> None:
        self._federation = federation
        self._state = state
        self._phase = phase
        self._where = f"round {state.round + 1}" if phase == "round" else phase
        self._deadline = time.monotonic() + (federation.training.deadline or inf)  # guard: monotonic-deadlines
        self._kept: dict[ClientId, Tree] = {}
        self._good: set[ClientId] = set()
        self._failures: list[Failure] = []
        self._refused: Counter[str] = Counter()
        self._repeats: dict[ClientId, int] = {}
        self._traffic: dict[ClientId, Traffic] = {}
        self._seconds = 0.0
        self._runs = 0
        self._unread = 0
        self.ids = ids

    @cached_property
    def server(self) -> ServerContext:
        return self._federation.server_context(self._state.round, self._phase)

    def run(
        self, step: Step[Any, Any, Any], message_for: Callable[[ClientId], Tree], like: Tree
    ) -> Iterator[tuple[ClientId, Tree]]:
        """Accepted uploads in canonical order, each given out as soon as it and those before it are there. A client
        that has failed in this phase is not asked again."""
        _refuse_private(like, self._federation.method.private)
        self._unread += 1
        self._runs += 1
        failed = {failure.client for failure in self._failures}
        ids = tuple(client for client in self.ids if client not in failed)
        gate = UploadValidator(like, self._federation.limits)
        ticket = Ticket(self._federation.name, self._state.round, self._phase, self._runs, gate.model)
        return self._stream(_Call(ticket, ids, step, message_for, gate))

    def _stream(self, call: "_Call") -> Iterator[tuple[ClientId, Tree]]:
        federation, good, failed_before = self._federation, 0, len(self._failures)
        is_training = self._phase == "round" and call.step == federation.method.train
        for client, outcome in self._outcomes(call, call.ids, self._jobs(call)):
            outcome = self._settled(client, outcome, call)
            with unplaced():
                message, upload = call.sent.pop(client, Nothing()), self._accepted(client, outcome, call.gate)
                moved = Traffic(wire.num_bytes(message), 0 if upload is None else wire.num_bytes(upload))
                self._traffic[client] = self._traffic.get(client, Traffic()) + moved
            federation.on_client(client)
            if upload is not None:
                good += 1
                if is_training and isinstance(outcome, Reply):
                    federation.on_trained(client, message, outcome)
                yield client, upload
        self._unread -= 1
        self._require_enough(good, self._failures[failed_before:])

    def _outcomes(self, call: "_Call", ids: Sequence[ClientId], jobs: Iterable[Job]) -> Iterator[tuple[ClientId, Any]]:
        inbox = Collector(ids, call.ticket, call.gate.bounds, self._deadline, call.sent.__contains__)
        yield from inbox.sorted(self._timed(self._federation.runtime.run(jobs)))
        self._note(inbox.refused)  # guard: refusals-messages-counted

    def _jobs(self, call: "_Call") -> Iterator[Job]:
        """What there is to do, for as long as there is time."""
        for client in call.ids:
            if time.monotonic() > self._deadline:  # guard: nobody-asked-after-deadline
                return  # guard: nobody-asked-after-deadline
            call.sent[client] = call.message_for(client)
            yield self._job(client, call)

    def _settled(self, client: ClientId, outcome: Any, call: "_Call") -> Any:
        """What came of a client in the end: one that diverged may be asked again, more gently."""
        halvings, policy = 0, self._federation.training.on_divergence
        while isinstance(outcome, Failure) and outcome.reason == Reason.DIVERGED and policy != "skip":
            if policy == "stop":
                raise RunFailed(self._divergence(outcome))
            if halvings == MOST_HALVINGS:
                break
            halvings += 1
            log.warning("%s: client %s diverged, again with 1/%d of its learning rate: %s",
                        self._where, client, 2**halvings, outcome.detail)  # fmt: skip
            self._repeats[client] = halvings
            ((_, outcome),) = self._outcomes(call, [client], [self._job(client, call, halvings)])
        return outcome

    def _divergence(self, failure: Failure) -> str:
        method = type(self._federation.method).__name__
        return (
            f"{self._where}: client {failure.client} diverged with {method}: {failure.detail}. "
            'Lower the learning rate, or set training.on_divergence to "retry_half_lr" or "skip"; '
            "what was saved is intact"
        )

    def after(self, server: Tree) -> State:
        """The state that the phase ends in."""
        if self._unread:
            raise RunFailed(f"{self._where}: the method did not read all uploads; aggregate must read them to the end")
        _refuse_change(self._state.server, server, "server")
        bad = non_finite(server)
        if bad:  # guard: server-s-state-finite
            raise RunFailed(f"{self._where}: the server's {bad} is not finite; what was saved is intact")
        return State(
            self._state.round,
            server,
            self._state.memories | self._kept,
            tuple(self._failures),
            self._traffic,
            self._seconds,
            strikes=self._strikes(),
            refused=dict(sorted(self._refused.items())),
            repeats=self._repeats,
        )

    def _strikes(self) -> dict[ClientId, int]:
        """With this phase's refusals; a good upload makes up for all."""
        # guard: troubles-no-strikes
        struck = {failure.client for failure in self._failures if failure.reason not in TROUBLES}
        # guard: good-upload-makes-up-for-refusals
        counted = {client: count for client, count in self._state.strikes.items() if client not in self._good - struck}
        new = {client: counted.get(client, 0) + 1 for client in sorted(struck)}
        for client, count in new.items():
            if count == self._federation.training.quarantine:  # guard: quarantine-logged
                log.warning("%s: client %s is in quarantine: %d of its uploads in a row were refused",
                            self._where, client, count)  # fmt: skip
        return counted | new

    def _timed(self, outcomes: Iterator[tuple[ClientId, Any]]) -> Iterator[tuple[ClientId, Any]]:
        """The outcomes, and a note of how long they were waited for."""
        while True:
            begin = time.perf_counter()
            found = next(outcomes, None)
            self._seconds += time.perf_counter() - begin
            if found is None:
                return
            yield found

    def _job(self, client: ClientId, call: "_Call", halvings: int = 0) -> Job:
        federation, state = self._federation, self._state
        local = federation.client_context(client, state.round, self._phase, call.ticket.call)
        if halvings:
            local = replace(local, optimizer=halved(local.optimizer, halvings))
        memory = self._kept.get(client, state.memories.get(client))  # guard: client-gets-own-memory
        message, init_memory = call.sent[client], federation.method.init_memory
        return Job(client, call.step, local, message, memory, init_memory, self._deadline, call.ticket)

    def _accepted(
        self, client: ClientId, outcome: Reply[Any, Any] | WireMessage | Failure, gate: UploadValidator[Any]
    ) -> Tree | None:
        """The upload if it counts; a failed client keeps what it had."""
        if not isinstance(outcome, Failure):
            # guard: memory-kept-only-accepted-uploads
            upload = gate.admitted(client, outcome.upload if isinstance(outcome, Reply) else outcome)
            if not isinstance(upload, Failure):
                bad = non_finite(outcome.memory) if isinstance(outcome, Reply) else ""  # guard: what-remembered-finite
                if not bad:
                    self._keep(client, outcome)
                    return upload
                upload = Failure(client, Reason.NON_FINITE, f"its memory, {bad}, holds values that are not finite")
            outcome = upload
        log.warning("%s: client %s left out: %s: %s", self._where, client, outcome.reason, outcome.detail)
        self._failures.append(outcome)
        self._refused[outcome.reason] += 1  # guard: refusals-clients-counted
        return None

    def _keep(self, client: ClientId, outcome: Reply[Any, Any] | WireMessage) -> None:
        """What a client remembers; one at the other end of a wire keeps it itself."""
        self._good.add(client)
        if isinstance(outcome, Reply):
            _refuse_change(self._state.memories.get(client), outcome.memory, f"memory of {client}")
            self._kept[client] = outcome.memory  # guard: memories-committed-when-round-ends

    def _note(self, refused: Sequence[Failure]) -> None:
        """Messages that were thrown away without their client being left out."""
        for failure in refused:
            log.warning("%s: a message of client %s refused: %s: %s",
                        self._where, failure.client, failure.reason, failure.detail)  # fmt: skip
            self._refused[failure.reason] += 1

    def _require_enough(self, good: int, failures: Sequence[Failure]) -> None:
        minimum = self._federation.training.minimum_replies
        if good < minimum:  # guard: too-few-replies-abandon-round, as-many-replies-as-needed-enough
            first = "".join(f" The first failure: {f.client}: {f.reason}: {f.detail}." for f in failures[:1])
            raise RoundAbandoned(
                f"{self._where}: {good} of {len(self.ids)} clients replied well, and the run needs {minimum}.{first}"
            )


@dataclass(frozen=True)
class _Call:
    """One time that the clients of a phase are asked."""

    ticket: Ticket
    ids: tuple[ClientId, ...]
    step: Step[Any, Any, Any]
    message_for: Callable[[ClientId], Tree]
    gate: UploadValidator[Any]
    sent: dict[ClientId, Tree] = field(default_factory=dict)
    """The messages of those that were asked and have not been heard of."""


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
