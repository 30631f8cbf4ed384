"""Which executor does the work, and how many clients at once. Without a GPU: times and memory are given."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from doubles import tiny
from protofed.api.requests import Fit, Map, Objective
from protofed.nn.networks import Networks
from protofed.optim.optimizers import Sgd
from protofed.runtimes.cohort import memory
from protofed.runtimes.cohort.choice import LONG_STEP, SHORTEST_ON_STREAMS, SMALL_STEP, TRIES, Choice
from protofed.runtimes.cohort.executors import ExecutorName
from protofed.runtimes.cohort.lowering import Loop, Lowering

CLIENTS = 4


@pytest.fixture
def loops() -> Callable[[str], list[Loop]]:
    """The loops of several clients that train the same networks, or use them."""
    task, lowering = tiny(CLIENTS), Lowering("float32")
    networks = Networks(lambda: task.model("c00"))

    def of(kind: str) -> list[Loop]:
        return [lowering.of(_request(kind, networks, data, task)) for data in task.clients.values()]

    return of


def _request(kind: str, networks: Networks, data: Any, task: Any) -> Any:
    params = networks.init(0)
    if kind == "map":
        return Map(networks, params, (), data, task.transform, 0, _scores)
    return Fit(networks, params, (), data, task.transform, 0, (Objective(_loss),), Sgd(), epochs=1, batch_size=4)


def _scores(model: Any, batch: Any) -> Any:
    return model.logits(batch.x)


def _loss(model: Any, batch: Any) -> Any:
    return batch.cross_entropy(model.logits(batch.x))


def timed(seconds: dict[ExecutorName, float], tried: list[str]) -> Callable[[ExecutorName], float]:
    def seconds_of(name: ExecutorName) -> float:
        tried.append(name)
        return seconds[name]

    return seconds_of


@pytest.mark.parametrize("best", ["streams", "stacked"])
def test_the_fastest_is_chosen_once(best: ExecutorName, loops: Callable[[str], list[Loop]]) -> None:
    seconds: dict[ExecutorName, float] = {"streams": 2e-4, "stacked": 2e-4, best: 1e-4}
    tried: list[str] = []
    choice = Choice("auto")
    for _ in range(2):
        assert choice.of(loops("fit"), timed(seconds, tried)) == best
    assert tried == ["stacked", "streams"] * TRIES


def test_the_best_of_several_tries_counts(loops: Callable[[str], list[Loop]]) -> None:
    """Another process may use the GPU during some of them."""
    seconds = iter([8e-4, 9e-4, 9e-4, 2e-4, 1e-4, 3e-4])  # stacked, streams, stacked and so on
    assert Choice("auto").of(loops("fit"), lambda name: next(seconds)) == "stacked"


@pytest.mark.parametrize(("num_bytes", "expected"), [(SMALL_STEP + 1, "streams"), (SMALL_STEP, "stacked")])
def test_long_steps_are_not_tried_stacked(num_bytes: int, expected: str, loops: Callable[[str], list[Loop]]) -> None:
    """A step that needs little memory is not long: the GPU is shared."""
    tried: list[str] = []
    seconds: dict[ExecutorName, float] = {"streams": 2 * LONG_STEP, "stacked": 1.5 * LONG_STEP}
    some = [replace(loop, step_bytes=num_bytes) for loop in loops("fit")]
    assert Choice("auto").of(some, timed(seconds, tried)) == expected
    assert {*tried} == {"streams", expected}


@pytest.mark.parametrize(("stacked", "is_tried"), [(0.9 * SHORTEST_ON_STREAMS, False), (SHORTEST_ON_STREAMS, True)])
def test_streams_are_not_tried_where_they_cannot_be_faster(
    stacked: float, is_tried: bool, loops: Callable[[str], list[Loop]]
) -> None:
    tried: list[str] = []
    seconds: dict[ExecutorName, float] = {"streams": 2e-4, "stacked": stacked}
    assert Choice("auto").of(loops("fit"), timed(seconds, tried)) == "stacked"
    assert ("streams" in tried) == is_tried


def test_an_executor_that_cannot_do_it_is_not_asked_again(loops: Callable[[str], list[Loop]]) -> None:
    tried: list[str] = []

    def seconds_of(name: ExecutorName) -> float:
        tried.append(name)
        if name == "streams":
            raise RuntimeError("no rule for this")
        return 1e-4

    assert Choice("auto").of(loops("fit"), seconds_of) == "stacked"
    assert sorted(tried) == [*["stacked"] * TRIES, "streams"]


@pytest.mark.parametrize("best", ["streams", "stacked"])
def test_what_trains_networks_fastest_also_judges_them(best: ExecutorName, loops: Callable[[str], list[Loop]]) -> None:
    choice, tried = Choice("auto"), list[str]()
    seconds: dict[ExecutorName, float] = {"streams": 2e-4, "stacked": 2e-4, best: 1e-4}
    choice.of(loops("fit"), timed(seconds, []))
    assert choice.of(loops("map"), timed(seconds, tried)) == best
    assert tried == []
    assert Choice("auto").of(loops("map"), timed(seconds, tried)) == best  # these networks were never trained
    assert tried == ["stacked", "streams"] * TRIES


def test_a_named_executor_is_not_tried(loops: Callable[[str], list[Loop]]) -> None:
    tried: list[str] = []
    assert Choice("stacked").of(loops("fit"), timed({}, tried)) == "stacked"
    assert tried == []


# ---- memory


def test_what_a_client_needs_is_counted_before_it_is_allocated(loops: Callable[[str], list[Loop]]) -> None:
    (loop, *_) = loops("map")
    plan, rows = loop.plan, loop.num_steps * loop.batch_size
    # Of each row: its number and weight (8 and 4 bytes) and its scores of 4 bytes; of each step a flag and a seed.
    expected = rows * (8 + 4) + loop.num_steps * (1 + 8) + rows * 5 * 4
    weights = sum(leaf.numel() * 4 for leaf in loop.inputs[0].values())
    assert plan.draws.offset is None
    assert memory.bytes_of(loop) == expected + weights


@pytest.mark.parametrize(("kind", "free", "count"), [("fit", 10, 4), ("fit", 3, 2), ("fit", 0, 1), ("map", 10**12, 2)])
def test_as_many_clients_as_fit_are_at_work(
    kind: str, free: int, count: int, loops: Callable[[str], list[Loop]], monkeypatch: pytest.MonkeyPatch
) -> None:
    some = loops(kind)
    each = memory.bytes_of(some[0])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * each, 0))
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    monkeypatch.setattr(memory, "MOST_BYTES_TO_JUDGE", int(2.5 * each))
    # Of memory for 3 clients 0.8 may be used, which is 2 of them. Judging has its own bound, here for 2.
    assert memory.clients_at_once(some, torch.device("cuda")) == count
