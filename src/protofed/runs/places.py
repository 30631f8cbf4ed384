"""Where the runs of a comparison are done on this machine: its cores, and each of its GPUs."""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from protofed.runs.config.config import Config
from protofed.runs.gpu_sharing import FIRST, Sharing, first_at_once
from protofed.runs.mps import PIPES
from protofed.runs.run_process import RunProcess

log = logging.getLogger(__name__)

SPARE, CONTEXT_BYTES = 1.5, 2**30
"""What another run may need of a GPU's memory beyond what a run has had for its tensors."""
STARTS_LEFT = 3
"""Another process is started only if all runs together still take so many times as long as a process needs to start.
Else its run is done sooner by a process that is there."""
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass
class Place:
    """The cores, or a GPU, and the processes that work there."""

    name: str
    most: int
    """Runs at the same time."""
    sharing: Sharing | None = None
    """Finds how many of these are best; None: all."""
    device: int | None = None
    """The GPU's number; None: the cores."""
    takes_any_gpu_run: bool = False
    """Whether runs that name no GPU may be done here."""
    environment: dict[str, str] = field(default_factory=dict)
    """What processes have in their environment, by which they see this GPU."""
    processes: list[RunProcess] = field(default_factory=list)

    @property
    def width(self) -> int:
        return self.sharing.width if self.sharing else self.most

    @property
    def busy(self) -> list[RunProcess]:
        """The processes that have a run, the oldest run first."""
        return sorted((process for process in self.processes if process.identity), key=lambda process: process.began)

    def share(self, waiting: Sequence[Config]) -> None:
        """Lets as many runs work as is found to be best, the oldest ones. `waiting`: runs that could be begun."""
        if not self.sharing:
            return
        busy, said = self.busy, self.sharing.said
        working, others = busy[: self.width], busy[self.width :]
        beats = {process.identity: process.notes.beat for process in working}
        is_calm = all(process.notes.is_paused for process in others)
        room = partial(self._room, len(others), waiting)
        self.sharing.update(time.monotonic(), beats, is_calm, room)
        for rank, process in enumerate(busy):
            process.notes.should_pause = rank >= self.width
        if self.sharing.said != said:
            log.info("%s: %s", self.name, self.sharing.said)

    def _room(self, paused: int, waiting: Sequence[Config], rounds_per_second: float) -> int:
        """How many more runs could work: those that are paused, and those that wait and fit into the GPU's memory, in
        processes that are there or worth starting. They may need more memory than those that are there."""
        memory = [process.notes.memory for process in self.processes]
        had = max((had for had, _ in memory), default=0)
        free = min((free for _, free in memory if free), default=0)
        fits, idle = int(free / (SPARE * (had + CONTEXT_BYTES))), len(self.processes) - len(self.busy)
        start = max((process.start_seconds for process in self.processes), default=0.0)
        rounds = sum(config.training.rounds for config in waiting)
        rounds += sum(max(0, process.rounds - process.notes.beat.rounds) for process in self.busy)
        is_worth_starting = rounds >= STARTS_LEFT * start * rounds_per_second
        return paused + min(len(waiting), fits if is_worth_starting else min(fits, idle))

    def work_at_once(self, pipes: Mapping[str, str]) -> None:
        """Kernels of several processes run at the same time: `pipes` is what processes need for it in their
        environment."""
        self.environment |= pipes
        if self.sharing:
            self.sharing = Sharing(self.most, first_at_once(self.most, memory_of(self.device or 0)))

    def renew(self) -> None:
        """After a fatal error on the GPU: new processes share it with nobody. Those at work may have met the error
        too, and then say so."""
        self.environment = {key: value for key, value in self.environment.items() if key != PIPES}
        for process in [process for process in self.processes if not process.identity]:
            self.processes.remove(process)
            process.close(wait=False)

    def takes(self, config: Config) -> bool:
        if not is_on_gpu(config):
            return self.device is None
        number = torch.device(config.runtime.device or "cuda").index
        return self.takes_any_gpu_run if number is None else number == self.device


def is_on_gpu(config: Config) -> bool:
    return config.runtime.numerics()["device"] == "cuda"


def places(configs: Sequence[Config], workers: int | None = None) -> list[Place]:
    """Where these runs are done. If none names its GPU, they are spread over all that are visible, and a process sees
    only its own. Otherwise each is where it says, and those that say nothing are on the first GPU."""
    on_gpus = [config for config in configs if is_on_gpu(config)]
    cores = [Place("the CPU", workers or os.cpu_count() or 1)] if len(on_gpus) < len(configs) else []
    if not on_gpus:
        return cores
    numbers = {torch.device(config.runtime.device or "cuda").index for config in on_gpus}
    if numbers == {None}:
        names = visible_gpus()
        environments = [{VISIBLE: name} if name else {} for name in names]
        gpus = [Place(f"GPU {k}", 0, None, k, True, environment) for k, environment in enumerate(environments)]
    else:
        named = sorted({number or 0 for number in numbers})
        gpus = [Place(f"GPU {k}", 0, None, k, k == 0, gpu_environment()) for k in named]
    for place in gpus:
        place.most = workers or max(FIRST, (os.cpu_count() or 1) // len(gpus))
        place.sharing = None if workers else Sharing(place.most)
    return cores + gpus


def memory_of(gpu: int) -> int:
    """The bytes of a GPU; 0 if CUDA does not show it."""
    return torch.cuda.get_device_properties(gpu).total_memory if gpu < torch.cuda.device_count() else 0


def gpu_environment() -> dict[str, str]:
    """By which a process sees the GPUs that this one sees."""
    names = visible_gpus()
    return {VISIBLE: ",".join(names)} if all(names) else {}


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs that this process sees, by names that mean the same in every process. Numbers do not: MPS counts the
    GPUs that its daemon sees from 0. The name of the only GPU of a machine is not needed and empty."""
    count = torch.cuda.device_count()
    if not count or (environment.get(VISIBLE) is None and count == 1):
        return [""]
    given = [name.strip() for name in environment.get(VISIBLE, "").split(",")][:count]
    if all(name.startswith(("GPU-", "MIG-")) for name in given):
        return given
    return [f"GPU-{torch.cuda.get_device_properties(number).uuid}" for number in range(count)]
