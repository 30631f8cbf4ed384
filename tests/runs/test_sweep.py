"""Several runs at once: done ones are kept, unfinished ones go on, a failing one is not silent."""

import os
import time
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from clocks import PATIENCE
from protofed.errors import RunFailed
from protofed.runs.config import config
from protofed.runs.config.config import Config
from protofed.runs.sweep import _failure, runs_at_once, sweep


def configs(lr: float = 0.01, rounds: int = 2) -> list[Config]:
    training = {"rounds": rounds, "epochs": 1, "optimizer": {"name": "sgd", "lr": lr}}
    return [
        config.parse({"task": {"name": "minidigits"}, "method": {"name": "fedavg"}, "training": training}, "test", seed)
        for seed in (["training.seed=0"], ["training.seed=1"])
    ]


def test_stopped_resumed_and_kept(tmp_path: Path) -> None:
    seen: list[int] = []
    deadline = time.monotonic() + PATIENCE  # in case the wish to stop were never heard
    stopped = sweep(
        configs(rounds=400),
        tmp_path,
        progress=seen.append,
        should_stop=lambda: bool(seen and seen[-1]) or time.monotonic() > deadline,
    )
    assert all(len(outcome.rounds) < 400 and not outcome.is_done and not outcome.failure for outcome in stopped)
    assert any(outcome.rounds for outcome in stopped)
    first = sweep(configs(), tmp_path, progress=seen.append)
    assert [len(outcome.rounds) for outcome in first] == [2, 2]
    assert all(outcome.is_done for outcome in first)
    assert seen[-1] == 4
    assert sweep(configs(), tmp_path) == first


def test_a_failing_run_says_why_and_the_others_go_on(tmp_path: Path) -> None:
    broken, whole = configs(lr=1e30)[:1], configs()[:1]
    failed, done = sweep([*broken, *whole], tmp_path)
    assert failed.failure is not None
    assert "diverged" in failed.failure
    assert not failed.is_done
    assert done.is_done
    assert done.failure is None


def test_a_run_that_is_asked_for_twice_is_done_once(tmp_path: Path) -> None:
    one = configs(rounds=1)[0]
    first, second = sweep([one, one], tmp_path)
    assert first == second
    assert first.is_done


def test_an_error_that_nobody_foresaw_costs_one_run_only() -> None:
    run: Future[None] = Future()
    run.set_exception(MemoryError("no room on the device"))
    assert _failure(run, is_stopping=False) == "MemoryError: no room on the device"


def test_a_process_that_dies_while_all_stop_is_no_failure() -> None:
    run: Future[None] = Future()
    run.set_exception(BrokenProcessPool("a process died"))
    assert _failure(run, is_stopping=True) is None
    with pytest.raises(RunFailed, match="process died"):
        _failure(run, is_stopping=False)


@pytest.mark.parametrize(("devices", "count"), [(["cuda"] * 8, 2), (["cuda:0", "cuda:1"], 4), (["cpu"] * 3, 7)])
def test_few_runs_share_a_gpu(devices: list[str], count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    sections = {"task": {"name": "minidigits"}, "method": {"name": "fedavg"}}
    runs = [config.parse(sections, "test", ["runtime.name=cohort", f"runtime.device={device}"]) for device in devices]
    assert runs_at_once(runs) == count
