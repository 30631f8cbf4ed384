"""Runs in threads of one process would change each other's numbers: they are refused (R15)."""

import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import protofed
from doubles import bits
from protofed import BadInput, Data, Task
from protofed.engine.federation import Federation
from protofed.engine.training import Training
from protofed.methods import METHODS
from protofed.nn.networks import Networks, Parts
from protofed.runs.runner import Silent, execute
from run_doubles import small_experiment, small_task

TELLS = "another thread of this process is at a run.*in a process of its own.*protofed compare"


def dropping(client: str) -> Parts:
    return {"features": nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.ReLU()), "classifier": nn.Linear(8, 3)}


def dropout_task() -> Task:
    draw = torch.Generator().manual_seed(1)
    data = {f"c{k}": Data.of(torch.randn(200, 6, generator=draw), torch.arange(200) % 3) for k in range(3)}
    return Task(data, {"all": data["c0"]}, 3, dropping)


def run(task: Task | None = None, **settings: Any) -> dict[str, Any]:
    settings = {"rounds": 3, "epochs": 3, "batch_size": 4, "runtime": "sequential", **settings}
    return bits(protofed.run("fedavg", task or dropout_task(), **settings).state.server)


def test_runs_in_threads_are_refused_or_right() -> None:
    """R15. Nine at once, with dropout: at e84b7a9 most of them ended with other bits."""
    expected, wrong, refused = run(), [], 0
    with ThreadPoolExecutor(9) as pool:
        for future in [pool.submit(run) for _ in range(9)]:
            try:
                wrong += [future.result()] if future.result() != expected else []
            except BadInput:
                refused += 1
    assert not wrong, f"{len(wrong)} of 9 have other bits"
    assert refused, "no two of them met"


class Meanwhile(Silent):
    """Does something in another thread while a run is under way."""

    def __init__(self, work: Any) -> None:
        self.work, self.errors, self.done = work, list[BaseException](), 0

    def round(self, result: object) -> None:
        thread = threading.Thread(target=self._try)
        thread.start()
        thread.join()

    def _try(self) -> None:
        try:
            self.work()
            self.done += 1
        except BaseException as error:
            self.errors.append(error)


def federated() -> None:
    federation = Federation(METHODS["fedavg"](), small_task(), Training(rounds=1, epochs=1))
    federation.advance(federation.start())


WAYS = {
    "run": lambda: run(rounds=1),
    "execute": lambda: execute(small_experiment()),
    "Federation": federated,
    "Networks": lambda: Networks(lambda: dropping("any")),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_second_run_is_told_what_to_do_and_the_first_is_right(way: str) -> None:
    """R15."""
    observer = Meanwhile(WAYS[way])
    assert run(observer=observer) == run()
    assert (len(observer.errors), observer.done) == (3, 0)
    with pytest.raises(BadInput, match=TELLS):
        raise observer.errors[0]


def test_runs_follow_each_other_in_any_threads_also_after_a_failure() -> None:
    """R15."""
    expected = run()
    with pytest.raises(BadInput):
        run(rounds=0)
    with pytest.raises(ZeroDivisionError):
        run(observer=Failing())
    assert run() == expected
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run).result() == expected
        with pytest.raises(ZeroDivisionError):
            pool.submit(run, observer=Failing()).result()
    assert run() == expected


class Failing(Silent):
    def client(self, client: str) -> None:
        raise ZeroDivisionError(client)


class Nesting(Silent):
    def __init__(self) -> None:
        self.found: list[Any] = []

    def round(self, result: object) -> None:
        self.found.append(run(rounds=1))


def test_a_run_within_a_run_of_the_same_thread_is_right() -> None:
    """R15. It begins and ends between two rounds of the first."""
    observer = Nesting()
    assert run(observer=observer) == run()
    assert observer.found == [run(rounds=1)] * 3


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_that_is_forked_during_a_run_may_run() -> None:
    """R15. It has none of the parent's threads."""
    codes: list[int] = []

    def forked() -> None:
        child = multiprocessing.get_context("fork").Process(target=in_child)
        child.start()
        child.join()
        codes.append(child.exitcode)

    run(observer=Meanwhile(forked), rounds=1)
    assert codes == [0]


def in_child() -> None:
    execute(small_experiment(rounds=1))
    os._exit(0)
