"""Several clients at a time: each works in a process of its own, on one thread.

Processes are forked when a run opens. A forked process has the method, the task and its data without a copy: the pages
are shared for as long as nobody writes to them. What goes to a client and what comes back lies in memory that both
sides see, and the pipe between them carries names and shapes only. Forking, and memory without a name, which is gone
when its last user is, are why this runtime needs Linux.

A process that dies is replaced; the client that it worked for has failed in that round.
"""

import mmap
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor

from protofed import tree
from protofed.api.contexts import Reply
from protofed.api.method import Step
from protofed.api.requests import Request, Total
from protofed.api.task import ClientId, Task
from protofed.errors import BadInput, RunFailed
from protofed.nn.networks import Networks
from protofed.runtimes.base import Failure, Job, Reason, failure_of
from protofed.runtimes.device import CPU
from protofed.runtimes.malloc import keep_freed_memory
from protofed.runtimes.sequential import Sequential
from protofed.tree import Params, Tree

if TYPE_CHECKING:
    from protofed.engine.federation import Federation

ALIGNMENT = 64
"""Bytes; a tensor of any type may begin at a multiple of them."""
SETTINGS = ("round", "num_rounds", "optimizer", "epochs", "batch_size", "seed", "step_seed")
"""What travels of a client's `Local`; all else is the task's, which the process has."""
STORES = ("clients", "tests", "local_tests")
"""Where a task has examples."""


