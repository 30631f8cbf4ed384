"""Clients' steps under way, each advanced from request to request."""

from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self

from protofed.api.contexts import Reply
from protofed.api.requests import Request
from protofed.runtimes.client_store import ClientStore
from protofed.runtimes.isolation import Copies, SharedTensors, Watch, let_pass
from protofed.runtimes.jobs import Answer, Failure, Job, Reason, failure_of
from protofed.tree import Tree


@dataclass(frozen=True)
class Step:
    job: Job
    memory: Tree
    watch: Watch
    step: Coroutine[Any, Any, Any]

    @classmethod
    def begun(cls, job: Job, store: ClientStore, shared: SharedTensors, copies: Copies) -> Self | Failure:
        """A client's step before its first request. Clients that are sent the same tensors share the copies."""
        watch = Watch(shared, job.context)
        job = replace(job, message=watch.lent_to_many(job.message, "its message", copies))
        try:
            memory = job.memory(store)
            if job.receipt is not None:
                memory = watch.lent_to_many(memory, "its memory", copies)
        except BaseException as error:  # whatever goes wrong at a client concerns that client only
            let_pass(error)
            memory = failure_of(job.client, error)
        if change := watch.change():
            memory = Failure(job.client, Reason.CHANGED_SHARED, change)
        return memory if isinstance(memory, Failure) else cls(job, memory, watch, job.start(memory))

    def advanced(self, answer: Any, store: ClientStore) -> Request[Any] | Answer | Failure:
        """The next request; in the end the answer, or why there is none."""
        try:
            found = self.step.throw(answer) if isinstance(answer, BaseException) else self.step.send(answer)
        except StopIteration as end:
            found = end.value
        except BaseException as error:  # whatever goes wrong at a client concerns that client only
            let_pass(error)
            found = failure_of(self.job.client, error)
        change = self.watch.change()  # guard: changes-refused-in-cohort
        if change:
            return Failure(self.job.client, Reason.CHANGED_SHARED, change)
        return self.job.finished(found, self.memory, store) if isinstance(found, Reply) else found

    def close(self) -> None:
        """Ends a step that nobody goes on with."""
        with suppress(BaseException):
            self.step.close()
