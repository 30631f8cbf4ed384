"""Every network of the protocols with every method and optimiser of its tables, on a GPU with default settings."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from protofed import Data, Method, Task
from protofed.engine.federation import Federation
from protofed.engine.rehearsal import rehearse
from protofed.engine.training import Training
from protofed.evaluation.evaluate import evaluate
from protofed.nn.networks import Parts
from protofed.optim.optimizers import Optimizer
from protofed.runs import compare
from protofed.runtimes.cohort.cohort import Cohort
from protofed.tasks.models import image_model, mlp

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
PAPERS = ("fpl", "fedseproto", "fedpc", "pfedcspc")
NETWORKS = {"cnn3", "cnn2", "resnet10", "resnet18", "resnet18_projected", "conv2", "lenet_projected", "mlp"}
MOST_PIXELS = 64
"""VireoFood-172's images of 224 pixels go through the layers that those of Tiny ImageNet go through."""
CLASSES, CLIENTS, INPUTS = 10, ("ann", "bob", "cyd"), 13

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here")


@dataclass(frozen=True)
class Case:
    """A method on the networks of a table. Some tables give every other client another network."""

    models: tuple[str, ...]
    pixels: int
    channels: int
    method: Method[Any, Any, Any, Any]
    name: str
    optimizer: Optimizer

    def __str__(self) -> str:
        return f"{'+'.join(self.models)}-{self.pixels}-{self.name}-{type(self.optimizer).__name__}"


def cases() -> list[Case]:
    """Those of the files of experiments, each method once for a network, with the settings of the first table."""
    found: dict[str, Case] = {}
    files = [file for paper in PAPERS for file in sorted(EXPERIMENTS.glob(f"{paper}/*.toml"))]
    for file in [*files, EXPERIMENTS / "heart_disease.toml"]:
        for config in [one for methods in compare.load(file).runs.values() for one, *_ in methods.values()]:
            recorded = config.resolved()
            task = recorded["task"]
            if task.get("pixels", 0) <= MOST_PIXELS:
                models = tuple(filter(None, (task.get("model", "mlp"), task.get("other_model"))))
                channels = 1 if task["name"] == "fashion_mnist" else 3
                shape, name = (task.get("pixels", 0), channels), recorded["method"]["name"]
                one = Case(models, *shape, config.method, name, config.training.optimizer)
                found.setdefault(str(one), one)
    # The tables have ResNet-18 in its projected forms only.
    plain = [c for c in found.values() if c.models == ("resnet18_projected",) and c.name in ("fedavg", "pfedcspc")]
    return [*found.values(), *(replace(case, models=("resnet18",)) for case in plain)]


CASES = cases()


def task_of(case: Case) -> Task:
    """Noise of the right shape; each client lacks a class."""
    draws = torch.Generator().manual_seed(0)
    shape = (case.channels, case.pixels, case.pixels) if case.pixels else (INPUTS,)

    def examples(count: int, absent: int) -> Data:
        y = torch.arange(count) % (CLASSES - 1)
        y += (y >= absent).long()
        x = torch.rand(count, *shape, generator=draws)
        return Data.of((255 * x).to(torch.uint8) if case.pixels else x, y)

    def model(client: str) -> Parts:
        name: Any = case.models[CLIENTS.index(client) % len(case.models)]
        return mlp(INPUTS, CLASSES) if name == "mlp" else image_model(name, case.channels, CLASSES, case.pixels)

    clients = {name: examples(12 + k, absent=k) for k, name in enumerate(CLIENTS)}
    return Task(clients, {"test": examples(20, absent=CLASSES)}, CLASSES, model, public=examples(10, absent=CLASSES))


def goes_through(case: Case, device: str) -> None:
    training = Training(rounds=2, epochs=1, batch_size=8, optimizer=case.optimizer)
    federation = Federation(case.method, task_of(case), training, Cohort(device))
    rehearse(federation)
    state = federation.start()
    for _ in range(2):
        state = federation.advance(state)
        assert state.failures == ()
    state = federation.finish(state)
    assert state.failures == ()
    assert evaluate(federation, state).summary


def test_the_networks_of_the_papers_are_all_there() -> None:
    assert {model for case in CASES for model in case.models} == NETWORKS


@on_a_gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_method_of_a_table_goes_through_with_default_settings(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        goes_through(case, "cuda")
    assert [record.getMessage() for record in caplog.records] == []
