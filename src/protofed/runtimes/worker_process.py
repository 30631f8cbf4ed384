"""A forked process that does one job at a time.

It has the method, the task and its data without a copy: pages are shared for as long as nobody writes to them. What
goes in and out lies in shared memory; the pipe carries names and shapes only.
"""

import multiprocessing
import os
import threading
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from protofed.api.contexts import ClientContext, Reply
from protofed.api.method import Step
from protofed.api.requests import Map
from protofed.api.task import ClientId
from protofed.errors import RunFailed
from protofed.runtimes.isolation import SharedTensors, Watch
from protofed.runtimes.jobs import Failure, Host, Job, Reason, TestKind, failure_of, taken
from protofed.runtimes.sequential import Sequential
from protofed.runtimes.shared_memory import SharedBuffer
from protofed.stop_signals import held_back, leave_to_parent
from protofed.tree import Params, Tree

SETTINGS = ("round", "num_rounds", "optimizer", "halvings", "epochs", "batch_size", "seed", "step_seed", "privacy")
"""What travels of a client's context; all else is the task's, which the process has."""


class Worker:
    """One process, which does one job at a time."""

    def __init__(self, host: Host) -> None:
        fork = multiprocessing.get_context("fork")
        self.client: ClientId = ""
        self.deadline = inf
        self.connection, theirs = fork.Pipe()
        self._method = host.method
        self._buffer = SharedBuffer()
        arguments = (host, self._buffer, theirs, self.connection)
        self._process = fork.Process(target=_serve, args=arguments, daemon=True)
        with warnings.catch_warnings():  # the child needs none of the parent's threads, nor what they may have locked
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            with held_back():
                self._process.start()
        theirs.close()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def begin(self, job: Job, memory: Tree) -> None:
        self.client, self.deadline = job.client, job.deadline
        is_own = getattr(job.step, "__self__", None) is self._method
        step = job.step.__name__ if is_own else job.step
        settings = {name: getattr(job.context, name) for name in SETTINGS}
        self.send(Order(job.client, step, settings, job.tests, job.evaluates), (job.message, memory))

    def send(self, order: "Order | Question", about: Tree) -> None:
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

    def received(self) -> Any:
        """What it was asked for, or why there is none; waits for it."""
        try:
            places = self.connection.recv()
        except (EOFError, OSError):
            self._process.join(1)  # its own end says what happened, and ours would not
            self.end()
            status = self._process.exitcode
            return Failure(
                self.client, Reason.CLIENT_ERROR, _obituary(status), is_killed=status is not None and status < 0
            )
        answer = self._buffer.read(places)
        if isinstance(answer, Failure) and answer.reason == Reason.CHANGED_SHARED:  # guard: spoiled-process-ends
            self.end()  # guard: spoiled-process-ends
        return answer

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()
        self._buffer.close()


def _obituary(status: int | None) -> str:
    match status:
        case -9:
            return "the worker process died (signal 9): the system may have run out of memory"
        case int() if status < 0:
            return f"the worker process died (signal {-status})"
    return f"the worker process died (exit status {status})"


def _serve(host: Host, buffer: SharedBuffer, connection: Connection, parents: Connection) -> None:
    """What a process does: jobs, until nobody can send any more."""
    leave_to_parent()
    parents.close()
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, ConnectionError):  # the parent has ended, or was killed
        while True:
            order, places = connection.recv()
            outcome = order.done(host, *buffer.read(places))
            try:
                connection.send(buffer.write(outcome))
            except ConnectionError:
                raise
            except Exception as error:  # a reply that cannot be sent is the client's failure
                connection.send(failure_of(order.client, error))


@dataclass(frozen=True)
class Order:
    """A step that a client takes, as it travels."""

    client: ClientId
    step: str | Step[Any, Any, Any]
    settings: Mapping[str, Any]
    tests: TestKind
    evaluates: bool

    def done(self, host: Host, message: Tree, memory: Tree) -> Reply[Any, Any] | Failure:
        try:
            context = host.client_context(self.client, self.settings["round"])
            context = replace(context, **self.settings, tests=host.test_sets(self.client, self.tests))
        except Exception as error:
            return failure_of(self.client, error)
        watch = Watch(_SHARED, context)
        outcome = self._reply(host, context, watch.given(message, "its message"), watch.given(memory, "its memory"))
        change = watch.change()  # guard: changes-refused-there
        return Failure(self.client, Reason.CHANGED_SHARED, change) if change else outcome

    def _reply(self, host: Host, context: ClientContext, message: Tree, memory: Tree) -> Reply[Any, Any] | Failure:
        try:
            step = getattr(host.method, self.step) if isinstance(self.step, str) else self.step
            job = Job(self.client, step, context, message, None, host.method, self.tests, self.evaluates, host.encoded)
            return taken(self.client, Sequential().reply(job, memory), travels=True)
        except BaseException as error:  # whatever goes wrong at a client concerns that client only
            return failure_of(self.client, error)


_SHARED = SharedTensors(most_bytes=0, puts_back=False)
"""What the clients of a process share. It is in the process's own pages: the process ends when one has changed it."""


@dataclass(frozen=True)
class Question:
    """A function of the method, over examples of the task, as it travels."""

    client: ClientId
    """Whose networks it is about."""
    store: tuple[str, str]
    function: str
    seed: int

    def done(self, host: Host, params: Params, context: tuple[Tree, ...], index: Tensor) -> Tree:
        task, (kind, name) = host.task, self.store
        try:
            data = replace(getattr(task, kind)[name], index=index)
            networks, function = host.networks_of(self.client), getattr(host.method, self.function)
            return Sequential().answer(Map(networks, params, context, data, task.transform, self.seed, function))
        except Exception as error:  # whoever asked will find out for itself
            return failure_of(self.client, error)


def _end_with_parent() -> None:
    """A process that works for nobody would still hold the cores."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
