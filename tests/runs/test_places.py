"""Where the runs of a comparison are done: which GPU, which processes, how many at a time."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from protofed.runs import places as module
from protofed.runs import run_process
from protofed.runs import sweep as sweeps
from protofed.runs.config import config
from protofed.runs.config.config import Config
from protofed.runs.gpu_sharing import Beat, Sharing
from protofed.runs.places import VISIBLE, Place, places, visible_gpus
from protofed.runs.run_process import CONTEXT, Answer, Notes, RunProcess
from protofed.runs.sweep import _Runs, sweep


def run(device: str, seed: int = 0) -> Config:
    training = {"rounds": 1, "epochs": 1, "seed": seed}
    sections = {"task": {"name": "minidigits"}, "method": {"name": "fedavg"}, "training": training}
    return config.parse({**sections, "runtime": {"device": device}}, "test")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=f"uuid{number}"))


@pytest.mark.usefixtures("two_gpus")
def test_runs_are_spread_over_all_gpus_and_a_process_sees_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    first, second = places([run("cuda")] * 8)
    assert (first.environment, second.environment) == ({VISIBLE: "GPU-uuid0"}, {VISIBLE: "GPU-uuid1"})
    assert (first.width, first.most) == (2, 4)
    assert first.takes(run("cuda"))
    assert second.takes(run("cuda"))


@pytest.mark.usefixtures("two_gpus")
def test_runs_that_name_a_gpu_are_done_there(monkeypatch: pytest.MonkeyPatch) -> None:
    cores, zero, one = places([run("cuda:1"), run("cuda"), run("cpu")])
    for device, expected in (("cuda:1", one), ("cuda", zero), ("cuda:0", zero), ("cpu", cores)):
        assert [place for place in (cores, zero, one) if place.takes(run(device))] == [expected]
    assert zero.environment == one.environment == {VISIBLE: "GPU-uuid0,GPU-uuid1"}


def test_on_the_cpu_there_is_one_run_for_each_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    (cores,) = places([run("cpu")] * 9)
    assert (cores.width, cores.sharing, cores.environment) == (7, None, {})


def test_the_gpu_is_not_part_of_what_names_a_run() -> None:
    assert run("cuda:1").identity == run("cuda").identity != run("cpu").identity


@pytest.mark.parametrize(
    ("given", "count", "names"),
    [
        (None, 0, [""]),
        ("", 0, [""]),
        (None, 1, [""]),
        (None, 2, ["GPU-uuid0", "GPU-uuid1"]),
        ("3", 1, ["GPU-uuid0"]),
        ("GPU-7a, GPU-9b", 2, ["GPU-7a", "GPU-9b"]),
        ("MIG-5c", 1, ["MIG-5c"]),
    ],
)
@pytest.mark.usefixtures("two_gpus")
def test_gpus_have_names_that_mean_the_same_everywhere(
    given: str | None, count: int, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert visible_gpus({} if given is None else {VISIBLE: given}) == names


class FakeProcess(RunProcess):
    """Starts no process. A test ends its runs."""

    def __init__(self, stop: Any, messages: Any, code_folders: list[str], environment: Mapping[str, str]) -> None:
        super().__init__(stop, messages, code_folders, environment)
        self.environment = environment

    def begin(self, config: Config, out: Path, on_gpu: bool) -> None:
        self.identity, self.answer = config.identity, Future()


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(("jobs", "shares"), [(None, [2, 2]), (3, [2, 1]), (1, [1, 0])])
def test_a_sweep_gives_each_gpu_its_share(
    jobs: int | None, shares: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeps, "RunProcess", FakeProcess)
    configs = {one.identity: one for one in (run("cuda", seed) for seed in range(6))}
    where = places([*configs.values()], jobs)
    runs = _Runs(configs, tmp_path, where, jobs, [], CONTEXT.Queue())
    assert runs.begin()
    assert [len(place.busy) for place in where] == shares
    ended = where[0].busy[0]
    ended.answer.set_result(Answer())
    runs.wait()
    runs.begin()
    assert [len(place.busy) for place in where] == shares
    assert ended.identity  # the process goes on with the next run
    assert len(runs.queue) == 6 - sum(shares) - 1


def place_with(notes: list[tuple[Beat, tuple[int, int]]]) -> Place:
    place = Place("the GPU", 8, sharing=Sharing(8), device=0)
    for number, (beat, memory) in enumerate(notes):
        process = RunProcess(CONTEXT.Event(), CONTEXT.Queue(), [], {})
        process.identity, process.began = str(number), number
        process.notes.add(beat, memory)
        place.processes.insert(0, process)
    return place


def test_a_gpu_without_a_run_is_no_trouble() -> None:
    place = place_with([])
    place.share([run("cuda")] * 3)
    assert place.width == 2


def test_the_runs_that_began_last_pause() -> None:
    place = place_with([(Beat(3, 1.0), (0, 2**40))] * 4)
    place.share([])
    assert [process.notes.should_pause for process in place.busy] == [False, False, True, True]
    assert [process.identity for process in place.busy] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(("had", "free", "room"), [(3, 48, 8), (3, 11, 1), (7, 11, 0)])
def test_memory_limits_the_number_of_runs(had: int, free: int, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run needs what the largest had and 1 GiB for its context, and half as much again."""
    place = place_with([(Beat(3, 1.0), (2 << 30, 99 << 30)), (Beat(3, 1.0), (had << 30, free << 30))])
    rooms: list[int] = []
    monkeypatch.setattr(place.sharing, "update", lambda now, beats, is_calm, room: rooms.append(room(1.0)))
    place.share([run("cuda")] * 10)
    assert rooms == [room]


