"""Where the runs of a comparison are done on this machine: its cores, and each of its GPUs."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from protofed.runs.config.config import Config
from protofed.runs.mps import PIPES
from protofed.runs.run_process import RunProcess

RUNS_PER_GPU = 2
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass
class Place:
    """The cores, or a GPU, and the processes that work there."""

    name: str
    width: int
    """Runs at the same time."""
    device: int | None = None
    """The GPU's number; None: the cores."""
    takes_any_gpu_run: bool = False
    """Whether runs that name no GPU may be done here."""
    environment: dict[str, str] = field(default_factory=dict)
    """What processes have in their environment, by which they see this GPU."""
    processes: list[RunProcess] = field(default_factory=list)

    @property
    def busy(self) -> list[RunProcess]:
        return [process for process in self.processes if process.identity]

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
    width, names = workers or RUNS_PER_GPU, visible_gpus()
    numbers = {torch.device(config.runtime.device or "cuda").index for config in on_gpus}
    if numbers == {None}:
        called = [f"GPU {number}" if len(names) > 1 else "the GPU" for number in range(len(names))]
        only = [{VISIBLE: name} if name else {} for name in names]
        return cores + [
            Place(called[k], width, k, takes_any_gpu_run=True, environment=only[k]) for k in range(len(names))
        ]
    named = sorted({number or 0 for number in numbers})
    return cores + [Place(f"GPU {k}", width, k, k == 0, gpu_environment()) for k in named]


def gpu_environment() -> dict[str, str]:
    """By which a process sees the GPUs that this one sees."""
    names = visible_gpus()
    return {VISIBLE: ",".join(names)} if all(names) else {}


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs that this process sees, by names that mean the same in every process. Numbers do not: MPS counts the
    GPUs that its daemon sees from 0. The name of the only GPU of a machine is not needed and empty."""
    count = torch.cuda.device_count()
    if environment.get(VISIBLE) is None and count <= 1:
        return [""]
    given = [name.strip() for name in environment.get(VISIBLE, "").split(",")][:count]
    if all(name.startswith(("GPU-", "MIG-")) for name in given):
        return given
    return [f"GPU-{torch.cuda.get_device_properties(number).uuid}" for number in range(count)]
