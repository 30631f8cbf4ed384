"""The settings of a runtime, how `auto` chooses one, and what of it decides the bits of a result."""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Annotated, Literal

import torch
from annotated_types import Ge

from protofed import tree
from protofed.api.task import Task
from protofed.engine.training import Training
from protofed.errors import BadInput
from protofed.nn.networks import Networks
from protofed.nn.precision import Precision
from protofed.runtimes.cohort.cohort import Cohort
from protofed.runtimes.jobs import Runtime
from protofed.runtimes.sequential import Sequential
from protofed.runtimes.workers import Workers, may_start_processes

log = logging.getLogger(__name__)

MIN_WORKER_SECONDS = 0.003
"""Seconds that a client trains in a round. With less, handing the work to another process costs more than it saves."""
SLOW_STEP = 1.0
"""Seconds. A step this slow is timed once: the setup of a first step is small beside it."""

Numerics = dict[str, str | int | bool]
"""What of a runtime decides the bits of a result. Runtimes with equal numerics give equal bits."""


@dataclass(frozen=True)
class RuntimeSettings:
    name: Literal["auto", "sequential", "workers", "cohort"] = "auto"
    """How clients are trained: one after another, in several processes, or all together on a GPU. `auto` uses the
    cohort if there is a GPU. On the CPU it uses workers or sequential, whichever is faster for the task."""
    threads: Annotated[int, Ge(1)] = 1
    """Threads of torch. The number is fixed because it changes the last bits of a result. With more than one, `auto`
    uses sequential on the CPU: the processes of workers have one each."""
    workers: Annotated[int, Ge(0)] = 0
    """Processes of the runtime `workers`; 0: one per core."""
    device: str = ""
    """Where to compute, such as `cuda:1`. Empty: the first GPU, if there is one and the runtime can use it."""
    precision: Precision = "float32"
    """Precision of matrix products and convolutions on a GPU. Weights, sums and losses are always float32."""
    executor: Literal["auto", "streams", "stacked"] = "auto"
    """How the cohort trains clients together. `auto` times both ways and uses the faster. Name one if results must
    repeat to the last bit."""
    deterministic: bool = True
    """Whether a GPU uses only algorithms that give the same bits every time."""

    def numerics(self) -> Numerics:
        """Known before the task is built: `auto` depends on the task only for sequential or workers, which give equal
        bits on one thread and are both called `reference` here. With more threads `auto` is sequential, and workers,
        whose clients still have one each, have a name of their own. On a GPU the executor `auto` is chosen by timing,
        so it stays."""
        is_cohort = self.name == "cohort" or (self.name == "auto" and self._uses_gpu())
        default = "cuda" if is_cohort and torch.cuda.is_available() else "cpu"
        device = torch.device(self.device or default).type
        reference = "workers" if self.name == "workers" and self.threads > 1 else "reference"  # guard: threads-in-hash
        executor: str = self.executor if is_cohort else reference
        return {
            "device": device,
            "executor": "streams" if executor == "auto" and device == "cpu" else executor,
            "precision": self.precision,
            "deterministic": self.deterministic or device == "cpu",
            "threads": self.threads,
        }

    def _uses_gpu(self) -> bool:
        """Whether `auto` finds a GPU that it may use."""
        return self.device != "cpu" and torch.cuda.is_available()

    def build(self, task: Task, training: Training, alone: bool = True) -> Runtime:
        """The runtime. `alone`: no other run shares the cores."""
        with pinned_threads(self.threads):  # a step is timed as the run will take it
            name = self._chosen(task, training, alone) if self.name == "auto" else self.name
        if name != "cohort" and self.precision != "float32" and not self.device.startswith("cuda"):
            raise BadInput(f"runtime.precision = {self.precision!r} is for GPUs, and this run would be on the CPU")
        match name:
            case "cohort":
                return Cohort(self.device, self.precision, self.executor, self.deterministic)
            case "workers":
                return Workers(self.workers)
        return Sequential(self.device or "cpu", self.precision, self.deterministic)

    def _chosen(self, task: Task, training: Training, alone: bool) -> str:
        if self._uses_gpu():
            name = "cohort"
        elif (
            alone
            and self.threads == 1  # guard: threads-decide-auto
            and sys.platform == "linux"
            and may_start_processes()  # guard: no-children-of-daemons
            and len(os.sched_getaffinity(0)) > 1
            and len(task.clients) * training.fraction > 1
            and _steps(task, training) * step_seconds(task, training.batch_size) >= MIN_WORKER_SECONDS
        ):
            name = "workers"
        else:
            name = "sequential"
        log.info("runtime %s", name)
        return name


@contextlib.contextmanager
def pinned_threads(count: int) -> Iterator[None]:
    """Pins torch's threads: their number changes how sums are split, and so the last bits of a result."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _steps(task: Task, training: Training) -> float:
    """Mean number of steps of a client in a round."""
    batches = sum(ceil(len(data) / training.batch_size) for data in task.clients.values())
    return batches * training.epochs / len(task.clients)


def step_seconds(task: Task, batch_size: int) -> float:
    """Roughly how long a step takes: one batch of the first client through the first part of its network, forward and
    backward. The best of three, because the first one includes setup."""
    client, data = next(iter(task.clients.items()))
    index = data.index[:batch_size]
    tries: list[float] = []
    try:
        networks = Networks(lambda: task.model(client))
        params = {name: leaf.requires_grad_(name in networks.trainable) for name, leaf in networks.init(0).items()}
        part, x = networks.parts[0], task.transform.clean(data.inputs(index))
        weights = [leaf for name, leaf in params.items() if name.startswith(f"{part}.") and leaf.requires_grad]
        while len(tries) < 3 and max(tries, default=0) < SLOW_STEP:
            begin = time.perf_counter()
            output = tree.leaves(networks.call(part, params, False, x))
            torch.autograd.grad([leaf.sum() for leaf in output], weights, allow_unused=True)
            tries.append(time.perf_counter() - begin)
    except Exception as error:  # the run itself will report what is wrong
        log.info("a step could not be timed: %s: %s", type(error).__name__, error)
    return min(tries, default=0.0)
