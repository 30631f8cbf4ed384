"""Which runtime a configuration leads to."""

from dataclasses import replace

import pytest
import torch

from doubles import tiny
from protofed import BadInput
from protofed.runtimes.cohort import Cohort
from protofed.runtimes.federation import Training
from protofed.runtimes.sequential import Sequential
from protofed.runtimes.settings import RuntimeSettings
from protofed.runtimes.workers import Workers

LITTLE, MUCH = Training(epochs=1), Training(epochs=100, batch_size=1)


@pytest.fixture(autouse=True)
def two_cores_and_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_auto_takes_processes_only_where_they_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = RuntimeSettings()
    assert isinstance(auto.build(tiny(), LITTLE), Sequential)
    assert isinstance(auto.build(tiny(), MUCH), Workers)
    assert isinstance(auto.build(tiny(), MUCH, alone=False), Sequential), "other runs have the cores"
    assert isinstance(auto.build(tiny(), replace(MUCH, fraction=0.01)), Sequential)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})
    assert isinstance(auto.build(tiny(), MUCH), Sequential)


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
