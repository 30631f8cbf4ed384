"""Which runtime a configuration leads to."""

import itertools
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from doubles import INPUTS, bits, tiny
from protofed import BadInput
from protofed.engine.training import Training
from protofed.runs.config.config import Config, parse
from protofed.runs.runner import execute
from protofed.runs.runtime_choice import RuntimeSettings, pinned_threads, step_seconds
from protofed.runs.store import checkpoint
from protofed.runs.store.folder import RunFolder
from protofed.runtimes.cohort.cohort import Cohort
from protofed.runtimes.sequential import Sequential
from protofed.runtimes.workers import Workers

LITTLE, MUCH = Training(epochs=1), Training(epochs=100, batch_size=1)


@pytest.fixture(autouse=True)
def two_cores_and_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_auto_takes_processes_only_where_they_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    auto, task = RuntimeSettings(), tiny()
    steps = 100 * sum(map(len, task.clients.values())) / len(task.clients)  # of a client with MUCH
    monkeypatch.setattr("protofed.runs.runtime_choice.step_seconds", lambda task, batch_size: 0.0031 / steps)
    assert isinstance(auto.build(task, LITTLE), Sequential)
    assert isinstance(auto.build(task, MUCH), Workers)
    assert isinstance(auto.build(task, MUCH, alone=False), Sequential), "other runs have the cores"
    assert isinstance(replace(auto, threads=2).build(task, MUCH), Sequential), "a process has one thread"
    assert isinstance(auto.build(task, replace(MUCH, epochs=90)), Sequential)
    assert isinstance(auto.build(task, replace(MUCH, fraction=1 / len(task.clients))), Sequential), "there is but one"
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})
    assert isinstance(auto.build(task, MUCH), Sequential)


EXPERIMENT = """
[task]
name = "minidigits"
[method]
name = "fedavg"
[training]
rounds = 1
epochs = 1
[runtime]
threads = {threads}
name = "{name}"
"""


def ended(path: Path, config: Config) -> dict[str, Any]:
    saved = checkpoint.load(path / "checkpoint", config.experiment(alone=False).federation, config.identity)
    assert saved is not None
    return bits(saved.state.server)


def test_one_identity_is_one_result_whatever_auto_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run` has the cores to itself and may take processes; `compare` may not. More threads give other bits."""
    monkeypatch.setattr("protofed.runs.runtime_choice.step_seconds", lambda task, batch_size: 1.0)
    found = dict[tuple[str, int, str], tuple[str, dict[str, Any]]]()
    commands = [("auto", "run"), ("auto", "compare"), ("sequential", "run"), ("workers", "run")]
    for (name, command), threads in itertools.product(commands, (1, 2)):
        config = parse(tomllib.loads(EXPERIMENT.format(threads=threads, name=name)), "experiment.toml")
        folder = RunFolder(tmp_path / f"{name}-{threads}-{command}")
        execute(config.experiment(alone=command == "run"), folder)
        found[name, threads, command] = config.identity, ended(folder.path, config)
    for a, b in itertools.combinations(found, 2):
        assert (found[a][0] == found[b][0]) <= (found[a][1] == found[b][1]), f"{a} and {b}: one hash, other bits"
    for threads in (1, 2):
        assert found["auto", threads, "run"] == found["auto", threads, "compare"] == found["sequential", threads, "run"]
    assert found["workers", 1, "run"] == found["sequential", 1, "run"]
    assert found["auto", 1, "run"][1] != found["auto", 2, "run"][1], (
        "two threads made no difference, so this is no test"
    )


class Slow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return x


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no")


@pytest.mark.parametrize(("layer", "expected"), [(Slow, Workers), (Broken, Sequential)])
def test_auto_tries_how_long_a_step_takes(layer: type[nn.Module], expected: type) -> None:
    """However few there are. What is wrong with a network is for the run to say."""
    parts = {"features": nn.Sequential(layer(), nn.Linear(INPUTS, 4)), "classifier": nn.Linear(4, 3)}
    task = replace(tiny(), model=lambda client: parts)
    assert isinstance(RuntimeSettings().build(task, Training(epochs=1, batch_size=1000)), expected)


def test_a_step_is_timed_with_the_threads_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    during = list[int]()
    timing = lambda task, batch_size: during.append(torch.get_num_threads()) or 0.0  # type: ignore[func-returns-value]  # noqa: E731
    monkeypatch.setattr("protofed.runs.runtime_choice.step_seconds", timing)
    with pinned_threads(3):
        RuntimeSettings(threads=1).build(tiny(), LITTLE)
        assert torch.get_num_threads() == 3
    assert during == [1]


def test_a_trial_draws_nothing() -> None:
    before = torch.get_rng_state()
    assert step_seconds(tiny(), 4) > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_auto_takes_the_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    built = RuntimeSettings(precision="bf16", executor="streams").build(tiny(), LITTLE, alone=False)
    assert isinstance(built, Cohort)
    assert (built.device, built.precision) == (torch.device("cuda"), "bf16")
    assert isinstance(RuntimeSettings(device="cpu").build(tiny(), LITTLE), Sequential)


def test_a_runtime_may_be_named() -> None:
    assert isinstance(RuntimeSettings("sequential").build(tiny(), MUCH), Sequential)
    workers = RuntimeSettings("workers", workers=3).build(tiny(), LITTLE)
    assert isinstance(workers, Workers)
    assert workers.count == 3
    assert isinstance(RuntimeSettings("cohort", device="cpu").build(tiny(), LITTLE), Cohort)


@pytest.mark.parametrize("name", ["auto", "sequential", "workers"])
def test_a_precision_of_gpus_is_refused_on_the_cpu(name: str) -> None:
    with pytest.raises(BadInput, match=r"runtime\.precision = 'bf16' is for GPUs"):
        RuntimeSettings(name, precision="bf16").build(tiny(), LITTLE)  # type: ignore[arg-type]
