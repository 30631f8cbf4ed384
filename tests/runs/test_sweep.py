"""Several runs at once: done ones are kept, unfinished ones go on, a failing one is not silent."""

import os
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from clocks import PATIENCE
from protofed.methods.fedavg import FedAvg
from protofed.runs.config import config
from protofed.runs.config.config import Config
from protofed.runs.run_process import CONTEXT, RunProcess
from protofed.runs.sweep import sweep


def configs(lr: float = 0.01, rounds: int = 2) -> list[Config]:
    training = {"rounds": rounds, "epochs": 1, "optimizer": {"name": "sgd", "lr": lr}}
    return [
        config.parse({"task": {"name": "minidigits"}, "method": {"name": "fedavg"}, "training": training}, "test", seed)
        for seed in (["training.seed=0"], ["training.seed=1"])
    ]


def test_stopped_resumed_and_kept(tmp_path: Path) -> None:
    seen: list[Sequence[int]] = []
    deadline = time.monotonic() + PATIENCE  # in case the wish to stop were never heard
    stopped = sweep(
        configs(rounds=400),
        tmp_path,
        progress=seen.append,
        should_stop=lambda: bool(seen and any(seen[-1])) or time.monotonic() > deadline,
    )
    assert all(len(outcome.rounds) < 400 and not outcome.is_done and not outcome.failure for outcome in stopped)
    assert any(outcome.rounds for outcome in stopped)
    first = sweep(configs(), tmp_path, progress=seen.append)
    assert [len(outcome.rounds) for outcome in first] == [2, 2]
    assert all(outcome.is_done for outcome in first)
    assert seen[-1] == [2, 2]
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


class Strange(Exception):
    """One that cannot be brought to another process: it is made of two words, and pickled with one."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} is not {other}")


@dataclass(frozen=True)
class Odd(FedAvg):
    """Fails at the server, in one of several ways."""

    way: str = "strange"

    def from_sum(self, *_: Any) -> Any:
        match self.way:
            case "strange":
                raise Strange("this", "that")
            case "exits":
                sys.exit("enough")
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case _:
                os._exit(7)


def odd(way: str) -> Config:
    return replace(configs()[0], method=Odd(way=way), user_code=way)


def test_an_error_that_nobody_foresaw_is_shown_as_what_it_is_and_costs_one_run_only(tmp_path: Path) -> None:
    strange, exits, whole = sweep([odd("strange"), odd("exits"), configs()[1]], tmp_path, workers=2)
    assert whole.is_done
    assert strange.failure is not None
    said, _, file = strange.failure.partition("; the whole text is in ")
    assert said.startswith("Strange: this is not that (test_sweep.py, line ")
    assert said.endswith(", from_sum)")
    assert Path(file).read_text().rstrip().endswith("Strange: this is not that")
    assert "Traceback" in Path(file).read_text()
    assert exits.failure is not None
    assert exits.failure.startswith("SystemExit: enough (test_sweep.py, line ")


def test_the_text_of_an_error_goes_when_the_run_goes_well(tmp_path: Path) -> None:
    one = configs(rounds=1)[0]
    (tmp_path / f"{one.identity}.error.txt").write_text("of another day")
    assert sweep([one], tmp_path)[0].is_done
    assert not list(tmp_path.glob("*.error.txt"))


@pytest.mark.parametrize(("way", "said"), [("killed", "was killed by SIGKILL"), ("leaves", "ended with exit code 7")])
def test_a_process_that_dies_is_named_by_how_it_died(way: str, said: str, tmp_path: Path) -> None:
    (failed,) = sweep([odd(way)], tmp_path, workers=1)
    assert failed.failure is not None
    assert said in failed.failure
    assert "run the same command again" in failed.failure
    assert ("memory" in failed.failure) == (way == "killed")
    assert "exit code 143" not in failed.failure


def ended_with(error: Exception) -> RunProcess:
    """A process whose run ended so. It was never started."""
    process = RunProcess(CONTEXT.Event(), CONTEXT.Queue(), [], {})
    process.answer.set_exception(error)
    return process


def test_an_error_of_the_pool_itself_is_shown_too() -> None:
    answer = ended_with(MemoryError("no room on the device")).ended(is_stopping=False)
    assert str(answer.failure).startswith("MemoryError: no room on the device (")


def test_a_process_that_dies_while_all_stop_is_no_failure() -> None:
    assert ended_with(BrokenProcessPool("a process died")).ended(is_stopping=True).failure is None
    assert ended_with(BrokenProcessPool("a process died")).ended(is_stopping=False).failure is not None


def test_a_process_that_dies_costs_its_own_run_only(tmp_path: Path) -> None:
    died, *others = sweep([odd("killed"), *configs(rounds=1)], tmp_path, workers=1)
    assert "was killed by SIGKILL" in (died.failure or "")
    assert all(outcome.is_done for outcome in others)
