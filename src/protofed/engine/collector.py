"""Sorts what arrives in a round: at most one reply of each client, in canonical order, none too late."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from protofed.api.task import ClientId
from protofed.engine.message import Bounds, Refused, WireMessage
from protofed.errors import RunFailed
from protofed.runtimes.jobs import Failure, Reason, Ticket


class Collector:
    def __init__(
        self,
        ids: Sequence[ClientId],
        ticket: Ticket,
        bounds: Bounds,
        deadline: float,
        was_asked: Callable[[ClientId], bool],
    ) -> None:
        self._ids = ids
        self._ticket = ticket
        self._bounds = bounds
        self._deadline = deadline
        self._was_asked = was_asked
        self._awaited = set(ids)
        self._early: dict[ClientId, Any] = {}
        self._written: set[ClientId] = set()
        self._refused_of: dict[ClientId, Failure] = {}
        self.refused: list[Failure] = []
        """Messages that were thrown away without their client being left out."""

    def sorted(self, arrivals: Iterable[tuple[ClientId, Any]]) -> Iterator[tuple[ClientId, Any]]:
        """Outcomes in the order of the clients, whatever order they arrive in; those that came early wait."""
        waiting = iter(self._ids)
        client = next(waiting, None)
        for arrived, outcome in arrivals:
            self._take(arrived, outcome)
            while client is not None and client in self._early:  # guard: sort-replies-canonical-order
                yield client, self._early.pop(client)  # guard: sort-replies-canonical-order
                client = next(waiting, None)
        for missing in sorted(self._awaited):
            self._early[missing] = self._absence(missing)
        while client is not None:
            yield client, self._early.pop(client)
            client = next(waiting, None)

    def _take(self, client: ClientId, outcome: Any) -> None:
        if isinstance(outcome, WireMessage):
            refusal = self._refusal(client, outcome)
            if refusal is not None:
                self.refused.append(refusal)
                self._refused_of[client] = refusal
                return
            self._written.add(client)
        elif client in self._written and isinstance(outcome, Failure):
            return  # what the runtime says of a client whose message was taken comes too late
        elif client not in self._awaited:
            raise RunFailed(f"the runtime gave back client {client} twice, or without being asked")
        elif not isinstance(outcome, Failure) and time.monotonic() > self._deadline:  # guard: late-reply-refused
            outcome = Failure(client, Reason.LATE, "its reply came after the deadline")
        self._awaited.remove(client)  # guard: at-most-once-second-message-refused
        self._early[client] = outcome

    def _refusal(self, client: ClientId, message: WireMessage) -> Failure | None:
        """Why a message does not count at all; its client may still send a good one."""
        try:
            self._bounds.check(message)  # guard: message-within-bounds
            ticket, *_ = message.ticket, message.receipt, message.loss, message.charges
        except Refused as refused:
            return Failure(client, refused.reason, refused.detail)
        if ticket.run != self._ticket.run:  # guard: message-another-run-refused
            return Failure(client, Reason.WRONG_RUN, f"it answers run {ticket.run[:40]!r}, not {self._ticket.run!r}")
        # guard: message-another-round-phase-or-call-refused, message-this-phase
        if replace(ticket, model=self._ticket.model) != self._ticket:
            return Failure(client, Reason.STALE_ROUND, f"it answers round {ticket.round}, {ticket.phase[:40]!r}")
        if ticket.model != self._ticket.model:  # guard: message-for-another-model-refused
            return Failure(client, Reason.WRONG_MODEL, "it answers a request for other tensors")
        if client not in self._awaited:
            detail = "its reply is there already" if client in self._ids else "nobody asked it"
            return Failure(client, Reason.DUPLICATE, detail)
        if time.monotonic() > self._deadline:  # guard: late-message-refused
            return Failure(client, Reason.LATE, "its reply came after the deadline")  # guard: late-message-refused
        return None

    def _absence(self, client: ClientId) -> Failure:
        """What is said of a client from whom nothing came that counts."""
        if client in self._refused_of:
            failure = self._refused_of[client]
            self.refused.remove(failure)  # guard: refused-messages-counted-once
            return failure
        if not self._was_asked(client):
            return Failure(client, Reason.LATE, "the deadline came before it was asked")
        raise RunFailed(f"the runtime lost client {client}: it gave back neither a reply nor a failure")
