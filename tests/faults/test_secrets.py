"""What must not be written down (S10): canaries in the environment, in the path of the data and in the data.

Promised: a run's folder and its log hold no environment variable and no value of an example. The path of the data that
the user has configured is in config.toml and in messages about its files only. What an exception in the user's own code
says is passed on as it is.
"""

import logging
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from faults.kills import ended, folder_in_memory, forked
from protofed import METHODS, Data, Task
from protofed.cli import app
from protofed.data.batches import Batch
from protofed.engine.federation import Federation
from protofed.engine.training import Training
from protofed.methods.moon import Moon
from protofed.nn.networks import Model
from protofed.runs.runner import Experiment, execute
from protofed.runs.store.folder import RunFolder
from run_doubles import small_task

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

ENVIRONMENT, PLACE, VALUE = "canary-of-the-environment", "canary-of-the-path", 31337.625
TRACES = [b"31337.6", b"3.13376", b"3.1338e+04", *(struct.pack(form, VALUE) for form in ("<f", "<d", ">f", ">d"))]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with folder_in_memory() as folder:
        yield folder


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTOFED_TOKEN", ENVIRONMENT)


def found_in(content: dict[str, bytes], traces: list[bytes]) -> list[str]:
    return [f"{name}: {trace!r}" for name, data in content.items() for trace in traces if trace in data]


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def with_canary(task: Task) -> Task:
    """One value of one example of one client is the canary."""
    x = task.clients["c1"].x.clone()
    x[2, 3] = VALUE
    return replace(task, clients={**task.clients, "c1": Data.of(x, task.clients["c1"].labels)})


@dataclass(frozen=True)
class Stumbling(Moon):
    """Fails at one client, with its data at hand."""

    def loss(self, model: Model, batch: Batch, *known: Any) -> Tensor:
        if (batch.x == VALUE).any():
            return batch.x @ batch.x  # shapes that do not fit, as a mistake in a loss has them
        return super().loss(model, batch, *known)


@pytest.mark.parametrize("method", [METHODS["fedproto"](), METHODS["fedavg"](), METHODS["fedpc"](), Stumbling()])
def test_no_value_of_an_example_is_in_a_run_folder_or_its_log(
    method: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """S10. Also where a client fails on it."""
    caplog.set_level(logging.DEBUG)
    training = Training(rounds=2, epochs=1, batch_size=8)
    federation = Federation(method, with_canary(small_task()), training)
    result = execute(Experiment(federation, evaluate_clients_every=1), RunFolder(tmp_path))
    spoken = capsys.readouterr()
    content = content_of(tmp_path) | {"log": caplog.text.encode(), "said": (spoken.out + spoken.err).encode()}
    assert {"rounds.jsonl", "environment.json", "checkpoint/000002/server.safetensors"} <= content.keys()
    assert found_in(content, [*TRACES, ENVIRONMENT.encode()]) == []
    failures = [client for r in result.rounds for client in r.failures]
    assert failures == (["c1", "c1"] if isinstance(method, Stumbling) else [])


def test_the_search_finds_a_value_where_there_is_one(tmp_path: Path) -> None:
    """S10. As text, and as the bytes of a tensor."""
    save_file({"a": torch.tensor([1.0, VALUE])}, tmp_path / "single.safetensors")
    save_file({"a": torch.tensor([VALUE], dtype=torch.float64)}, tmp_path / "double.safetensors")
    (tmp_path / "text").write_text(f"{VALUE}")
    (tmp_path / "tensor").write_text(f"{torch.tensor([VALUE])}")
    assert {line.partition(":")[0] for line in found_in(content_of(tmp_path), TRACES)} == set(content_of(tmp_path))


EXPERIMENT = """
[task]
name = "custom"
kind = "tables"
label = "label"
path = "{sites}"

[method]
name = "fedproto"

[training]
rounds = 2
epochs = 1
batch_size = 8
"""


def test_the_command_writes_no_secret_and_the_path_of_the_data_only_into_the_configuration(tmp_path: Path) -> None:
    """S10. On tables of the user's own."""
    sites = tmp_path / PLACE
    sites.mkdir()
    for site in "ab":
        rows = [f"{k},{VALUE if k == 5 else k * k},{'yes' if k % 2 else 'no'}" for k in range(20)]
        (sites / f"{site}.csv").write_text("\n".join(["height,age,label", *rows]))
    (tmp_path / "experiment.toml").write_text(EXPERIMENT.format(sites=sites))
    said = tmp_path / "said"

    def command() -> None:
        sys.stdout = sys.stderr = said.open("w", buffering=1)
        sys.argv = ["protofed", "run", str(tmp_path / "experiment.toml"), "--folder", str(tmp_path / "run")]
        app.main()

    assert ended(forked(command)) == 0
    assert "round 2/2" in said.read_text()
    content = content_of(tmp_path / "run") | {"said": said.read_bytes()}
    assert found_in(content, [*TRACES, ENVIRONMENT.encode()]) == []
    assert found_in(content, [PLACE.encode()]) == [f"config.toml: {PLACE.encode()!r}"]
