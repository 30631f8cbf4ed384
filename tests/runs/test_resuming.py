"""Which runs a folder may be taken for, and under which runtimes it may be continued."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protofed import BadInput, FedAvg
from protofed.engine.training import Training
from protofed.runs.config.config import Config
from protofed.runs.config.sections import EvaluationSettings
from protofed.runs.resuming import refuse_other_run, refuse_run_of_other_runtime
from protofed.runs.run_process import folder_of
from protofed.runs.runner import Result, execute
from protofed.runs.runtime_choice import RuntimeSettings
from protofed.runs.store.folder import RunFolder
from protofed.runs.sweep import sweep
from run_doubles import small_task

FIRST = Config(
    small_task(),
    FedAvg(),
    Training(rounds=2, epochs=1, batch_size=8),
    RuntimeSettings("sequential"),
    EvaluationSettings(),
)


def with_runtime(name: Any = "sequential", **settings: Any) -> Config:
    return replace(FIRST, runtime=RuntimeSettings(name, **settings))


def resumed(config: Config, folder: RunFolder, *allowed: str) -> Result:
    return execute(config.experiment(), folder, resume=True, allowed_changes=allowed)


@pytest.fixture
def begun(tmp_path: Path) -> RunFolder:
    """A run that was stopped after its first round."""
    folder = RunFolder(tmp_path / "begun")
    execute(FIRST.experiment(), folder, should_stop=lambda: folder.rounds_saved >= 1)
    return folder


def recorded(folder: RunFolder) -> dict[str, Any]:
    runtime: dict[str, Any] = json.loads((folder.path / "environment.json").read_text())["runtime"]
    return runtime


def test_the_chosen_runtime_is_recorded(begun: RunFolder, tmp_path: Path) -> None:
    expected = {"device": "cpu", "executor": "reference", "precision": "float32", "deterministic": True, "threads": 1}
    assert recorded(begun) == {"name": "sequential", **expected}
    folder = RunFolder(tmp_path / "auto")
    execute(with_runtime("auto", device="cpu").experiment(alone=False), folder)
    assert recorded(folder) == {"name": "sequential", **expected}, "auto is not what was run"


def test_a_runtime_that_gives_equal_bits_goes_on(begun: RunFolder) -> None:
    assert resumed(with_runtime("workers", workers=2), begun).is_complete


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (with_runtime(threads=2), "threads: 1 then, 2 now"),
        (with_runtime("cohort", device="cpu"), "executor: reference then, streams now"),
    ],
)
def test_a_runtime_that_gives_other_bits_is_refused_by_name_unless_it_is_allowed(
    begun: RunFolder, other: Config, difference: str
) -> None:
    before = {path: path.read_bytes() for path in begun.path.rglob("*") if path.is_file()}
    with pytest.raises(BadInput, match=difference) as caught:
        resumed(other, begun)
    for part in (str(begun.path), "runtime sequential", "--allow-config-change runtime"):
        assert part in str(caught.value)
    assert {path: path.read_bytes() for path in before} == before
    with pytest.raises(BadInput, match=difference):
        resumed(other, begun, "training")
    assert resumed(other, begun, "runtime").is_complete
    assert recorded(begun)[difference.partition(":")[0]] != recorded_first(difference)


def recorded_first(difference: str) -> str:
    return difference.split(": ")[1].partition(" then")[0]


def test_resuming_finds_the_run_of_another_runtime_although_its_name_is_another(tmp_path: Path) -> None:
    folder = folder_of(FIRST, tmp_path)
    execute(FIRST.experiment(), folder, should_stop=lambda: folder.rounds_saved >= 1)
    (tmp_path / "notes.txt").write_text("no run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.toml").write_text("not [ TOML")
    with pytest.raises(BadInput, match="threads: 1 then, 2 now"):
        refuse_run_of_other_runtime(with_runtime(threads=2), tmp_path)
    refuse_run_of_other_runtime(with_runtime("workers"), tmp_path)
    other = replace(with_runtime(threads=2), training=replace(FIRST.training, seed=1))
    refuse_run_of_other_runtime(other, tmp_path)
    refuse_run_of_other_runtime(FIRST, tmp_path / "nowhere")


def test_a_finished_run_is_not_shown_for_another_evaluation_or_runtime(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "done")
    execute(FIRST.experiment(), folder)
    refuse_other_run(folder, FIRST)
    refuse_other_run(folder, with_runtime("workers"))
    with pytest.raises(BadInput, match=r"evaluation\.every: 1 then, 2 now"):
        refuse_other_run(folder, replace(FIRST, evaluation=EvaluationSettings(every=2)))
    with pytest.raises(BadInput, match="threads: 1 then, 2 now"):
        refuse_other_run(folder, with_runtime(threads=2))


def test_a_comparison_does_not_take_a_run_with_another_evaluation(tmp_path: Path) -> None:
    execute(FIRST.experiment(), folder_of(FIRST, tmp_path))
    other = replace(FIRST, evaluation=EvaluationSettings(every=2))
    assert folder_of(other, tmp_path) == folder_of(FIRST, tmp_path), "evaluation does not change what is trained"
    same, mismatch = sweep([FIRST, other], tmp_path)
    assert same.is_done
    assert same.failure is None
    assert "evaluation.every: 1 then, 2 now" in str(mismatch.failure)


def test_a_run_folder_of_version_0_1_is_neither_resumed_nor_shown(begun: RunFolder) -> None:
    path = begun.path / "environment.json"
    facts = json.loads(path.read_text())
    del facts["runtime"]
    path.write_text(json.dumps(facts))
    with pytest.raises(BadInput, match=r"made by protofed 0\.1"):
        resumed(FIRST, begun)
    with pytest.raises(BadInput, match=r"made by protofed 0\.1"):
        refuse_other_run(begun, FIRST)
