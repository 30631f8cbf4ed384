"""What a device has no deterministic form of is named once, before the first round."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from doubles import CLASSES, FEATURES, INPUTS, tiny
from protofed import METHODS, BadInput, RunFailed, Task
from protofed.data.batches import Batch
from protofed.engine.federation import Federation
from protofed.engine.rehearsal import rehearse
from protofed.engine.training import Training
from protofed.methods.families import GlobalModel
from protofed.methods.fedavg import FedAvg
from protofed.nn.networks import Model, Parts
from protofed.runs.runner import Experiment, execute
from protofed.runs.store.folder import RunFolder
from protofed.runtimes.cohort.cohort import Cohort
from protofed.runtimes.jobs import Job
from protofed.runtimes.sequential import Sequential
from protofed.tree import Nothing

TORCHS_WORDS = (
    "wobble_backward_cuda does not have a deterministic implementation, but you set "
    "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this operation"
)


class Wobble(torch.autograd.Function):
    """As torch's adaptive pooling on a GPU: its backward refuses to work if it must be deterministic."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:  # type: ignore[override]
        if torch.are_deterministic_algorithms_enabled():
            raise RuntimeError(TORCHS_WORDS)
        return slope


class Wobbly(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Wobble.apply(x)
        return result


class Outer(nn.Module):
    """Does it itself, between two layers that are innocent."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(Wobble.apply(self.first(x)))
        return result


def parts(*layers: nn.Module) -> Parts:
    features = nn.Sequential(nn.Linear(INPUTS, FEATURES), nn.ReLU(), *layers)
    return {"features": features, "classifier": nn.Linear(FEATURES, CLASSES)}


def wobbly(client: str) -> Parts:
    return parts(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU(inplace=True), Wobbly()))


def experiment(task: Task, method: Any = None, runtime: Any = None) -> Experiment:
    training = Training(rounds=2, epochs=1, batch_size=8)
    return Experiment(Federation(method or FedAvg(), task, training, runtime or Sequential()))


@pytest.fixture
def strict() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("name", ["fedavg", "fpl", "fedrep", "fedpc", "scaffold"])
def test_the_error_names_the_layer_and_the_setting_before_anything_is_written(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(BadInput) as found:
        execute(experiment(replace(tiny(), model=wobbly), METHODS[name]()), RunFolder(tmp_path / "run"))
    assert "features.2.2 (Wobbly)" in str(found.value)
    assert "wobble_backward_cuda" in str(found.value)
    assert "runtime.deterministic = false" in str(found.value)
    assert not caplog.records, "no client is left out, nothing is tried again"
    assert not (tmp_path / "run" / "config.toml").exists()


@pytest.mark.usefixtures("strict")
def test_a_layer_that_does_it_between_others_is_named_itself() -> None:
    with pytest.raises(BadInput, match=r"the layer features\.2 \(Outer\)"):
        rehearse(experiment(replace(tiny(), model=lambda client: parts(Outer()))).federation)


@pytest.mark.usefixtures("strict")
def test_every_kind_of_networks_is_tried() -> None:
    task = replace(tiny(), model=lambda client: wobbly(client) if client == "c03" else parts())
    with pytest.raises(BadInput, match="Wobbly"):
        rehearse(experiment(task, METHODS["fedproto"]()).federation)


@dataclass(frozen=True)
class WobblyLoss(GlobalModel[Nothing]):
    def loss(self, model: Model, batch: Batch, message: Any, memory: Nothing) -> Tensor:
        found: Tensor = Wobble.apply(batch.cross_entropy(model.logits(batch.x)))
        return found


@pytest.mark.usefixtures("strict")
def test_a_loss_can_be_to_blame() -> None:
    with pytest.raises(BadInput, match="the loss of the method: torch has no deterministic form of wobble"):
        rehearse(experiment(tiny(), WobblyLoss()).federation)


def test_it_runs_where_results_need_not_be_deterministic() -> None:
    assert execute(experiment(replace(tiny(), model=wobbly))).is_complete


@pytest.mark.usefixtures("strict")
def test_what_is_deterministic_runs_and_the_rehearsal_leaves_no_trace() -> None:
    found = execute(experiment(tiny(), METHODS["fpl"]()))
    torch.use_deterministic_algorithms(False)
    expected = execute(experiment(tiny(), METHODS["fpl"]()))
    assert [line.line() for line in map(timeless, found.rounds)] == [
        line.line() for line in map(timeless, expected.rounds)
    ]


def timeless(result: Any) -> Any:
    return replace(result, seconds={})


class Counting(Sequential):
    asked = 0

    def run(self, jobs: Iterable[Job]) -> Iterator[Any]:
        for job in jobs:
            self.asked += 1
            yield from super().run([job])


@pytest.mark.usefixtures("strict")
def test_one_that_is_met_in_a_round_ends_the_run_at_the_first_client() -> None:
    runtime = Counting()
    federation = experiment(replace(tiny(), model=wobbly), runtime=runtime).federation
    with pytest.raises(RunFailed, match=r"wobble_backward_cuda.*runtime\.deterministic = false"):
        federation.advance(federation.start())
    assert runtime.asked == 1


@pytest.mark.usefixtures("strict")
def test_the_cohort_ends_the_run_too() -> None:
    federation = experiment(replace(tiny(), model=wobbly), runtime=Cohort("cpu", executor="streams")).federation
    with pytest.raises(RunFailed, match=r"runtime\.deterministic = false"):
        federation.advance(federation.start())


# ---- networks that cannot be averaged


def wide_and_narrow(client: str) -> Parts:
    width = FEATURES + 2 if client in ("c01", "c03") else FEATURES
    hidden = nn.Sequential(nn.Linear(INPUTS, width), nn.ReLU(), nn.Linear(width, FEATURES), nn.ReLU())
    return {"features": hidden, "classifier": nn.Linear(FEATURES, CLASSES)}


@pytest.mark.parametrize("name", ["fedavg", "fedper", "fpl", "fedpc", "ditto", "scaffold"])
def test_different_networks_are_refused_where_weights_are_averaged(name: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as found:
        execute(experiment(replace(tiny(), model=wide_and_narrow), METHODS[name]()), RunFolder(tmp_path / "run"))
    assert "features.0.weight is (8, 12) at c00, (10, 12) at c01" in str(found.value)
    assert METHODS[name].__name__ in str(found.value)
    assert not (tmp_path / "run" / "config.toml").exists()


@pytest.mark.parametrize("name", ["fedproto", "local", "lg_fed", "fedgh", "fedmd"])
def test_different_networks_are_fine_where_what_is_shared_is_alike(name: str) -> None:
    result = execute(experiment(replace(tiny(), model=wide_and_narrow), METHODS[name]()))
    assert result.is_complete
    assert not any(r.failures for r in result.rounds)