@pytest.mark.parametrize(("seconds_of_start", "room"), [(2.0, 3), (4.0, 1)])
def test_no_process_is_started_for_the_last_seconds(
    seconds_of_start: float, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs with 7 of 10 rounds left, and three of one round that wait: 17 rounds at 2 rounds per second take 8.5 s,
    more than three starts of 2 s, and less than three of 4 s. One process is there that has no run."""
    place = place_with([(Beat(3, 1.0), (0, 2**40))] * 3)
    for process in place.processes:
        process.rounds, process._first_began, process._first_beat = 10, 1.0, 1.0 + seconds_of_start
    place.processes[0].identity = ""
    rooms: list[int] = []
    monkeypatch.setattr(place.sharing, "update", lambda now, beats, is_calm, room: rooms.append(room(2.0)))
    place.share([run("cuda")] * 3)
    assert rooms == [room]


class Rule(Sharing):
    """Begins two runs, then lets none work until both have paused."""

    paused: ClassVar[list[int]] = []

    def update(
        self,
        now: float,
        working: Mapping[str, Beat],
        is_calm: bool = True,
        room: Callable[[float], int] = lambda _: 0,
    ) -> None:
        if not self.paused:
            self.width = 0
            if is_calm and room(1.0) == 2:
                self.paused.append(2)
                self.width = 2


def test_runs_pause_between_rounds_and_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Sharing", Rule)
    monkeypatch.setattr(module, "is_on_gpu", lambda config: True)
    monkeypatch.setattr(sweeps, "is_on_gpu", lambda config: True)
    monkeypatch.setenv("PROTOFED_MPS", "off")
    Rule.paused.clear()
    outcomes = sweep([run("cpu", seed) for seed in range(2)], tmp_path)
    assert [outcome.is_done for outcome in outcomes] == [True, True]
    assert Rule.paused == [2]


def test_a_process_that_does_not_see_the_gpu_begins_no_run_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_process, "_stop", CONTEXT.Event())
    monkeypatch.setattr(run_process, "_notes", Notes())
    answer = run_process._one(run("cpu"), tmp_path, {**run("cpu").runtime.numerics(), "device": "cuda"}, on_gpu=True)
    assert answer.failure
    assert not answer.has_gpu
    assert not [*tmp_path.iterdir()]
