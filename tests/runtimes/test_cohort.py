"""The cohort runtime gives what the reference gives, by either executor, for every method."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from doubles import tiny
from protofed import METHODS, Method, Task, tree
from protofed.runtimes import executors
from protofed.runtimes.cohort import Cohort
from protofed.runtimes.federation import Federation, State, Training
from protofed.runtimes.sequential import Sequential

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
ROUNDS = 3

every_executor = pytest.mark.parametrize("executor", list(executors.EXECUTORS))
on_every_device = pytest.mark.parametrize("device", DEVICES)


def after(method: Method[Any, Any, Any, Any], runtime: Any, task: Task | None = None, **training: Any) -> State:
    settings = {"rounds": ROUNDS, "epochs": 2, "batch_size": 4, **training}
    federation = Federation(method, task or tiny(), Training(**settings), runtime)
    state = federation.start()
    for _ in range(federation.training.rounds):
        state = federation.advance(state)
    return federation.finish(state)


def named(state: State) -> dict[str, Tensor]:
    return tree.named_leaves({"server": state.server, "memories": state.memories})


def difference(a: State, b: State) -> float:
    first, second = named(a), named(b)
    assert first.keys() == second.keys()
    gaps = [(first[name].cpu().double() - second[name].cpu().double()).abs() for name in first]
    return max(gap.max().item() for gap in gaps if gap.numel())


@on_every_device
@every_executor
@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_what_the_reference_gives(
    name: str, executor: Any, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    size = 8 if name == "grace" else 4  # it halves its batches, and BatchNorm over two rows blows up what is rounded
    reference = after(METHODS[name](), Sequential(device), batch_size=size)
    found = after(METHODS[name](), Cohort(device, executor=executor), batch_size=size)
    assert difference(reference, found) <= 1e-4
    assert found.failures == reference.failures == ()
    given_up = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert given_up == [], "work that could not be done together"


@on_every_device
@every_executor
@pytest.mark.parametrize("name", ["fedavg", "fpl"])
def test_the_same_seed_gives_the_same_bytes(name: str, executor: Any, device: str) -> None:
    first, second = (after(METHODS[name](), Cohort(device, executor=executor)) for _ in range(2))
    assert [leaf.cpu().numpy().tobytes() for leaf in named(first).values()] == [
        leaf.cpu().numpy().tobytes() for leaf in named(second).values()
    ]
