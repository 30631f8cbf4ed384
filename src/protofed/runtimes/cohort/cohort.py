"""The runtime of a GPU: all clients of a round are trained together.

Clients' steps are advanced to their next requests; requests that are alike (the same loss, networks and shapes) are run
as one group by one of two executors, whichever a short trial finds faster. Work that draws from torch's own generator,
as dropout does, is done one by one, since only so its draws are those of the reference.
"""

import logging
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch

from protofed.api.requests import Fit, Fitted, Map, PrivateFit, Request
from protofed.api.task import ClientId, Task
from protofed.errors import BadInput
from protofed.nn.precision import Precision
from protofed.runtimes.client_store import ClientStore, InMemoryStore
from protofed.runtimes.cohort.buffers import Buffers, are_common
from protofed.runtimes.cohort.choice import Choice
from protofed.runtimes.cohort.executors import EXECUTORS, ExecutorName, Stacked, Streams
from protofed.runtimes.cohort.groups import divided
from protofed.runtimes.cohort.lowering import Loop, Lowering
from protofed.runtimes.cohort.memory import clients_at_once
from protofed.runtimes.cohort.steps import Step
from protofed.runtimes.device import CPU, Residence, moved_together, on, unplaced
from protofed.runtimes.divergence import are_finite, explained
from protofed.runtimes.isolation import Copies, SharedTensors, let_pass
from protofed.runtimes.jobs import Answer, Failure, Host, Job, Outcome
from protofed.runtimes.sequential import Sequential

log = logging.getLogger(__name__)

MOST_CLIENTS = 512
"""Clients that are at work at the same time; a larger round goes in parts."""
MOST_PROGRAMS = 24
"""Recorded programs that are kept for later rounds; the least recently used is dropped first."""
TRIAL_STEPS = 8

Executor = Streams | Stacked


@dataclass(frozen=True)
class Span:
    """Steps that a GPU took together. The events tell how long, once the GPU has finished."""

    body: str
    executor: str
    num_steps: int
    begin: Any
    end: Any