@dataclass
class Workers:
    count: Annotated[int, Ge(0)] = 0
    """Processes; 0 for one on each core that this process may use."""

    device: ClassVar[torch.device] = CPU

    def __post_init__(self) -> None:
        self._federation: Federation | None = None
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []

    def open(self, federation: "Federation") -> AbstractContextManager[None]:
        if sys.platform != "linux":
            raise BadInput(f"the runtime workers needs Linux, and this is {sys.platform}: take sequential")
        known = self._federation
        if known is None or known.method is not federation.method or known.task is not federation.task:
            self.close()
            keep_freed_memory()
        self._federation = federation
        self._fill_up()
        return nullcontext()

    def close(self) -> None:
        for worker in self._workers:
            worker.end()
        self._federation, self._workers, self._idle = None, [], []

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[ClientId, Reply[Any, Any] | Failure]]:
        """Jobs are begun in their order, since the engine holds back what arrives early: largest first would end a
        round sooner, but with all its uploads in memory."""
        waiting, busy = iter(jobs), dict[Any, _Worker]()
        try:
            for job in islice(waiting, self._size):
                self._begin(job, busy)
            while busy:
                # guard: workers-wait-no-longer-than-deadline
                for connection in wait(list(busy), _seconds_until(min(worker.deadline for worker in busy.values()))):
                    worker = busy.pop(connection)
                    done = worker.finish()
                    self._idle.append(worker)
                    for job in islice(waiting, 1):  # now, so that a process works while the server reads
                        self._begin(job, busy)
                    yield done
                yield from self._overdue(busy)  # guard: work-past-deadline-ended
        finally:  # nobody will read what they still work on
            for worker in busy.values():
                worker.end()

    def _overdue(self, busy: "dict[Any, _Worker]") -> list[tuple[ClientId, Failure]]:
        """Ends the work that nobody waits for any longer."""
        # guard: monotonic-deadlines-workers
        late = [connection for connection, worker in busy.items() if time.monotonic() > worker.deadline]
        ended = [busy.pop(connection) for connection in late]
        for worker in ended:
            worker.end()
        detail = "it was still at work at the deadline"
        return [(worker.client, Failure(worker.client, Reason.LATE, detail)) for worker in ended]

    def placed(self, task: Task) -> Task:
        return task

    def answer(self, request: Request[Any]) -> Any:
        return Sequential().answer(request)

    def answers(self, requests: Sequence[Request[Any]]) -> list[Any]:
        """Each by the next process that has nothing to do, the largest first. What processes do not know enough for,
        and what they fail at, is left to this one."""
        orders = dict(self._questions(requests)) if len(requests) > 1 else {}
        waiting = sorted(orders, key=lambda i: len(requests[i].data))
        found, busy = dict[int, Any](), dict[Any, tuple[int, _Worker]]()
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

    def _questions(self, requests: Sequence[Request[Any]]) -> "Iterator[tuple[int, tuple[_Question, Tree]]]":
        """Those of the requests that can be put to a process, and what they are about."""
        federation = self._federation
        if federation is None:
            return
        method, task = federation.method, federation.task
        kinds = {id(request.networks): request.networks for request in requests}
        owners = {key: self._owner(federation, networks) for key, networks in kinds.items()}
        stores = {
            (id(data.x), id(data.y)): (kind, name) for kind in STORES for name, data in getattr(task, kind).items()
        }
        for i, request in enumerate(requests):
            data, statistic = request.data, getattr(request, "statistic", None)
            client, store = owners[id(request.networks)], stores.get((id(data.x), id(data.y)))
            name = getattr(statistic, "__name__", "")
            is_known = getattr(method, name, None) == statistic and request.transform is task.transform
            if client is not None and store is not None and is_known and isinstance(request, Total):
                question = _Question(client, store, name, request.seed)
                yield i, (question, (request.params, request.context, data.index))

    @staticmethod
    def _owner(federation: "Federation", networks: Networks) -> ClientId | None:
        """A client that has these networks; most tasks have one kind, and the first client is asked only."""
        return next((client for client in federation.ids if federation.networks_of(client) is networks), None)

    @property
    def _size(self) -> int:
        return self.count or len(os.sched_getaffinity(0))

    def _begin(self, job: Job, busy: "dict[Any, _Worker]") -> None:
        worker = self._ready()
        worker.begin(job)
        busy[worker.connection] = worker

    def _fill_up(self) -> None:
        """As many processes as there should be, if some died or were ended."""
        alive = [worker for worker in self._workers if worker.is_alive]
        self._idle += [self._new() for _ in range(self._size - len(alive))]

    def _ready(self) -> "_Worker":
        while self._idle:
            worker = self._idle.pop()
            if worker.is_alive:
                return worker
            worker.end()
        return self._new()  # one has died, or another run that has not ended holds them

    def _new(self) -> "_Worker":
        if self._federation is None:
            raise RuntimeError("a runtime must be opened before it runs jobs")
        worker = _Worker(self._federation)
        self._workers = [*(w for w in self._workers if w.is_alive), worker]
        return worker


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies in a buffer. It travels instead of the tensor."""

    start: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Buffer:
    """Memory that two processes see. It holds one tree at a time, and grows."""

    def __init__(self) -> None:
        self._file = os.memfd_create("protofed")
        self._close = weakref.finalize(self, os.close, self._file)
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def write(self, value: Tree) -> Tree:
        """The tree with a place for each tensor, which lies there now."""
        end, laid = 0, list[tuple[_Place, Tensor]]()

        def placed(leaf: Any) -> Any:
            nonlocal end
            if not isinstance(leaf, Tensor):
                return leaf
            if leaf.layout != torch.strided or leaf.is_meta:
                return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")  # the gate refuses either
            like = torch.empty_like(leaf, device="meta")  # laid out as a copy would be
            place = _Place(end, like.shape, like.stride(), like.dtype)
            laid.append((place, leaf.detach()))
            end += -(-like.nbytes // ALIGNMENT) * ALIGNMENT
            return place

        places = tree.map(placed, value)
        self._reserve(end)
        memory = self._mapped()
        for place, leaf in laid:
            _at(memory, place).copy_(leaf)
        return places

    def read(self, places: Tree) -> Tree:
        """A copy of the tree, since the next one will lie at the same place."""
        memory = self._mapped()
        return tree.map(lambda leaf: _at(memory, leaf).clone() if isinstance(leaf, _Place) else leaf, places)

    def close(self) -> None:
        self._close()
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def _reserve(self, size: int) -> None:
        if size > os.fstat(self._file).st_size:
            try:  # pages that are only promised would kill whoever touches them first
                os.posix_fallocate(self._file, 0, size)
            except OSError as error:
                raise RunFailed(f"there is no shared memory for a record of {size} bytes: {error.strerror}") from error

    def _mapped(self) -> Tensor:
        """All its bytes; the other side may have made it grow."""
        size = os.fstat(self._file).st_size
        if size != self._bytes.numel():
            self._bytes = torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.uint8)
        return self._bytes


def _at(memory: Tensor, place: _Place) -> Tensor:
    return memory.view(place.dtype).as_strided(place.shape, place.stride, place.start // place.dtype.itemsize)


class _Worker:
    """One process, which does one job at a time."""

    def __init__(self, federation: "Federation") -> None:
        fork = multiprocessing.get_context("fork")
        self.client: ClientId = ""
        self.deadline = inf
        self.connection, theirs = fork.Pipe()
        self._method = federation.method
        self._buffer = _Buffer()
        arguments = (federation, self._buffer, theirs, self.connection)
        self._process = fork.Process(target=_serve, args=arguments, daemon=True)
        with warnings.catch_warnings():  # the child needs none of the parent's threads, nor what they may have locked
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            self._process.start()
        theirs.close()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def begin(self, job: Job) -> None:
        self.client, self.deadline = job.client, job.deadline
        is_own = getattr(job.step, "__self__", None) is self._method
        step = job.step.__name__ if is_own else job.step
        settings = {name: getattr(job.local, name) for name in SETTINGS}
        self.send(_Order(job.client, step, settings), (job.message, job.memory))

    def send(self, order: "_Order | _Question", about: Tree) -> None:
        try:
            self.connection.send((order, self._buffer.write(about)))
        except ConnectionError:
            pass  # it has just died, as `received` will find
        except RunFailed:
            raise
        except Exception as error:
            raise RunFailed(
                f"what client {order.client} is asked to do cannot be sent to another process: {error}; "
                "define steps and records at the top level of a module, or take the runtime sequential"
            ) from error

    def finish(self) -> tuple[ClientId, Reply[Any, Any] | Failure]:
        """What became of the job; waits for it."""
        return self.client, self.received()

    def received(self) -> Any:
        """What it was asked for, or why there is none; waits for it."""
        try:
            places = self.connection.recv()
        except (EOFError, OSError):
            self._process.join(1)  # its own end says what happened, and ours would not
            self.end()
            return Failure(self.client, Reason.CLIENT_ERROR, _obituary(self._process.exitcode))
        return self._buffer.read(places)

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()
        self._buffer.close()


def _seconds_until(deadline: float) -> float | None:
    return None if deadline == inf else max(0.0, deadline - time.monotonic()) + 0.001  # past it, not at it


def _obituary(status: int | None) -> str:
    match status:
        case -9:
            return "the worker process died (signal 9): the system may have run out of memory"
        case int() if status < 0:
            return f"the worker process died (signal {-status})"
    return f"the worker process died (exit status {status})"


def _serve(federation: "Federation", buffer: _Buffer, connection: Connection, parents: Connection) -> None:
    """What a process does: jobs, until nobody can send any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes, and is the parent's to act on
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parents.close()
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            order, places = connection.recv()
        except EOFError:
            return
        outcome = order.done(federation, *buffer.read(places))
        try:
            connection.send(buffer.write(outcome))
        except Exception as error:  # a reply that cannot be sent is the client's failure
            connection.send(failure_of(order.client, error))


