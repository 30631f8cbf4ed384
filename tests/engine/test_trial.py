"""Code of the user's own is tried with one batch before the first round: what is wrong is raised once."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from doubles import CLASSES, FEATURES, INPUTS, tiny
from protofed import METHODS, BadInput, FedAvg
from protofed.api.contexts import ClientContext, Reply
from protofed.data.batches import Batch
from protofed.engine.federation import Federation
from protofed.engine.training import Training
from protofed.methods.families import GlobalModel, WeightUpload
from protofed.nn.networks import Model, Parts
from protofed.runs.runner import Experiment, execute
from protofed.runs.store.folder import RunFolder
from protofed.tree import Nothing


def executed(method: Any, task: Any = None, folder: Path | None = None, batch_size: int = 8) -> Any:
    training = Training(rounds=1, epochs=1, batch_size=batch_size)
    return execute(Experiment(Federation(method, task or tiny(), training)), folder and RunFolder(folder))


def helper_with_a_fault(z: Tensor) -> Tensor:
    return z @ torch.zeros(3, 3)


@dataclass(frozen=True)
class BadLoss(GlobalModel[Nothing]):
    def loss(self, model: Model, batch: Batch, message: Any, memory: Nothing) -> Tensor:
        return batch.cross_entropy(helper_with_a_fault(model.features(batch.x)))


@dataclass(frozen=True)
class BadScores(FedAvg):
    def predict(self, model: Model, x: Tensor, message: Any, memory: Any) -> Tensor:
        return model.logits(x)[:, :2]


@dataclass(frozen=True)
class BadUpload(FedAvg):
    async def train(self, client: ClientContext, message: Any, memory: Any) -> Reply[Any, Any]:
        reply = await super().train(client, message, memory)
        return Reply(WeightUpload({}, reply.upload.num_examples), reply.memory)


CASES = {
    BadLoss: (r"a step of training \(train\) failed", "helper_with_a_fault"),
    BadScores: (r"a prediction \(predict\) failed", r"predict gave \(\d+, 2\)"),
    BadUpload: (r"the upload \(upload_spec\) failed", "would be refused"),
}


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_what_is_wrong_is_raised_once_with_the_users_lines(
    kind: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(BadInput) as found:
        executed(kind(), folder=tmp_path / "run")
    for said in CASES[kind]:
        assert found.match(said)
    assert not caplog.records, "no client is left out"
    assert not (tmp_path / "run" / "config.toml").exists()
    assert found.value.__cause__ is not None


def test_the_lines_are_those_of_the_users_files_alone() -> None:
    with pytest.raises(BadInput) as found:
        executed(BadLoss())
    files = [line for line in str(found.value).splitlines() if line.startswith("  File ")]
    assert len(files) == 2
    assert all(Path(__file__).name in line for line in files)


def test_a_network_that_does_not_fit_is_named() -> None:
    def narrow(client: str) -> Parts:
        return {"features": nn.Linear(INPUTS + 1, FEATURES), "classifier": nn.Linear(FEATURES, CLASSES)}

    with pytest.raises(BadInput, match="mat1 and mat2 shapes cannot be multiplied"):
        executed(METHODS["fedavg"](), replace(tiny(), model=narrow))


@dataclass(frozen=True)
class OneFails(FedAvg):
    async def train(self, client: ClientContext, message: Any, memory: Any) -> Reply[Any, Any]:
        if client.id == "c00":
            raise ValueError("only here")
        return await super().train(client, message, memory)


def test_a_fault_of_one_client_is_left_to_the_round() -> None:
    [line] = executed(OneFails()).rounds
    assert [*line.failures] == ["c00"]


@dataclass(frozen=True)
class NeedsMany(FedAvg):
    async def train(self, client: ClientContext, message: Any, memory: Any) -> Reply[Any, Any]:
        if len(client.data) <= 2:
            raise ValueError("too few")
        return await super().train(client, message, memory)


def test_a_step_that_needs_more_than_a_batch_is_tried_with_all_examples() -> None:
    task = tiny()
    assert min(map(len, task.clients.values())) > 2
    assert not executed(NeedsMany(), task, batch_size=2).rounds[0].failures


def test_the_trial_changes_no_bit() -> None:
    @dataclass(frozen=True)
    class Same(FedAvg):
        pass

    one, other = executed(Same()), executed(FedAvg())
    assert one.rounds[-1].loss == other.rounds[-1].loss
    assert all(torch.equal(one.server.params[name], leaf) for name, leaf in other.server.params.items())
