"""Several runs at once: done ones are kept, unfinished ones go on, a failing one is not silent."""

import time
from pathlib import Path

import pytest

from protofed import RunFailed
from protofed.experiments import config
from protofed.experiments.config import Config
from protofed.experiments.sweep import folder_of, sweep


def configs(lr: float = 0.01, rounds: int = 2) -> list[Config]:
    training = {"rounds": rounds, "epochs": 1, "optimizer": {"name": "sgd", "lr": lr}}
    return [
        config.parse({"task": {"name": "minidigits"}, "method": {"name": "fedavg"}, "training": training}, "test", seed)
        for seed in (["training.seed=0"], ["training.seed=1"])
    ]


def test_stopped_resumed_and_kept(tmp_path: Path) -> None:
    seen: list[int] = []
    deadline = time.monotonic() + 60  # in case the wish to stop were never heard
    stopped = sweep(
        configs(rounds=400),
        tmp_path,
        progress=seen.append,
        should_stop=lambda: bool(seen and seen[-1]) or time.monotonic() > deadline,
    )
    assert all(len(rounds) < 400 for rounds in stopped)
    assert any(stopped)
    first = sweep(configs(), tmp_path, progress=seen.append)
    assert [len(rounds) for rounds in first] == [2, 2]
    assert seen[-1] == 4
    assert sweep(configs(), tmp_path) == first


def test_a_failing_run_is_raised_after_the_others_stopped(tmp_path: Path) -> None:
    broken = configs(lr=1e30)
    with pytest.raises(RunFailed, match="NON_FINITE"):
        sweep(broken, tmp_path)
    assert not any(folder_of(c, tmp_path).is_done for c in broken)
