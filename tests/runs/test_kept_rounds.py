"""Rounds whose states stay in the folder: whole, never tidied away, the same after kills, and loaded again."""

import itertools
import logging
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import pytest
import torch

import protofed
from doubles import memories
from faults.kills import folder_in_memory, run_killed_after
from protofed import BadInput, FedAvg, LocalOnly, RunFailed, tree
from protofed.engine.state import State
from protofed.runs.config import config as configuration
from protofed.runs.loading import load
from protofed.runs.runner import Experiment, execute
from protofed.runs.store import checkpoint, disk, verify
from protofed.runs.store.folder import RunFolder
from run_doubles import small_experiment, small_task

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

ROUNDS, KEEP = 7, (0, 2, 3)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with folder_in_memory() as folder:
        yield folder


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    """Two of three clients in each round, which keep their weights: a kept round needs memories of older ones."""
    whole = small_experiment("moon", ROUNDS)
    training = replace(whole.federation.training, fraction=0.5)
    return replace(whole, federation=replace(whole.federation, training=training), keep=KEEP)


@pytest.fixture(scope="module")
def expected(experiment: Experiment) -> list[State]:
    """After every round."""
    states = [experiment.federation.start()]
    for _ in range(ROUNDS):
        states.append(experiment.federation.advance(states[-1]))
    return states


def leaves(state: State) -> list[torch.Tensor]:
    return tree.leaves((state.server, [memory for _, memory in sorted(memories(state).items())]))


def refuse_difference(folder: RunFolder, experiment: Experiment, expected: list[State]) -> None:
    assert verify.rounds_there(folder.checkpoints) == [*KEEP, ROUNDS]
    for number in KEEP:
        found = checkpoint.load_round(folder.checkpoints, number, experiment.federation, experiment.identity)
        assert found.state.round == number
        assert found.is_kept
        assert [line.count('"round"') for line in found.rounds.splitlines()] == [1] * number
        assert found.state.receipts.keys() == expected[number].receipts.keys()
        assert all(map(torch.equal, leaves(found.state), leaves(expected[number])))


def names(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in folder.checkpoints.iterdir())


