"""Runs in processes that may not have children, as those of multiprocessing.Pool (R16)."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

import protofed
from doubles import bits
from run_doubles import small_task


def ended(runtime: str) -> Any:
    """What a run ends with, or what it says."""
    try:
        result = protofed.run("moon", small_task(), rounds=2, epochs=30, batch_size=2, runtime=runtime)
        return type(result.federation.runtime).__name__, bits(result.state.server)
    except protofed.BadInput as error:
        return str(error)


def told_to_take_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr("protofed.runs.runtime_choice.step_seconds", lambda task, batch_size: 1.0)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_auto_takes_no_processes_in_a_pool_and_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """R16."""
    told_to_take_processes(monkeypatch)
    kind, expected = ended("auto")
    assert kind == "Workers"
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map(ended, ["auto", "sequential"]) == [("Sequential", expected)] * 2
        [refusal] = pool.map(ended, ["workers"])
    assert "this is a daemonic process, as those of multiprocessing.Pool are" in refusal
    assert "Take sequential or auto" in refusal


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_processes_of_futures_may_have_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """R16."""
    told_to_take_processes(monkeypatch)
    _, expected = ended("sequential")
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        assert pool.submit(ended, "workers").result() == ("Workers", expected)