class Cohort:
    def __init__(
        self,
        device: str = "",
        precision: Precision = "float32",
        executor: Literal["auto"] | ExecutorName = "auto",
        deterministic: bool = True,
    ) -> None:
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise BadInput(
                "runtime cohort: torch finds no CUDA device here; use the runtime auto, workers or sequential"
            )
        self.precision = precision
        self._reference = Sequential(str(self.device), precision, deterministic)
        self.store: ClientStore = InMemoryStore()
        self._settings = (str(self.device), precision, executor, deterministic)
        self._residence = Residence(self.device)
        self._shared = SharedTensors()
        self._loops = Lowering(precision)
        self._programs: OrderedDict[Hashable, Executor] = OrderedDict()
        self._choice = Choice(executor if self.device.type == "cuda" or executor != "auto" else "streams")
        self._most_at_once = MOST_CLIENTS
        self._warned: set[str] = set()
        self.spans: deque[Span] = deque(maxlen=256)
        """The last runs, for benchmarks."""

    # ---- what every runtime does

    def open(self, host: Host) -> AbstractContextManager[None]:
        return self._reference.open(host)

    def close(self) -> None:
        self._programs.clear()
        self._choice.forget()
        self._loops.forget()
        self._shared.forget()

    def placed(self, task: Task) -> Task:
        return self._residence.placed(task)

    def for_server(self) -> Callable[[Request[Any]], Any]:
        return Cohort(*self._settings).answer

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        waiting = iter(jobs)
        while some := list(islice(waiting, MOST_CLIENTS)):
            yield from self._together(some)

    def answer(self, request: Request[Any]) -> Any:
        (answer,) = self.answers([request])
        return answer

    def answers(self, requests: Sequence[Request[Any]]) -> list[Any]:
        answers = self._answered(requests)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    # ---- clients

    def _together(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        """Advances every client to its next request, answers all of them, and so on."""
        steps: dict[ClientId, Step] = {}
        answers: dict[ClientId, Any] = {}
        copies: Copies = {}
        for job in jobs:
            begun = Step.begun(job, self.store, self._shared, copies)
            if isinstance(begun, Failure):
                yield job.client, begun
            else:
                steps[job.client], answers[job.client] = begun, None
        try:
            while answers:
                requests: dict[ClientId, Request[Any]] = {}
                for client, answer in answers.items():
                    found = steps[client].advanced(answer, self.store)
                    if isinstance(found, Answer | Failure):
                        yield client, found
                    else:
                        requests[client] = found
                answers = dict(zip(requests, self._answered(list(requests.values())), strict=True))
        finally:
            for step in steps.values():
                step.close()

    # ---- requests

    def _answered(self, requests: Sequence[Request[Any]]) -> list[Any]:
        """The answer to each request, or the exception that it raised."""
        with unplaced():
            return self._grouped(requests)

    def _grouped(self, requests: Sequence[Request[Any]]) -> list[Any]:
        answers: list[Any] = [None] * len(requests)
        groups: dict[Hashable, list[tuple[int, Loop]]] = {}
        for i, request in enumerate(requests):
            loop = self._loop(request)
            if loop is None:
                answers[i] = self._alone(request)
            else:
                groups.setdefault((loop.key, self._store_id(loop)), []).append((i, loop))
        for part in [part for group in groups.values() for part in divided(requests, group)]:
            for (i, _), answer in zip(part, self._group(requests, part), strict=True):
                answers[i] = answer
        return answers

    def _loop(self, request: Request[Any]) -> Loop | None:
        """The request as a loop; None if it cannot be done together with others."""
        if isinstance(request, PrivateFit):  # guard: private-fits-are-not-lowered
            self._warn("clients are answered one by one: their gradients are clipped and noised by the reference")
            return None
        try:
            if not len(request.data):
                return None  # there is no step to record
            loop = self._loops.of(request)
            hash((loop.key, self._store_id(loop)))
        except BaseException as error:
            let_pass(error)
            self._warn(f"clients are answered one by one: {type(error).__name__}: {error}")
            return None
        if loop.draws:
            self._warn("clients are answered one by one: their work draws from torch's own generator, as dropout does")
            return None
        return loop

    def _warn(self, message: str) -> None:
        """Once in a run: what cannot be done together cannot be in any round."""
        if message not in self._warned:
            self._warned.add(message)
            log.warning(message)

    def _group(self, requests: Sequence[Request[Any]], group: Sequence[tuple[int, Loop]]) -> list[Any]:
        """The answers of requests that are alike, in waves if they do not fit together."""
        done: list[Any] = []
        while len(done) < len(group):
            rest = group[len(done) :]
            wave = rest[: min(self._most_at_once, clients_at_once([loop for _, loop in rest], self.device))]
            try:
                found = self._wave([loop for _, loop in wave])
                requests[wave[0][0]].networks.check_unchanged()
                done += self._checked([requests[i] for i, _ in wave], found, [loop.num_steps for _, loop in wave])
            except torch.OutOfMemoryError as error:
                freed = _freed(error)
                self._forget()
                if len(wave) == 1:
                    done.append(freed)
                    continue
                self._most_at_once = max(1, len(wave) // 2)
                log.warning("out of memory with %d clients at once; retrying with %d", len(wave), self._most_at_once)
            except BaseException as error:
                let_pass(error)
                # One client's data may be what went wrong: each is answered, or fails, on its own.
                log.warning("a group of %d was given up (%s: %s); one by one", len(wave), type(error).__name__, error)
                _freed(error)
                self._forget()
                done += [self._alone(requests[i]) for i, _ in wave]
        return done

    def _checked(self, requests: Sequence[Request[Any]], answers: list[Any], num_steps: Sequence[int]) -> list[Any]:
        """The answers; for a fit that did not stay finite, the exception that explains it."""
        if not isinstance(requests[0], Fit):
            wants_cpu = isinstance(requests[0], Map) and requests[0].to_cpu
            return moved_together(answers, CPU) if wants_cpu else answers
        are_good = are_finite([((params, folded, states), [losses]) for params, folded, losses, states in answers])
        losses = torch.stack([losses for _, _, losses, _ in answers]).tolist()
        means = [total / steps for total, steps in zip(losses, num_steps, strict=True)]
        fitted = [Fitted(a[0], a[1], a[3], mean) for a, mean in zip(answers, means, strict=True)]
        triples = zip(requests, fitted, are_good, strict=True)
        return [answer if is_good else self._explained(request) for request, answer, is_good in triples]

    def _explained(self, request: Any) -> Exception:
        with on(self.device):
            return explained(request, self._reference.answer)

    def _alone(self, request: Request[Any]) -> Any:
        try:
            with on(self.device):
                return self._reference.answer(request)
        except BaseException as error:
            let_pass(error)
            return _freed(error)

    def _wave(self, loops: Sequence[Loop]) -> list[Any]:
        order = sorted(range(len(loops)), key=lambda i: -loops[i].num_steps)  # executors want the longest first
        sorted_loops = [loops[i] for i in order]
        executor = self._executor_for(sorted_loops)
        self._run(executor, sorted_loops)
        results = {i: executor.buffers.result(k, loops[i]) for k, i in enumerate(order)}
        return [results[i] for i in range(len(loops))]

    def _run(self, executor: Executor, loops: Sequence[Loop]) -> None:
        steps = [loop.num_steps for loop in loops]
        executor.prepare(steps)
        executor.buffers.load(loops)
        if self.device.type == "cpu":
            executor.run(steps)
            return
        new_event: Any = torch.cuda.Event
        begin, end = new_event(enable_timing=True), new_event(enable_timing=True)
        begin.record()
        executor.run(steps)
        end.record()
        self.spans.append(Span(type(loops[0].body).__name__, type(executor).__name__, sum(steps), begin, end))

    def _executor_for(self, loops: Sequence[Loop]) -> Executor:
        name = self._choice.of(loops, lambda name: self._tried(name, loops))
        return self._program(name, loops)

    def _tried(self, name: ExecutorName, loops: Sequence[Loop]) -> float:
        """Seconds for one step of one client, when all clients are at work."""
        executor = self._program(name, loops)
        steps = [min(loop.num_steps, TRIAL_STEPS) for loop in loops]
        executor.prepare(steps)
        executor.buffers.load(loops)
        torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        executor.run(steps)
        torch.cuda.synchronize(self.device)
        return (time.perf_counter() - begin) / sum(steps)

    def _program(self, name: ExecutorName, loops: Sequence[Loop]) -> Executor:
        """A program for these loops, from an earlier round if there is one with room for them."""
        store, common = self._residence.store_of(loops[0].data), name != "streams" and are_common(loops)
        key = (name, loops[0].key, self._store_id(loops[0]), common)
        program = self._programs.get(key)
        if program is None or not program.buffers.takes(loops):
            self._programs.pop(key, None)
            kind = EXECUTORS[name]
            self._programs[key] = kind(Buffers(loops, store, self.device, kind.interleaved, common))
            while len(self._programs) > MOST_PROGRAMS:
                self._programs.popitem(last=False)
        self._programs.move_to_end(key)
        return self._programs[key]

    def _store_id(self, loop: Loop) -> int | None:
        store = self._residence.store_of(loop.data)
        return None if store is None else id(store.x)

    def _forget(self) -> None:
        self._programs.clear()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()


def _freed(error: BaseException) -> BaseException:
    """The error without the tensors that its frames hold, since the next work may need their memory. The traceback
    still says where it was raised."""
    traceback.clear_frames(error.__traceback__)
    rest = error.__traceback__ and error.__traceback__.tb_next
    return error.with_traceback(rest or error.__traceback__)  # the first frame would hold all other answers
