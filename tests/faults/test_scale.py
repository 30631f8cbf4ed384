"""Ten thousand clients, a hundred in a round (X1). Each run has a process of its own, whose memory is measured."""

import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from faults.kills import folder_in_memory, in_own_process
from protofed import METHODS, Data, Task
from protofed.engine.federation import Federation
from protofed.engine.training import Training
from protofed.nn.networks import Parts
from protofed.runs.runner import Experiment, Silent, execute
from protofed.runs.store import disk
from protofed.runs.store.folder import RunFolder

CLASSES, FEATURES, INPUTS, EXAMPLES, SAMPLED = 100, 512, 64, 4, 100


def parts(client: str) -> Parts:
    return {"features": nn.Linear(INPUTS, FEATURES), "classifier": nn.Linear(FEATURES, CLASSES)}


def crowd(clients: int) -> Task:
    """Clients with four examples each. What they keep, 0.3 MB of weights, is more in all than is held in memory."""
    draw = torch.Generator().manual_seed(3)
    labels = torch.arange(CLASSES * EXAMPLES) % CLASSES
    pool = Data.of(torch.randn(len(labels), INPUTS, generator=draw), labels)
    rows = torch.randint(len(pool), (clients, EXAMPLES), generator=draw)
    return Task({f"client-{k:05d}": pool.rows(rows[k]) for k in range(clients)}, {}, CLASSES, parts)


def experiment(clients: int, rounds: int) -> Experiment:
    training = Training(rounds=rounds, epochs=1, batch_size=EXAMPLES, fraction=SAMPLED / clients)
    return Experiment(Federation(METHODS["fedproto"](), crowd(clients), training), identity="crowd")


@dataclass(frozen=True)
class Needs:
    """What a run needed, in megabytes, bytes and seconds of processor time."""

    peak: float
    server: list[float]
    """Of each round: the server's own work and saving."""
    written: list[int]
    """Bytes of each round's save."""
    handles: int
    resume: float
    known: int
    """Clients that took part."""


class Meter(Silent):
    """What each save writes, and how many files are open."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self.handles: list[int] = []
        self._write, self._bytes = disk.write, 0

    def write(self, folder: int, name: str, data: bytes) -> None:
        self._bytes += len(data)
        self._write(folder, name, data)

    def begin(self, federation: Federation, done: int) -> None:
        self._bytes = 0

    def round(self, result: object) -> None:
        self.written.append(self._bytes)
        self.handles.append(len(os.listdir("/proc/self/fd")))
        self._bytes = 0


def peak_memory() -> float:
    """Of this process, in megabytes; getrusage would count what the process had that began it."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


def measured(folder: str, clients: str, rounds: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    meter, run, whole = Meter(), RunFolder(Path(folder)), experiment(int(clients), int(rounds))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "write", meter.write)
        patch.setattr(time, "perf_counter", time.process_time)  # so that a run's seconds are processor time
        result = execute(whole, run, observer=meter)
    begin = time.process_time()
    resumed = execute(experiment(int(clients), int(rounds)), run, resume=True)
    needed = Needs(
        peak=peak_memory(),
        server=[r.seconds["aggregate"] + r.seconds["checkpoint"] for r in result.rounds],
        written=meter.written,
        handles=max(meter.handles),
        resume=time.process_time() - begin,
        known=len(resumed.state.receipts),
    )
    return asdict(needed)


def needs(folder: Path, clients: int, rounds: int) -> Needs:
    found = Needs(**in_own_process("faults.test_scale.measured", folder, clients, rounds))
    print(
        f"{clients} clients, {rounds} rounds, {found.known} took part: {found.peak:.0f} MB, server at most "
        f"{max(found.server):.2f} s a round, {max(found.written)} bytes a save, resumed in {found.resume:.2f} s, "
        f"{found.handles} open files"
    )
    return found


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with folder_in_memory() as folder:
        yield folder


def assert_within_limits(found: Needs) -> None:
    assert found.peak <= 1024
    assert 0 < max(found.server) <= 5
    assert found.resume <= 10
    assert found.handles <= 1024
    assert max(found.written) < 1.05 * min(found.written), "a save writes what the clients of its round remember"


def test_a_thousand_clients_fit_and_are_resumed_in_time(tmp_path: Path) -> None:
    """X1, in small."""
    found = needs(tmp_path / "run", 1000, 5)
    assert found.known > 2 * SAMPLED
    assert_within_limits(found)


@pytest.mark.slow
def test_ten_thousand_clients_need_little_more_than_a_thousand(tmp_path: Path) -> None:
    """X1. What clients remember lies on the disk, and a save costs as much as a round has clients."""
    few, many = needs(tmp_path / "few", 1000, 20), needs(tmp_path / "many", 10_000, 20)
    assert many.known > 15 * SAMPLED
    assert_within_limits(few)
    assert_within_limits(many)
    assert many.peak <= 1.2 * few.peak
    assert all(a <= 1.05 * b for a, b in zip(many.written, few.written, strict=True))
