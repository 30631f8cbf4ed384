"""Several clients at a time: each works in a process of its own, on one thread.

Processes are forked when a run opens. A forked process has the method, the task and its data without a copy: the pages
are shared for as long as nobody writes to them. What goes to a client and what comes back lies in memory that both
sides see, and the pipe between them carries names and shapes only. Forking, and memory without a name, which is gone
when its last user is, are why this runtime needs Linux.

A process that dies is replaced; the client that it worked for has failed in that round.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import inf
from multiprocessing.connection import wait
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge

from protofed.api.requests import Map, Request
from protofed.api.task import ClientId, Task
from protofed.errors import BadInput, RunFailed
from protofed.nn.networks import Networks
from protofed.runtimes.client_store import ClientStore, InMemoryStore
from protofed.runtimes.device import CPU
from protofed.runtimes.isolation import SharedTensors, Watch, let_pass
from protofed.runtimes.jobs import Answer, Failure, Host, Job, Outcome, Reason, failure_of
from protofed.runtimes.malloc import keep_freed_memory
from protofed.runtimes.sequential import Sequential
from protofed.runtimes.worker_process import Question, Worker
from protofed.tree import Tree

STORES = ("clients", "tests", "local_tests", "validation")
"""Where a task has examples."""


@dataclass(frozen=True)
class _Begun:
    """A job that a process works on."""

    worker: Worker
    job: Job
    memory: Tree


@dataclass
class Workers:
    count: Annotated[int, Ge(0)] = 0
    """Processes; 0 for one on each core that this process may use."""

    device: ClassVar[torch.device] = CPU

    def __post_init__(self) -> None:
        self.store: ClientStore = InMemoryStore()
        self._host: Host | None = None
        self._workers: list[Worker] = []
        self._idle: list[Worker] = []
        self._shared = SharedTensors(most_bytes=0)

    def open(self, host: Host) -> AbstractContextManager[None]:
        if sys.platform != "linux":
            raise BadInput(f"the runtime workers needs Linux, and this is {sys.platform}: take sequential")
        if not may_start_processes():  # guard: no-processes-in-daemons
            raise BadInput(
                "the runtime workers cannot start processes here: this is a daemonic process, as those of "
                "multiprocessing.Pool are. Take sequential or auto, or start runs with concurrent.futures"
            )
        known = self._host
        if known is None or known.method is not host.method or known.task is not host.task:
            self.close()
            keep_freed_memory()
        self._host = host
        self._fill_up()
        return nullcontext()

    def close(self) -> None:
        for worker in self._workers:
            worker.end()
        self._host, self._workers, self._idle = None, [], []
        self._shared.forget()

    def for_server(self) -> Callable[[Request[Any]], Any]:
        return Sequential().answer

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Jobs are begun in their order, since the engine holds back what arrives early: largest first would end a
        round sooner, but with all its uploads in memory."""
        waiting, busy = iter(jobs), dict[Any, _Begun]()
        try:
            for _ in range(self._size):
                yield from self._begin_next(waiting, busy)
            while busy:
                # guard: workers-wait-no-longer-than-deadline
                for connection in wait(list(busy), _seconds_until(min(b.job.deadline for b in busy.values()))):
                    begun = busy.pop(connection)
                    reply = begun.worker.received()
                    self._idle.append(begun.worker)
                    yield from self._begin_next(waiting, busy)  # now, so that a process works while the server reads
                    yield begun.job.client, self._finished(begun, reply)
                yield from self._overdue(busy)  # guard: work-past-deadline-ended
        finally:  # nobody will read what they still work on
            for begun in busy.values():
                begun.worker.end()

    def _finished(self, begun: _Begun, reply: Any) -> Answer | Failure:
        return reply if isinstance(reply, Failure) else begun.job.finished(reply, begun.memory, self.store)

    def _overdue(self, busy: dict[Any, _Begun]) -> list[tuple[ClientId, Failure]]:
        """Ends the work that nobody waits for any longer."""
        # guard: monotonic-deadlines-workers
        late = [connection for connection, begun in busy.items() if time.monotonic() > begun.job.deadline]
        ended = [busy.pop(connection) for connection in late]
        for begun in ended:
            begun.worker.end()
        detail = "it was still at work at the deadline"
        return [(begun.job.client, Failure(begun.job.client, Reason.LATE, detail)) for begun in ended]

    def placed(self, task: Task) -> Task:
        return task

    def answer(self, request: Request[Any]) -> Any:
        return Sequential().answer(request)

    def answers(self, requests: Sequence[Request[Any]]) -> list[Any]:
        """Each by the next process that has nothing to do, the largest first. What processes do not know enough for,
        and what they fail at, is left to this one."""
        orders = dict(self._questions(requests)) if len(requests) > 1 else {}
        waiting = sorted(orders, key=lambda i: len(requests[i].data))
        found, busy = dict[int, Any](), dict[Any, tuple[int, Worker]]()
        try:
            while busy or (waiting and self._idle):
                while waiting and self._idle:
                    worker, i = self._ready(), waiting.pop()
                    try:
                        worker.send(*orders[i])
                    except RunFailed:  # it cannot be sent
                        self._idle.append(worker)
                        continue
                    busy[worker.connection] = i, worker
                for connection in wait(list(busy)) if busy else ():
                    i, worker = busy.pop(connection)
                    answer = worker.received()
                    self._idle.append(worker)
                    if not isinstance(answer, Failure):
                        found[i] = answer
        finally:
            for _, worker in busy.values():
                worker.end()
        return [found[i] if i in found else self.answer(request) for i, request in enumerate(requests)]

    def _questions(self, requests: Sequence[Request[Any]]) -> Iterator[tuple[int, tuple[Question, Tree]]]:
        """Those of the requests that can be put to a process, and what they are about."""
        host = self._host
        if host is None:
            return
        method, task = host.method, host.task
        kinds = {id(request.networks): request.networks for request in requests}
        owners = {key: self._owner(host, networks) for key, networks in kinds.items()}
        stores = {
            (id(data.x), id(data.y)): (kind, name) for kind in STORES for name, data in getattr(task, kind).items()
        }
        for i, request in enumerate(requests):
            data, function = request.data, getattr(request, "function", None)
            client, store = owners[id(request.networks)], stores.get((id(data.x), id(data.y)))
            name = getattr(function, "__name__", "")
            is_known = getattr(method, name, None) == function and request.transform is task.transform
            if client is not None and store is not None and is_known and isinstance(request, Map):
                question = Question(client, store, name, request.seed)
                yield i, (question, (request.params, request.context, data.index))

    @staticmethod
    def _owner(host: Host, networks: Networks) -> ClientId | None:
        """A client that has these networks; most tasks have one kind, and the first client is asked only."""
        return next((client for client in host.ids if host.networks_of(client) is networks), None)

    @property
    def _size(self) -> int:
        return self.count or len(os.sched_getaffinity(0))

    def _begin_next(self, waiting: Iterator[Job], busy: dict[Any, _Begun]) -> Iterator[Outcome]:
        """Hands the next job to a process; before it, the failures of clients whose state cannot be made or read."""
        for job in waiting:
            memory = self._memory(job)
            if isinstance(memory, Failure):
                yield job.client, memory
                continue
            worker = self._ready()
            worker.begin(job, memory)
            busy[worker.connection] = _Begun(worker, job, memory)
            return

    def _memory(self, job: Job) -> Tree | Failure:
        """What the client remembers. The first time it is made here."""
        watch = Watch(self._shared, job.context)
        try:
            if job.receipt is not None:
                return job.memory(self.store)
            made: Tree | Failure = replace(job, message=watch.lent(job.message, "its message")).memory(self.store)
        except BaseException as error:
            let_pass(error)
            made = failure_of(job.client, error)
        change = watch.change()  # guard: changes-of-first-memory-refused
        return Failure(job.client, Reason.CHANGED_SHARED, change) if change else made

    def _fill_up(self) -> None:
        """As many processes as there should be, if some died or were ended."""
        alive = [worker for worker in self._workers if worker.is_alive]
        self._idle += [self._new() for _ in range(self._size - len(alive))]

    def _ready(self) -> Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.is_alive:
                return worker
            worker.end()
        return self._new()  # one has died, or another run that has not ended holds them

    def _new(self) -> Worker:
        if self._host is None:
            raise RuntimeError("a runtime must be opened before it runs jobs")
        worker = Worker(self._host)
        self._workers = [*(w for w in self._workers if w.is_alive), worker]
        return worker


def may_start_processes() -> bool:
    """Not in a daemonic process, as those of multiprocessing.Pool are."""
    return not multiprocessing.current_process().daemon


def _seconds_until(deadline: float) -> float | None:
    """A while longer than until the deadline, to be past it; at most an hour, since the system's clock has limits."""
    # guard: waits-have-an-end
    return None if deadline == inf else min(max(0.0, deadline - time.monotonic()) + 0.001, 3600)
