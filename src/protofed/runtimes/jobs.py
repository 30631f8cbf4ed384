"""What the engine hands to a runtime, and what comes back."""

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from math import fsum, inf
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from protofed import tree, wire
from protofed.api.contexts import ClientContext, Reply
from protofed.api.evaluation import Evaluation, TestSets
from protofed.api.method import Method, Step
from protofed.api.private import KINDS, BudgetSpent, Charge, Unreleased
from protofed.api.requests import Request
from protofed.api.task import ClientId, Task
from protofed.data.batches import Data
from protofed.errors import RunFailed
from protofed.nn.networks import Networks
from protofed.runtimes.client_store import ClientStore, Receipt, StateLost
from protofed.runtimes.determinism import advice, is_not_deterministic
from protofed.runtimes.device import unplaced
from protofed.runtimes.divergence import Diverged
from protofed.runtimes.isolation import let_pass
from protofed.tree import Tree, record


class Reason(StrEnum):
    """Why a client's reply did not count. The names are stable."""

    CLIENT_ERROR = "CLIENT_ERROR"
    DIVERGED = "DIVERGED"
    LATE = "LATE"
    MEMORY_LOST = "MEMORY_LOST"
    REFUSED_BY_SITE = "REFUSED_BY_SITE"
    BUDGET_SPENT = "BUDGET_SPENT"
    UNRELEASED = "UNRELEASED"

    UNDECODABLE = "UNDECODABLE"
    TOO_LARGE = "TOO_LARGE"
    WRONG_RUN = "WRONG_RUN"
    STALE_ROUND = "STALE_ROUND"
    WRONG_MODEL = "WRONG_MODEL"
    DUPLICATE = "DUPLICATE"

    KEY_MISSING = "KEY_MISSING"
    KEY_UNEXPECTED = "KEY_UNEXPECTED"
    SHAPE_MISMATCH = "SHAPE_MISMATCH"
    DTYPE_MISMATCH = "DTYPE_MISMATCH"
    NON_FINITE = "NON_FINITE"
    NORM_TOO_LARGE = "NORM_TOO_LARGE"
    UNKNOWN_CLASS = "UNKNOWN_CLASS"
    NEGATIVE_COUNT = "NEGATIVE_COUNT"
    NON_INTEGER_COUNT = "NON_INTEGER_COUNT"
    COUNT_TOO_LARGE = "COUNT_TOO_LARGE"
    PROTO_WITHOUT_COUNT = "PROTO_WITHOUT_COUNT"
    NEGATIVE_VARIANCE = "NEGATIVE_VARIANCE"
    BELOW_MIN_COUNT = "BELOW_MIN_COUNT"
    PROTO_TOO_LARGE = "PROTO_TOO_LARGE"
    UPDATE_TOO_LARGE = "UPDATE_TOO_LARGE"
    CHANGED_SHARED = "CHANGED_SHARED"


NOT_THE_CLIENTS_FAULT = {
    *(Reason.CLIENT_ERROR, Reason.DIVERGED, Reason.LATE, Reason.MEMORY_LOST, Reason.REFUSED_BY_SITE),
    *(Reason.BUDGET_SPENT, Reason.UNRELEASED),
    *(Reason.STALE_ROUND, Reason.DUPLICATE),
}
"""Failures that are not the client's fault. All other reasons are found in what it sent or did."""


@dataclass(frozen=True)
class Failure:
    client: ClientId
    reason: Reason
    detail: str
    is_killed: bool = field(default=False, compare=False)
    """Whether a signal ended the process that worked for the client."""


@dataclass(frozen=True)
class Ticket:
    """What a message answers."""

    run: str
    round: int
    phase: str
    call: int
    """Of the phase: a method may ask its clients several times."""
    model: str
    """The digest of what was asked for, names, types and shapes."""
    question: int
    """Of the phase, as the method counts: a secure sum is one question in several calls. A client's draws go by it."""


TestKind = Literal["none", "domains", "own", "all", "validation", "home"]
"""No test sets, those of the domains, the client's own, or both; or the client's validation examples; or its own test
set as if it was that of a domain, so that counts travel."""

NO_TICKET = Ticket("", 0, "", 0, "", 0)


@record
class Evaluated:
    """An upload together with how its client's new model does."""

    upload: Tree
    evaluation: Evaluation


