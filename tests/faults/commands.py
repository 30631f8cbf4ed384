"""`protofed run` in processes of their own, which are told to end."""

import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from clocks import processor_time_of
from faults.kills import Ended, awaited, forked
from protofed.cli import start
from protofed.runs.store.folder import RunFolder

EXPERIMENT = """
[task]
name = "custom"
kind = "tables"
label = "label"
path = "{sites}"

[method]
name = "{method}"

[training]
rounds = {rounds}
epochs = {epochs}
batch_size = 8
fraction = 0.5

[runtime]
name = "{runtime}"
"""


def written(folder: Path, rounds: int = 12, epochs: int = 1, runtime: str = "sequential", method: str = "moon") -> Path:
    """An experiment on the tables of three sites."""
    draw, sites = random.Random(0), folder / "sites"
    sites.mkdir(exist_ok=True)
    for site in "abc":
        rows = [f"{draw.gauss(k % 2, 1):.4f},{draw.gauss(0, 1):.4f},{'yes' if k % 2 else 'no'}" for k in range(24)]
        (sites / f"{site}.csv").write_text("\n".join(["height,age,label", *rows]))
    path = folder / f"{method}-{runtime}.toml"
    path.write_text(EXPERIMENT.format(sites=sites, rounds=rounds, epochs=epochs, runtime=runtime, method=method))
    return path


@dataclass
class Command:
    """`protofed run` in a process of its own."""

    experiment: Path
    folder: RunFolder
    options: tuple[str, ...] = ()
    in_own_group: bool = False
    """Whether it leads a process group, as a shell's command does."""
    prepare: Callable[[], object] = lambda: None
    """Called in the new process before anything else."""

    @property
    def errors(self) -> Path:
        """What it says on its standard error goes there."""
        return self.experiment.with_suffix(".err")

    def begin(self) -> int:
        """The process id, once the command is about to start."""
        ready, told = os.pipe()

        def work() -> None:
            if self.in_own_group:
                os.setpgid(0, 0)
            self.prepare()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(os.open(self.errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
            words = ["run", self.experiment, "--folder", self.folder.path, "--resume", *self.options]
            sys.argv = ["protofed", *map(str, words)]
            os.write(told, b"x")
            start.main()

        child = forked(work)
        os.close(told)
        os.read(ready, 1)
        os.close(ready)
        return child

    def heard(self) -> bool:
        """Whether it has said that it was told to end."""
        return b"stopping after this round" in self.errors.read_bytes()


def told_to_end(child: int, number: int) -> Ended:
    """How it ended after a signal, as a shell tells it, and how much processor time it took for that."""
    begin = processor_time_of(child)
    os.kill(child, number)
    code, processor_seconds = awaited(child)
    return Ended(code if code >= 0 else 128 - code, processor_seconds - begin)


def has_worked_or_ended(child: int, seconds: float) -> bool:
    """Whether a process has used so much processor time; one that has ended uses no more."""
    state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
    return state == "Z" or processor_time_of(child) >= seconds


def children_of(pid: int) -> set[int]:
    """The processes that a process has begun, and theirs."""
    own = {int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()}
    return own.union(*map(children_of, own))
