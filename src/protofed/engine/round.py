"""The clients of one round, as a method sees them: asked, awaited, and their uploads checked."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import fsum, inf
from typing import TYPE_CHECKING, Any

from protofed import wire
from protofed.api.contexts import ServerContext
from protofed.api.evaluation import Evaluation, evaluation_spec
from protofed.api.method import Group, Step, Summing
from protofed.api.task import ClientId
from protofed.engine.around import unwrapped
from protofed.engine.collector import Collector
from protofed.engine.message import WireMessage
from protofed.engine.state import State, Traffic
from protofed.engine.upload_validation import UploadValidator, out_of_reach_of_groups, refuse_private
from protofed.errors import RoundAbandoned, RunFailed
from protofed.optim.optimizers import halved
from protofed.runtimes.client_store import Receipt
from protofed.runtimes.device import unplaced
from protofed.runtimes.jobs import (
    NOT_THE_CLIENTS_FAULT,
    Answer,
    Evaluated,
    Failure,
    Job,
    Reason,
    TestKind,
    Ticket,
    non_finite,
    refuse_change,
)
from protofed.transforms.stage import Exchange
from protofed.tree import Nothing, Tree

if TYPE_CHECKING:
    from protofed.engine.federation import Federation

log = logging.getLogger(__name__)

MOST_HALVINGS = 5
"""A client that diverges at a 32nd of its learning rate is left out."""


class RoundClients:
    """The clients of one round, as a method sees them. The receipts of their new states enter the server's state only
    when the round ends."""

    def __init__(
        self, federation: "Federation", state: State, ids: tuple[ClientId, ...], phase: str, evaluates: bool = False
    ) -> None:
        self._federation = federation
        self._state = state
        self._phase = phase
        self._where = f"round {state.round + 1}" if phase == "round" else phase
        seconds = inf if phase == "evaluate" else federation.training.deadline or inf
        self._deadline = time.monotonic() + seconds  # guard: monotonic-deadlines
        self._evaluates = evaluates
        self._receipts: dict[ClientId, Receipt] = {}
        self._evaluations: dict[ClientId, Evaluation] = {}
        self._good: set[ClientId] = set()
        self._failures: list[Failure] = []
        self._refused: Counter[str] = Counter()
        self._repeats: dict[ClientId, int] = {}
        self._traffic: dict[ClientId, Traffic] = {}
        self._losses: dict[ClientId, float] = {}
        self._seconds = 0.0
        self._runs = 0
        self._questions = 0  # where a question takes several runs
        self._unread = 0
        self.ids = ids

    @cached_property
    def server(self) -> ServerContext:
        return self._federation.server_context(self._state.round, self._phase)

    def run(
        self,
        step: Step[Any, Any, Any],
        message_for: Callable[[ClientId], Tree],
        like: Tree,
        group: Group[Any] | None = None,
        tests: TestKind = "none",
    ) -> Iterator[tuple[ClientId, Tree]]:
        """Accepted uploads in canonical order, each given out as soon as it and those before it are there. A client
        that has failed in this phase is not asked again."""
        federation = self._federation
        refuse_private(like, federation.method.private)
        self._unread += 1
        self._runs += 1
        failed = {failure.client for failure in self._failures}
        ids = tuple(client for client in self.ids if client not in failed)
        trains = self._phase == "round" and step == federation.method.train
        evaluates = self._evaluates and trains
        sent = federation.uploads.spec(like)
        upload_bytes = wire.num_bytes(sent)
        if evaluates:
            tests = "all"
            sent = Evaluated(sent, evaluation_spec(federation.test_sets(self.ids[0]), federation.task.num_classes))
        validator = UploadValidator(sent, federation.limits)
        calls = self._runs, validator.model, self._questions or self._runs
        ticket = Ticket(federation.name, self._state.round, self._phase, *calls)
        grouped = {} if group is None else {"group": group}
        exchange = Exchange(message_for, federation.task.num_classes, **grouped, where=self._where)
        call = _Call(ticket, ids, step, exchange, like, validator, tests, trains, evaluates, upload_bytes)
        if self._phase == "evaluate":
            return self._stream(call)
        return federation.uploads.staged(self._stream(call), exchange)

    @property
    def summing(self) -> Summing | None:
        """Uploads are given one by one."""
        return None

    @property
    def failures(self) -> Sequence[Failure]:
        """Of the clients that were left out so far."""
        return self._failures

    def _stream(self, call: "_Call") -> Iterator[tuple[ClientId, Tree]]:
        federation, good, failed_before = self._federation, 0, len(self._failures)
        counted, size = None, 0  # clients are often sent the same message
        for client, outcome, message, checked in self._compared(call, self._checked(call)):
            with unplaced():
                upload = self._accepted(client, outcome, checked, call)
                if message is not counted:
                    counted, size = message, wire.num_bytes(message)
                moved = Traffic(size, 0 if upload is None else call.upload_bytes)
                self._traffic[client] = self._traffic.get(client, Traffic()) + moved
            if upload is not None:
                good += 1
                yield client, federation.uploads.decoded(upload, call.like)
        self._unread -= 1
        self._require_enough(good, self._failures[failed_before:])

    def _checked(self, call: "_Call") -> "Iterator[_Reply]":
        """What came of each client, what it was sent, and its upload or what is wrong with it by itself."""
        for client, outcome in self._outcomes(call, call.ids, self._jobs(call)):
            outcome = self._retried(client, outcome, call)
            with unplaced():
                message = call.sent.pop(client, Nothing())
                checked = outcome
                if not isinstance(outcome, Failure):
                    sent = outcome.upload if isinstance(outcome, Answer) else outcome
                    checked = call.validator.validated(client, sent)
            if self._phase != "evaluate":
                self._federation.on_client(client)
            yield client, outcome, message, checked

    def _compared(self, call: "_Call", replies: "Iterator[_Reply]") -> "Iterator[_Reply]":
        """The same, with what is wrong with an upload beside the others of its round. If any could be, all are awaited
        first."""
        reach = self._federation.uploads.reach
        if self._phase == "evaluate" or not reach.compares(call.like):
            yield from replies
            return
        waiting = list(replies)
        good = [
            (client, self._federation.uploads.decoded(_upload_of(checked), call.like))
            for client, _, _, checked in waiting
            if not isinstance(checked, Failure)
        ]
        with unplaced():
            failures = out_of_reach_of_groups(good, call.exchange, reach)
        for client, outcome, message, checked in waiting:
            yield client, outcome, message, failures.get(client, checked)

    def _outcomes(self, call: "_Call", ids: Sequence[ClientId], jobs: Iterable[Job]) -> Iterator[tuple[ClientId, Any]]:
        collector = Collector(ids, call.ticket, call.validator.bounds, self._deadline, call.sent.__contains__)
        yield from collector.sorted(self._timed(self._answers(call, jobs)))
        self._note(collector.refused)  # guard: refusals-messages-counted

    def _answers(self, call: "_Call", jobs: Iterable[Job]) -> Iterator[tuple[ClientId, Any]]:
        federation, run = self._federation, self._federation.runtime.run
        if federation.private is None or not call.trains:
            return run(jobs)
        return federation.private.sent(federation, run, jobs, federation.uploads.spec(call.like))

    def _jobs(self, call: "_Call") -> Iterator[Job]:
        """What there is to do, for as long as there is time."""
        for client in call.ids:
            if time.monotonic() > self._deadline:  # guard: nobody-asked-after-deadline
                return  # guard: nobody-asked-after-deadline
            call.sent[client] = call.exchange.message_for(client)
            yield self._job(client, call)

    def _retried(self, client: ClientId, outcome: Any, call: "_Call") -> Any:
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
        method = type(unwrapped(self._federation.method)).__name__
        return (
            f"{self._where}: client {failure.client} diverged with {method}: {failure.detail}. "
            'Lower the learning rate, or set training.on_divergence to "retry_half_lr" or "skip"; '
            "what was saved is intact"
        )

    def after(self, server: Tree) -> State:
        """The state that the phase ends in."""
        if self._unread:
            raise RunFailed(f"{self._where}: the method did not read all uploads; aggregate must read them to the end")
        refuse_change(self._state.server, server, "server")
        bad = non_finite(server)
        if bad:  # guard: server-s-state-finite
            raise RunFailed(f"{self._where}: the server's {bad} is not finite; what was saved is intact")
        return State(
            self._state.round,
            server,
            {**self._state.receipts, **self._receipts},
            tuple(self._failures),
            self._traffic,
            self._seconds,
            strikes=self._strikes(),
            refused=dict(sorted(self._refused.items())),
            repeats=self._repeats,
            evaluations=self._evaluations,
            loss=self._mean_loss(),
        )

    def _mean_loss(self) -> float | None:
        """Over the clients that trained, weighted by their examples."""
        sizes = {client: self._federation.task.spec.clients[client].num_examples for client in self._losses}
        total = sum(sizes.values())
        return fsum(sizes[client] / total * loss for client, loss in self._losses.items()) if total else None

    def _strikes(self) -> dict[ClientId, int]:
        """With this phase's refusals; a good upload makes up for all."""
        # guard: troubles-no-strikes
        struck = {failure.client for failure in self._failures if failure.reason not in NOT_THE_CLIENTS_FAULT}
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
        tests = federation.test_sets(client, call.tests)
        context = federation.client_context(client, state.round, self._phase, call.ticket.question, tests)
        if halvings:
            context = replace(context, optimizer=halved(context.optimizer, halvings), halvings=halvings)
        return Job(
            client,
            call.step,
            context,
            call.sent[client],
            self._receipts.get(client, state.receipts.get(client)),  # guard: client-gets-own-memory
            federation.method,
            call.tests,
            call.evaluates,
            federation.encoded,
            self._deadline,
            call.ticket,
            call.validator.bounds.total,
        )

    def _accepted(
        self, client: ClientId, outcome: Answer | WireMessage | Failure, checked: Tree | Failure, call: "_Call"
    ) -> Tree | None:
        """The upload if it counts; a failed client keeps the state that it had."""
        # guard: memory-kept-only-accepted-uploads
        if not isinstance(outcome, Failure) and not isinstance(checked, Failure):
            self._good.add(client)
            if outcome.loss is not None and call.trains:
                self._losses[client] = outcome.loss
            if outcome.receipt is not None:
                self._receipts[client] = outcome.receipt  # guard: memories-committed-when-round-ends
            if isinstance(checked, Evaluated):
                self._evaluations[client] = checked.evaluation
            return _upload_of(checked)
        log.warning("%s: client %s left out: %s: %s", self._where, client, checked.reason, checked.detail)
        self._failures.append(checked)
        self._refused[checked.reason] += 1  # guard: refusals-clients-counted
        return None

    def _note(self, refused: Sequence[Failure]) -> None:
        """Messages that were thrown away without their client being left out."""
        for failure in refused:
            log.warning("%s: a message of client %s refused: %s: %s",
                        self._where, failure.client, failure.reason, failure.detail)  # fmt: skip
            self._refused[failure.reason] += 1

    def _require_enough(self, good: int, failures: Sequence[Failure]) -> None:
        minimum = 1 if self._phase == "evaluate" else self._federation.training.minimum_replies
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
    exchange: Exchange
    like: Tree
    """An upload as the method reads it."""
    validator: UploadValidator[Any]
    """Of uploads as they are sent."""
    tests: TestKind
    trains: bool
    """Whether it is the round's training."""
    evaluates: bool
    upload_bytes: int
    """Of every accepted upload: all have the types and shapes that were asked for."""
    sent: dict[ClientId, Tree] = field(default_factory=dict)
    """The messages of those that were asked and have not been heard of."""


_Reply = tuple[ClientId, Answer | WireMessage | Failure, Tree, Tree | Failure]


def _upload_of(checked: Tree) -> Tree:
    """A good upload as it was sent, without the evaluation that came with it."""
    return checked.upload if isinstance(checked, Evaluated) else checked