@dataclass(frozen=True)
class Job:
    """One step at one client."""

    client: ClientId
    step: Step[Any, Any, Any]
    context: ClientContext
    message: Tree
    receipt: Receipt | None
    """Of the state that the client goes on from; None for a client that has never taken part."""
    method: Method[Any, Any, Any, Any]
    tests: TestKind = "none"
    """The test sets that the step sees."""
    evaluates: bool = False
    """Whether the client judges the model that it has trained: then its upload is an `Evaluated`."""
    encode: Callable[[Tree, Data], Tree] = lambda upload, data: upload
    """What is done to the upload of a client with these examples before it leaves the client."""
    deadline: float = inf
    """On the monotonic clock: nobody waits for the reply any longer."""
    ticket: Ticket = NO_TICKET
    """For runtimes whose clients are elsewhere: what they must say that they answer."""
    most_bytes: int = 0
    """For the same: more than any good reply has, as a wire message."""

    def memory(self, store: ClientStore) -> Tree:
        """What the client remembers when the step begins."""
        if self.receipt is not None:
            return store.load(self.client, self.receipt)
        memory = self.method.init_memory(self.context, self.message)
        with unplaced():
            for path, leaf in tree.named_leaves(memory).items():
                if why := wire.unfit(leaf):  # guard: first-memory-of-tensors
                    raise TypeError(f"the first memory of {self.client}: {path} {why}")
        return memory

    async def start(self, memory: Tree) -> Reply[Any, Any]:
        """The step, and what follows it at the client."""
        reply = await self.step(self.context, self.message, memory)
        if not isinstance(reply, Reply):
            raise TypeError(f"a step ends with a Reply, not with {type(reply).__name__}")
        upload, loss = self.encode(reply.upload, self.context.data), self.context.main.loss
        told = None if loss is None else torch.tensor(loss, dtype=torch.float64, device="cpu")
        spent = spent_by(self.context.charges)
        if not self.evaluates:
            return Reply(upload, reply.memory, told, spent)
        params = self.method.trained_weights(reply.upload, reply.memory)
        evaluation = await self.method.evaluate(self.context, params, self.message, reply.memory)
        return Reply(Evaluated(upload, evaluation), reply.memory, told, spent)

    def finished(self, reply: Reply[Any, Any], before: Tree, store: ClientStore) -> "Answer | Failure":
        """What the server is given: the upload, and a receipt of what the client keeps."""
        loss = None if reply.loss is None else reply.loss.item()
        charges = charged(reply.spent)
        if self.receipt is not None and reply.memory is before:  # as after an evaluation
            return Answer(reply.upload, self.receipt, loss, charges)
        try:
            with unplaced():
                found = _bad_memory(reply.memory, before)
            is_same = not found and self.receipt is not None and self._is_unchanged(before, reply.memory)
        except Exception as error:  # whatever a memory is, it is its client's
            let_pass(error)
            return failure_of(self.client, error)
        if found:
            return Failure(self.client, *found)
        receipt = self.receipt if is_same else store.keep(self.client, reply.memory)
        return Answer(reply.upload, receipt, loss, charges)

    def _is_unchanged(self, before: Tree, after: Tree) -> bool:
        """Whether a step at the end of a run left its client's state as it was, if only a copy came back."""
        return self.ticket.phase == "finish" and all(map(torch.equal, tree.leaves(before), tree.leaves(after)))


@dataclass(frozen=True)
class Answer:
    """What came of a step."""

    upload: Tree
    receipt: Receipt | None
    """Of what the client keeps from now on, if the round counts."""
    loss: float | None = None
    """The mean loss of its main training, if it trained."""
    charges: tuple[Charge, ...] = ()
    """What it released under differential privacy."""


def spent_by(charges: Sequence[Charge]) -> torch.Tensor | None:
    """Charges as they travel: releases and costs, by kind."""
    if not charges:
        return None
    of_kind = [[charge for charge in charges if charge.kind == kind] for kind in KINDS]
    rows = [[float(sum(c.releases for c in own)), fsum(c.cost for c in own)] for own in of_kind]
    return torch.tensor(rows, dtype=torch.float64, device="cpu")


def charged(spent: torch.Tensor | None) -> tuple[Charge, ...]:
    if spent is None:
        return ()
    return tuple(Charge(kind, int(n), cost) for kind, (n, cost) in zip(KINDS, spent.tolist(), strict=True) if n)


Outcome = tuple[ClientId, "Answer | Failure"]


class Host(Protocol):
    """What a runtime knows of the federation that it works for."""

    @property
    def method(self) -> Method[Any, Any, Any, Any]: ...

    @property
    def task(self) -> Task: ...

    @property
    def ids(self) -> Sequence[ClientId]: ...

    def networks_of(self, client: ClientId) -> Networks: ...

    def client_context(self, client: ClientId, round: int, phase: str = ..., run: int = ...) -> ClientContext: ...

    def test_sets(self, client: ClientId, kind: "TestKind") -> TestSets: ...

    def encoded(self, upload: Tree, data: Data) -> Tree: ...