def test_kept_rounds_stay_whole_beside_the_last_two(
    experiment: Experiment, expected: list[State], tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    execute(experiment, folder)
    assert names(folder) == ["000000", "000002", "000003", "000006", "000007", "memories"]
    refuse_difference(folder, experiment, expected)
    shards = sorted(path.stem for path in (folder.checkpoints / "memories").iterdir())
    named = {m for name in names(folder)[:-1] for m in verify.whole(folder.checkpoints, name)}
    assert [f"{stem}.safetensors" for stem in shards] == sorted(named), "memories that nobody needs stay, or others go"


def test_kills_at_random_moments_leave_the_same_kept_rounds(
    experiment: Experiment, expected: list[State], tmp_path: Path
) -> None:
    draw, begin = random.Random(5), time.process_time()
    execute(experiment, RunFolder(tmp_path / "timed"))
    whole, kills = time.process_time() - begin, 0
    for number in itertools.count():
        if kills >= 20:
            break
        folder = RunFolder(tmp_path / str(number))
        while run_killed_after(experiment, folder, draw.uniform(0, whole)):
            kills += 1
        refuse_difference(folder, experiment, expected)


def test_a_run_that_is_resumed_with_other_rounds_to_keep_loses_none(
    experiment: Experiment, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(tmp_path / "run")
    execute(experiment, folder, should_stop=lambda: folder.rounds_saved >= 5)
    with caplog.at_level(logging.WARNING):
        execute(replace(experiment, keep=(1, 5)), folder, resume=True)
    assert verify.rounds_there(folder.checkpoints) == [0, 2, 3, 5, ROUNDS], "5 is kept only since it was resumed"
    assert "the states of rounds 1 are not here any more" in caplog.text


def test_a_save_that_fails_removes_no_kept_round(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run")
    execute(experiment, folder, should_stop=lambda: folder.rounds_saved >= 5)

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(disk, "put_folder", full)
        with pytest.raises(RunFailed, match="No space left"):
            execute(experiment, folder, resume=True)
    assert names(folder) == ["000000", "000002", "000003", "000004", "000005", "memories"]


def test_a_damaged_kept_round_is_refused_and_the_run_goes_on(experiment: Experiment, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    execute(experiment, folder, should_stop=lambda: folder.rounds_saved >= 5)
    server = folder.checkpoints / "000002" / "server.safetensors"
    data = bytearray(server.read_bytes())
    data[-3] ^= 1
    server.write_bytes(data)
    with pytest.raises(RunFailed, match=r"000002 is damaged: server.safetensors does not have its checksum"):
        checkpoint.load_round(folder.checkpoints, 2, experiment.federation, experiment.identity)
    execute(experiment, folder, resume=True)
    assert verify.rounds_there(folder.checkpoints) == [0, 3, ROUNDS]
    assert (folder.checkpoints / "damaged-000002").is_dir()


def test_lines_of_a_kept_round_are_not_taken_for_those_of_the_run(experiment: Experiment, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    execute(experiment, folder, should_stop=lambda: folder.rounds_saved >= 5)
    folder.write_rounds((folder.checkpoints / "000002" / "rounds.jsonl").read_text())
    with pytest.raises(BadInput, match="it is not what was saved"):
        folder.read_rounds()


# ---- from a configuration and from Python

TOML = {
    "task": {"name": "minidigits"},
    "method": {"name": "fedavg"},
    "training": {"rounds": 3, "epochs": 1},
    "runtime": {"name": "sequential"},
    "saving": {"keep": [1, 3]},
}


def test_a_configuration_names_the_rounds() -> None:
    config = configuration.parse(TOML, "a test")
    assert config.saving.keep == [1, 3]
    assert "keep = [1, 3]" in config.toml()
    plain = configuration.parse({key: value for key, value in TOML.items() if key != "saving"}, "a test")
    assert config.identity == plain.identity, "what is kept changes no number"
    assert configuration.parse(TOML, "a test", ["saving.keep=[2]"]).saving.keep == [2]


@pytest.mark.parametrize(
    ("keep", "said"),
    [([4], "names round 4, but the run has only 3 rounds"), ([-1], "greater than or equal to 0"), (2, "list")],
)
def test_what_cannot_be_kept_is_refused(keep: Any, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        configuration.parse({**TOML, "saving": {"keep": keep}}, "a test")


def test_a_run_of_python_is_loaded_as_it_was(tmp_path: Path) -> None:
    task = small_task()
    protofed.run(LocalOnly(), task, rounds=3, epochs=1, batch_size=8, folder=tmp_path / "run", keep=(1,))
    short = protofed.run(LocalOnly(), task, rounds=1, epochs=1, batch_size=8)
    found = load(tmp_path / "run", 1, task=task)
    assert [r.round for r in found.rounds] == [1]
    x = task.tests["low"].x
    assert torch.equal(found.predict("c1", x), short.predict("c1", x))
    last = protofed.load(tmp_path / "run", task=task)
    assert last.state.round == 3
    assert not torch.equal(last.predict("c1", x), short.predict("c1", x))


def test_what_cannot_be_loaded_is_said(tmp_path: Path) -> None:
    run, task = tmp_path / "run", small_task()
    protofed.run(FedAvg(), task, rounds=3, epochs=1, batch_size=8, folder=run)
    with pytest.raises(BadInput, match=r"no state of round 1, but those of: 3; .* keep = \[1\]"):
        load(run, 1, task=task)
    with pytest.raises(BadInput, match="give it again, as load"):
        load(run)
    with pytest.raises(BadInput, match="another task"):
        load(run, task=small_task(4))
    with pytest.raises(BadInput, match="another method"):
        load(run, method=LocalOnly(), task=task)
    with pytest.raises(BadInput, match="not a run folder"):
        load(tmp_path)
    rmtree(run / "checkpoint")
    with pytest.raises(BadInput, match="no state that is whole"):
        load(run, task=task)


def test_a_link_in_the_place_of_a_kept_round_is_not_followed(experiment: Experiment, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    execute(experiment, folder)
    kept = folder.checkpoints / "000002"
    copytree(kept, tmp_path / "elsewhere")
    rmtree(kept)
    kept.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunFailed, match="link"):
        checkpoint.load_round(folder.checkpoints, 2, experiment.federation, experiment.identity)