@dataclass(frozen=True)
class _Order:
    """A step that a client takes, as it travels."""

    client: ClientId
    step: str | Step[Any, Any, Any]
    settings: Mapping[str, Any]

    def done(self, federation: "Federation", message: Tree, memory: Tree) -> Reply[Any, Any] | Failure:
        method = federation.method
        local = replace(federation.client_context(self.client, self.settings["round"]), **self.settings)
        step = getattr(method, self.step) if isinstance(self.step, str) else self.step
        [(_, outcome)] = Sequential().run([Job(self.client, step, local, message, memory, method.init_memory)])
        return outcome


@dataclass(frozen=True)
class _Question:
    """A statistic of the method, over examples of the task, as it travels."""

    client: ClientId
    """Whose networks it is about."""
    store: tuple[str, str]
    statistic: str
    seed: int

    def done(self, federation: "Federation", params: Params, context: tuple[Tree, ...], index: Tensor) -> Tree:
        task, (kind, name) = federation.task, self.store
        try:
            data = replace(getattr(task, kind)[name], index=index)
            networks, statistic = federation.networks_of(self.client), getattr(federation.method, self.statistic)
            return Sequential().answer(Total(networks, params, context, data, task.transform, self.seed, statistic))
        except Exception as error:  # whoever asked will find out for itself
            return failure_of(self.client, error)


def _end_with_parent() -> None:
    """A process that works for nobody would still hold the cores, and the lock of the run's folder."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
