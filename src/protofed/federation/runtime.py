"""The runtime whose clients are elsewhere: jobs become orders, answers become wire messages.

The engine does with them what it does in one process: it samples, waits, checks every upload, and puts them into
canonical order. What a site says is believed as far as a site can know it.
"""

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import inf
from types import MappingProxyType
from typing import Any

from protofed import tree, wire
from protofed.api.requests import Request
from protofed.api.task import ClientId, Task
from protofed.engine.message import Refused, WireMessage, printable
from protofed.errors import RunFailed
from protofed.federation.codec import Undecodable, decoded, encoded
from protofed.federation.interface import Link
from protofed.federation.messages import Answer, Description, Done, Failed, Order, Refusal, Work
from protofed.federation.site_run import CLAIMABLE
from protofed.federation.site_store import SHA256
from protofed.federation.steps import UnknownStep, step_name
from protofed.runtimes.client_store import ClientStore, Receipt
from protofed.runtimes.device import CPU
from protofed.runtimes.jobs import Failure, Host, Job, Reason
from protofed.runtimes.sequential import Sequential
from protofed.tree import Tree

log = logging.getLogger(__name__)

ANSWER_ROOM = 4096
"""Bytes of an answer's header, and for each client in it."""
Found = tuple[ClientId, WireMessage | Failure]


class ElsewhereStore:
    """The store of a server whose clients are elsewhere: it has no state of theirs."""

    def keep(self, client: ClientId, state: Tree) -> Receipt:
        raise RunFailed(f"the state of client {client} is kept at its site, not at the server")

    def load(self, client: ClientId, receipt: Receipt) -> Tree:
        raise RunFailed(f"the state of client {client} is at its site, and the server cannot read it")


@dataclass
class _Sent:
    """An order that is waited for."""

    site: str
    id: str
    """By which the link knows it."""
    jobs: Mapping[ClientId, Job]
    most_bytes: int
    deadline: float
    resend_at: float
    complaint: str = ""
    """What is wrong with what the site has sent, if it sent something that cannot be read."""