class Runtime(Protocol):
    store: ClientStore
    """Where the states of its clients are."""

    @property
    def device(self) -> torch.device:
        """Where a federation's tensors live."""

    def open(self, host: Host) -> AbstractContextManager[None]:
        """Makes ready to work for a federation, which does all it does within this; entered again for every phase."""

    def close(self) -> None:
        """Gives back what it holds; a later `open` makes it ready again."""

    def placed(self, task: Task) -> Task:
        """The task with its data where this runtime wants them."""

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Does the jobs and gives back each client's answer or failure, in any order."""

    def answers(self, requests: Sequence[Request[Any]]) -> list[Any]:
        """Does what independent requests ask."""

    def for_server(self) -> Callable[[Request[Any]], Any]:
        """Answers the server's own requests. No client's data can be reached from it."""


def failure_of(client: ClientId, error: BaseException) -> Failure:
    """The failure that an exception at a client amounts to, with the place that raised it. What the device cannot do
    for any client ends the run."""
    if is_not_deterministic(error):  # guard: not-deterministic-ends-run
        raise RunFailed(f"client {client}: {advice(error)}") from error
    if isinstance(error, Diverged):
        return Failure(client, Reason.DIVERGED, str(error))
    if isinstance(error, StateLost):
        return Failure(client, Reason.MEMORY_LOST, str(error))
    if isinstance(error, BudgetSpent | Unreleased):
        reason = Reason.BUDGET_SPENT if isinstance(error, BudgetSpent) else Reason.UNRELEASED
        return Failure(client, reason, str(error))
    last = traceback.extract_tb(error.__traceback__)[-1]
    return Failure(
        client,
        Reason.CLIENT_ERROR,
        # guard: no-value-example-failure
        f"{type(error).__name__}: {error} ({Path(last.filename).name}, line {last.lineno}, {last.name})",
    )


def taken(client: ClientId, reply: Reply[Any, Any], travels: bool = False) -> "Reply[Any, Any] | Failure":
    """The reply with a copy of its upload, which no client can change any more. If it travels to another process, it
    will be copied on its way, and only tensors go."""
    try:
        if travels:
            return Reply(wire.marked(reply.upload), wire.marked(reply.memory), reply.loss, reply.spent)
        with unplaced():
            return Reply(wire.taken(reply.upload), reply.memory, reply.loss, reply.spent)  # guard: uploads-copied
    except RecursionError:
        return Failure(client, Reason.UNDECODABLE, "it is nested too deeply")


def _bad_memory(memory: Tree, before: Tree) -> tuple[Reason, str] | None:
    """Why a client's new memory cannot be kept: it could not be saved, or not be loaded again."""
    try:
        leaves = tree.named_leaves(memory)
    except RecursionError:
        return Reason.UNDECODABLE, "its memory is nested too deeply"
    for path, leaf in leaves.items():
        if why := wire.unfit(leaf):  # guard: memories-of-tensors
            return Reason.DTYPE_MISMATCH, f"its memory, {path}, {why}"
    names = tree.named_leaves(before).keys()
    if missing := sorted(names - leaves.keys()):  # guard: memories-keep-structure
        return Reason.KEY_MISSING, f"its memory has lost {', '.join(missing)}"
    if more := sorted(leaves.keys() - names):  # guard: memories-gain-nothing
        return Reason.KEY_UNEXPECTED, f"its memory has {', '.join(more)}, which the first one had not"
    bad = non_finite(memory)  # guard: what-remembered-finite
    return (Reason.NON_FINITE, f"its memory, {bad}, holds values that are not finite") if bad else None


def non_finite(value: Tree) -> str:
    """Where a record holds values that are not finite; empty if nowhere."""
    leaves = tree.named_leaves(value)
    floats = {path: leaf for path, leaf in leaves.items() if leaf.is_floating_point() and leaf.numel()}
    if not floats:  # a question to the device would wait for it
        return ""
    if tree.norms(floats.values(), torch.inf).isfinite().all():
        return ""
    return next(path for path, leaf in floats.items() if not leaf.isfinite().all())


def refuse_change(before: Tree | None, after: Tree, what: str) -> None:
    """A record that changes its structure could be saved but not be loaded."""
    if before is not None:
        changed = sorted(tree.named_leaves(before).keys() ^ tree.named_leaves(after).keys())
        if changed:
            raise RunFailed(f"the method changed the structure of the {what}: {', '.join(changed)} came or went")
