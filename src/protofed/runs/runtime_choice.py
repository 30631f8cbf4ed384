"""The settings of a runtime, and how one is chosen."""

import logging
import os
import sys
import time
from dataclasses import dataclass
from math import ceil
from typing import Annotated, Literal

import torch
from annotated_types import Ge

from protofed import tree
from protofed.api.task import Task
from protofed.engine.federation import Training
from protofed.errors import BadInput
from protofed.nn.networks import Networks
from protofed.nn.precision import Precision
from protofed.runtimes.base import Runtime
from protofed.runtimes.cohort.cohort import Cohort
from protofed.runtimes.sequential import Sequential
from protofed.runtimes.workers import Workers

log = logging.getLogger(__name__)

WORTH_A_PROCESS = 0.003
"""Seconds of a client's steps in a round from which on several processes pay; less takes less time than handing it out.
"""
LONG = 1.0
"""Seconds of a step that need not be tried again; what a first one sets up takes less."""


@dataclass(frozen=True)
class RuntimeSettings:
    name: Literal["auto", "sequential", "workers", "cohort"] = "auto"
    """How clients are trained: one after another, in several processes, or all together on a GPU. `auto` takes the
    cohort if there is a GPU, and on the CPU workers or sequential, whichever is faster for the task."""
    threads: Annotated[int, Ge(1)] = 1
    """Threads of torch: pinned, since their number changes the last bits of a result."""
    workers: Annotated[int, Ge(0)] = 0
    """Processes of the runtime `workers`; 0 for one on each core."""
    device: str = ""
    """Where to compute, such as `cuda:1`; empty for the first GPU if there is one and the runtime can use it."""
    precision: Precision = "float32"
    """Of matrix products and convolutions on a GPU; weights, sums and losses are always float32."""
    executor: Literal["auto", "streams", "stacked"] = "auto"
    """How the cohort is trained together: `auto` tries both ways and takes the faster. Name one if results have to
    repeat to the last bit."""
    deterministic: bool = True
    """Whether a GPU uses only algorithms that give the same bits every time."""

    def build(self, task: Task, training: Training, alone: bool = True) -> Runtime:
        """The runtime; `alone` if no other run shares the cores."""
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
        if self.device != "cpu" and torch.cuda.is_available():
            name = "cohort"
        elif (
            alone
            and sys.platform == "linux"
            and len(os.sched_getaffinity(0)) > 1
            and len(task.clients) * training.fraction > 1
            and _steps(task, training) * step_seconds(task, training.batch_size) >= WORTH_A_PROCESS
        ):
            name = "workers"
        else:
            name = "sequential"
        log.info("runtime %s", name)
        return name


def _steps(task: Task, training: Training) -> float:
    """A client's steps in a round, on average."""
    batches = sum(ceil(len(data) / training.batch_size) for data in task.clients.values())
    return batches * training.epochs / len(task.clients)


def step_seconds(task: Task, batch_size: int) -> float:
    """How long a step takes, about: a batch of the first client goes through the first part of its network, forward and
    backward. The best of three tries counts, since the first sets things up."""
    client, data = next(iter(task.clients.items()))
    index = data.index[:batch_size]
    tries: list[float] = []
    try:
        networks = Networks(lambda: task.model(client))
        params = {name: leaf.requires_grad_(name in networks.trainable) for name, leaf in networks.init(0).items()}
        part, x = networks.parts[0], task.transform.clean(data.inputs(index))
        own = [leaf for name, leaf in params.items() if name.startswith(f"{part}.") and leaf.requires_grad]
        while len(tries) < 3 and max(tries, default=0) < LONG:
            begin = time.perf_counter()
            output = tree.leaves(networks.call(part, params, False, x))
            torch.autograd.grad([leaf.sum() for leaf in output], own, allow_unused=True)
            tries.append(time.perf_counter() - begin)
    except Exception as error:  # if something is wrong, the run will say so
        log.info("how long a step takes could not be tried: %s: %s", type(error).__name__, error)
    return min(tries, default=0.0)