class Remote:
    """A runtime over a link to sites."""

    device = CPU

    def __init__(
        self,
        link: Link,
        description: Description,
        site_of: Mapping[ClientId, str],
        seconds: float,
        resend_after: float = inf,
        most_bytes: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """`seconds` is how long is waited where a phase has no deadline; after `resend_after` seconds without an answer
        an order is sent again. `most_bytes` has the bytes of an order that sites take, for those that have said so."""
        self.store: ClientStore = ElsewhereStore()
        self.dropped: Counter[str] = Counter()
        """How many messages were thrown away, by reason."""
        self._link = link
        self._description = description
        self._site_of = site_of
        self._seconds = seconds
        self._resend_after = resend_after
        self._most_bytes = most_bytes
        self._server = Sequential()
        self._host: Host | None = None

    def open(self, host: Host) -> AbstractContextManager[None]:
        self._host = host
        return nullcontext()

    def close(self) -> None:
        pass

    def placed(self, task: Task) -> Task:
        """The data are where they should be: at the sites."""
        return replace(task, has_data=True)

    def answers(self, requests: Sequence[Request[Any]]) -> list[Any]:
        return self._server.answers(requests)

    def for_server(self) -> Callable[[Request[Any]], Any]:
        return self._server.answer

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[ClientId, Any]]:
        """Wire messages and failures: the engine opens them."""
        waiting: dict[str, _Sent] = {}
        of_site: dict[str, list[Job]] = {}
        for job in jobs:
            of_site.setdefault(self._site_of[job.client], []).append(job)
        for site, own in of_site.items():
            order = self._order(own)
            data = encoded(order)
            if len(data) > (most := self._most_bytes.get(site, len(data))):  # guard: site-s-bytes-known-at-server
                what = f"{Refusal.TOO_MANY_BYTES}: an order of {len(data)} bytes, and its site takes at most {most}"
                yield from ((job.client, Failure(job.client, Reason.REFUSED_BY_SITE, what)) for job in own)
                continue
            waiting[order.nonce] = self._send(site, own, data)
        while waiting:
            yield from self._late(waiting)
            self._resend(waiting.values())
            if waiting:
                for site, data in self._link.receive(_timeout(waiting.values())):
                    yield from self._taken(site, data, waiting)

    # ---- orders

    def _send(self, site: str, jobs: Sequence[Job], data: bytes) -> _Sent:
        most = ANSWER_ROOM + sum(ANSWER_ROOM + job.most_bytes for job in jobs)
        sent = self._link.send(site, data, most)
        end = min(jobs[0].deadline, time.monotonic() + self._seconds)  # guard: evaluations-have-an-end
        return _Sent(site, sent, {job.client: job for job in jobs}, most, end, time.monotonic() + self._resend_after)

    def _order(self, jobs: Sequence[Job]) -> Order:
        assert self._host is not None, "a runtime must be opened before it runs jobs"
        first, messages = jobs[0], _Packed()
        try:
            step = step_name(self._host.method, first.step)
        except UnknownStep as error:
            raise RunFailed(str(error)) from error
        works = tuple(
            Work(
                job.client,
                job.receipt or "",
                messages.number_of(job.message),
                job.context.epochs,
                job.context.batch_size,
                job.context.halvings,
                job.context.step_seed,
            )
            for job in jobs
        )
        return Order(
            secrets.token_hex(16),
            self._description.digest,
            first.ticket,
            step,
            first.tests,
            first.evaluates,
            max(0.0, min(first.deadline - time.monotonic(), self._seconds)),
            works,
            wire.encode(messages.all),
        )

    def _resend(self, waiting: Iterable[_Sent]) -> None:
        for sent in waiting:
            if time.monotonic() >= sent.resend_at:  # guard: orders-sent-again
                log.info("no answer of site %s yet: its order is sent again", sent.site)
                self._link.resend(sent.id)
                sent.resend_at = time.monotonic() + self._resend_after

    @staticmethod
    def _late(waiting: dict[str, _Sent]) -> Iterator[Found]:
        for nonce, sent in list(waiting.items()):
            if time.monotonic() <= sent.deadline:
                continue
            del waiting[nonce]
            for client in sent.jobs:
                if sent.complaint:
                    yield client, Failure(client, Reason.UNDECODABLE, sent.complaint)
                else:
                    yield client, Failure(client, Reason.LATE, "no answer of its site came before the deadline")

    # ---- answers

    def _taken(self, site: str, data: bytes, waiting: dict[str, _Sent]) -> Iterator[Found]:
        """What the answer says of each of its clients; nothing if it answers no order that is waited for."""
        own = {nonce: sent for nonce, sent in waiting.items() if sent.site == site}
        try:
            answer = decoded(data, max((sent.most_bytes for sent in own.values()), default=0))
            if not isinstance(answer, Answer):
                raise Undecodable(f"it is {type(answer).__name__}, not an answer")
        except Undecodable as error:
            self._drop(site, Reason.UNDECODABLE if own else Reason.STALE_ROUND, str(error))
            for sent in own.values():
                sent.complaint = printable(f"its site sent what is no answer: {error}")
            return
        if answer.nonce not in own:  # guard: only-awaited-answers-of-the-same-site
            self._drop(site, Reason.STALE_ROUND, "it answers no order that is waited for")
            return
        yield from self._outcomes(waiting.pop(answer.nonce), answer)

    def _outcomes(self, sent: _Sent, answer: Answer) -> Iterator[Found]:
        everyone: list[Done | Failed] = [*answer.done, *answer.failed]
        entries = {one.client: one for one in everyone}
        are_those_asked = len(entries) == len(everyone) and entries.keys() == sent.jobs.keys()
        if not are_those_asked:  # guard: answers-are-for-those-asked
            for client in sent.jobs:
                yield client, Failure(client, Reason.UNDECODABLE, "its site answered for other clients than were asked")
            return
        for client, entry in entries.items():
            yield client, self._upload(entry) if isinstance(entry, Done) else _believed(entry)

    def _upload(self, done: Done) -> WireMessage | Failure:
        message = WireMessage(done.upload)
        try:
            receipt = message.receipt
        except Refused:
            return message  # the engine says what is wrong with it
        if receipt is None or not SHA256.fullmatch(receipt):  # guard: receipts-of-sites-are-digests
            return Failure(done.client, Reason.UNDECODABLE, "its receipt is no SHA-256")
        if done.is_afresh:
            log.warning("MEMORY_LOST: client %s had lost its state and began afresh", done.client)
        return message

    def _drop(self, site: str, reason: Reason, why: str) -> None:
        log.warning("a message of site %s was thrown away: %s: %s", site, reason, printable(why))
        self.dropped[reason] += 1


class _Packed:
    """The messages of an order, each once: clients are often sent the same tensors."""

    def __init__(self) -> None:
        self.all: list[Tree] = []
        self._numbers: dict[tuple[tuple[str, int], ...], int] = {}

    def number_of(self, message: Tree) -> int:
        key = tuple((path, id(leaf)) for path, leaf in tree.named_leaves(message).items())
        if key not in self._numbers:
            self._numbers[key] = len(self.all)
            self.all.append(message)  # it keeps the tensors alive: others may reuse their id()
        return self._numbers[key]


def _believed(failed: Failed) -> Failure:
    """A failure that a site can know of; any other is the site's own."""
    if failed.reason not in CLAIMABLE:  # guard: sites-claim-few-reasons
        return Failure(failed.client, Reason.UNDECODABLE, printable(f"its site claims {failed.reason}"))
    return Failure(failed.client, Reason(failed.reason), printable(failed.detail))


def _timeout(waiting: Iterable[_Sent]) -> float:
    """Seconds until something is to be done."""
    return max(0.0, min(min(sent.deadline, sent.resend_at) for sent in waiting) - time.monotonic()) + 0.001
