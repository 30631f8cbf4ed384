"""Runs of a thousand rounds (R11), and clocks that jump (R12)."""

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from clocks import ManualClock
from faults.kills import fingerprint, folder_in_memory, in_own_process
from protofed.api.contexts import ClientContext, Reply
from protofed.engine.federation import Federation
from protofed.engine.training import Training
from protofed.methods.moon import Moon
from protofed.runs.results import Round
from protofed.runs.runner import Experiment, Silent, execute
from protofed.runs.store.folder import RunFolder
from protofed.runtimes.jobs import Runtime
from protofed.runtimes.sequential import Sequential
from protofed.runtimes.workers import Workers
from run_doubles import small_experiment, small_task


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with folder_in_memory() as folder:
        yield folder


# ---- R11: a long run


class Watch(Silent):
    """Memory and open files after every round."""

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.handles: list[int] = []

    def round(self, result: Round) -> None:
        self.pages.append(int(Path("/proc/self/statm").read_text().split()[1]))
        self.handles.append(len(os.listdir("/proc/self/fd")))


def watched(folder: str, rounds: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    watch, run = Watch(), RunFolder(Path(folder))
    execute(replace(small_experiment("moon", int(rounds)), evaluate_clients_every=1), run, observer=watch)
    return {"pages": watch.pages, "handles": watch.handles, "lines": run.read_rounds().splitlines()}


def assert_steady(folder: Path, rounds: int, settled: int) -> None:
    """After its first rounds a run takes no more memory and opens no more files, and its lines are short."""
    found = in_own_process("faults.test_long_runs.watched", folder, rounds)
    growth = max(found["pages"][settled:]) / found["pages"][settled - 1] - 1
    longest = max(len(line.encode()) / json.loads(line)["participants"] for line in found["lines"])
    print(
        f"{rounds} rounds: memory +{100 * growth:.2f} %, {found['handles'][-1]} open files, {longest:.0f} bytes a line"
    )
    assert len(found["lines"]) == rounds
    assert growth <= 0.05
    assert len(set(found["handles"])) == 1
    assert longest <= 1024


def test_a_hundred_rounds_take_no_more_memory_than_twenty(tmp_path: Path) -> None:
    """R11, in small."""
    assert_steady(tmp_path / "run", 100, 20)


@pytest.mark.slow
def test_a_thousand_rounds_take_no_more_memory_than_a_hundred(tmp_path: Path) -> None:
    """R11."""
    assert_steady(tmp_path / "run", 1000, 100)


# ---- R12: a clock that jumps

NAP, HOUR = 60.0, 3600


@dataclass(frozen=True)
class Dozing(Moon):
    """The second client sleeps longer than anybody waits."""

    sleep: Callable[[float], None] = time.sleep

    async def train(self, local: ClientContext, message: Any, memory: Any) -> Reply[Any, Any]:
        if local.id == "c1":
            self.sleep(NAP)
        return await super().train(local, message, memory)


def dozing(runtime: Runtime, sleep: Callable[[float], None], deadline: float = 0.0) -> Experiment:
    training = Training(rounds=2, epochs=1, batch_size=8, deadline=deadline)
    return Experiment(Federation(Dozing(sleep=sleep), small_task(), training, runtime), identity="dozing")


@pytest.fixture
def jumping_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Whoever looks at the clock on the wall finds it an hour ahead, an hour behind, in turn. Gives how many looked."""
    now, places, seen = time.time, itertools.cycle([HOUR, -HOUR]), itertools.count()

    def jumped() -> float:
        next(seen)
        return now() + next(places)

    monkeypatch.setattr(time, "time", jumped)
    monkeypatch.setattr(time, "time_ns", lambda: int(jumped() * 1e9))
    for name in ("localtime", "gmtime", "ctime"):
        plain = getattr(time, name)
        monkeypatch.setattr(time, name, lambda at=None, plain=plain: plain(jumped() if at is None else at))
    write = time.strftime
    monkeypatch.setattr(time, "strftime", lambda form, at=None: write(form, at or time.localtime(jumped())))
    return lambda: next(seen)


@pytest.mark.parametrize("runtime", [Sequential, lambda: Workers(2)], ids=["sequential", "workers"])
def test_an_hour_forth_and_back_changes_no_round_and_no_deadline(
    runtime: Callable[[], Runtime], tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R12. In one process nobody really sleeps: a clock is put forward."""
    sleep = time.sleep
    if runtime is Sequential:
        clock = ManualClock()
        monkeypatch.setattr(time, "monotonic", clock.monotonic)
        sleep = clock.advance
    begin = time.monotonic()
    execute(dozing(runtime(), lambda seconds: None))  # as long as rounds take on this machine now
    deadline = min(max(2.0, 10 * (time.monotonic() - begin)), NAP / 4)
    steady = dozing(runtime(), sleep, deadline)
    execute(steady, RunFolder(tmp_path / "steady"))
    looked = request.getfixturevalue("jumping_clock")
    jumping = dozing(runtime(), sleep, deadline)
    result = execute(jumping, RunFolder(tmp_path / "jumping"))
    late = [{client: why.partition(":")[0] for client, why in r.failures.items()} for r in result.rounds]
    unasked = {"c2": "LATE"} if runtime is Sequential else {}
    assert late == [{"c1": "LATE"} | unasked] * 2
    assert all(0 <= value < HOUR / 2 for r in result.rounds for value in r.seconds.values())
    assert fingerprint(tmp_path / "jumping", jumping) == fingerprint(tmp_path / "steady", steady)
    assert looked() > 0, "nobody looked at the clock: the test shows nothing"
