"""What the engine hands to a runtime, and what comes back."""

import traceback
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from protofed.api.contexts import ClientContext, Reply
from protofed.api.method import Step
from protofed.api.requests import Request
from protofed.api.task import ClientId, Task
from protofed.runtimes.divergence import Diverged
from protofed.tree import Tree

if TYPE_CHECKING:
    from protofed.engine.federation import Federation


class Reason(StrEnum):
    """Why a client's reply did not count. The names are stable."""

    CLIENT_ERROR = "CLIENT_ERROR"
    DIVERGED = "DIVERGED"
    LATE = "LATE"

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


TROUBLES = {Reason.CLIENT_ERROR, Reason.DIVERGED, Reason.LATE, Reason.STALE_ROUND, Reason.DUPLICATE}
"""What may befall an honest client; all other reasons are found wrong with what it sent."""


@dataclass(frozen=True)
class Failure:
    client: ClientId
    reason: Reason
    detail: str


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


NO_TICKET = Ticket("", 0, "", 0, "")


@dataclass(frozen=True)
class Job:
    """One step at one client."""

    client: ClientId
    step: Step[Any, Any, Any]
    local: ClientContext
    message: Tree
    memory: Tree | None
    """None for a client that has never taken part."""
    init_memory: Callable[[ClientContext, Tree], Tree]
    deadline: float = inf
    """On the monotonic clock: nobody waits for the reply any longer."""
    ticket: Ticket = NO_TICKET
    """For runtimes whose clients are elsewhere: what they must say that they answer."""

    def start(self) -> Coroutine[Any, Any, Reply[Any, Any]]:
        memory = self.init_memory(self.local, self.message) if self.memory is None else self.memory
        return self.step(self.local, self.message, memory)


class Runtime(Protocol):
    @property
    def device(self) -> torch.device:
        """Where a federation's tensors live."""

    def open(self, federation: "Federation") -> AbstractContextManager[None]:
        """Makes ready to work for a federation, which does all it does within this; entered again for every phase."""

    def close(self) -> None:
        """Gives back what it holds; a later `open` makes it ready again."""

    def placed(self, task: Task) -> Task:
        """The task with its data where this runtime wants them."""

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[ClientId, Reply[Any, Any] | Failure]]:
        """Does the jobs and gives back each client's reply or failure, in any order."""

    def answer(self, request: Request[Any]) -> Any:
        """Does what one request asks, for the server."""

    def answers(self, requests: Sequence[Request[Any]]) -> list[Any]:
        """Does what independent requests ask."""


def checked_reply(client: ClientId, reply: Any) -> Reply[Any, Any] | Failure:
    """What a step ended with, if that is a reply."""
    if isinstance(reply, Reply):
        return reply
    detail = f"TypeError: a step ends with a Reply, not with {type(reply).__name__}"
    return Failure(client, Reason.CLIENT_ERROR, detail)


def failure_of(client: ClientId, error: Exception) -> Failure:
    """The failure that an exception at a client amounts to, with the place that raised it."""
    if isinstance(error, Diverged):
        return Failure(client, Reason.DIVERGED, str(error))
    last = traceback.extract_tb(error.__traceback__)[-1]
    return Failure(
        client,
        Reason.CLIENT_ERROR,
        # guard: no-value-example-failure
        f"{type(error).__name__}: {error} ({Path(last.filename).name}, line {last.lineno}, {last.name})",
    )
