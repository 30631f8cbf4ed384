"""A run on another machine: what travels there and back, checked at both ends. No cluster is needed here."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protofed import BadInput, RunFailed, Task
from protofed.cli.compare import _chosen_sweep
from protofed.runs import compare
from protofed.runs.config import config
from protofed.runs.config.config import Config
from protofed.runs.remote import job, run_here, versions
from protofed.runs.runner import execute
from protofed.runs.store import disk
from protofed.runs.store.folder import RunFolder
from protofed.runs.store.parcel import checked, packed, unpack
from protofed.runs.store.verify import is_whole
from protofed.runs.sweep import sweep
from run_doubles import small_experiment

TRAINING = {"rounds": 2, "epochs": 1}
NEVER: Callable[[int], bool] = lambda rounds: False  # noqa: E731


def asked_for(method: str = "fedavg", **training: object) -> Config:
    sections = {"task": {"name": "minidigits"}, "method": {"name": method}, "training": {**TRAINING, **training}}
    return config.parse(sections, "test")


def numbers(rounds: str) -> list[dict[str, Any]]:
    """What rounds.jsonl says, without how long it took."""
    return [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in rounds.splitlines()]


def test_a_run_elsewhere_gives_the_numbers_of_one_here(tmp_path: Path) -> None:
    one = asked_for("fpl")
    (here,) = sweep([one], tmp_path, workers=1)
    folder = RunFolder(tmp_path / one.identity)
    seen: list[int] = []
    failure, files = run_here(job(one, {}), lambda rounds: bool(seen.append(rounds)))
    assert failure == ""
    assert seen == [0, 1]
    assert here.is_done
    assert files.keys() == packed(folder).keys()
    assert numbers(files["rounds.jsonl"].decode()) == numbers(folder.read_rounds())
    assert files["checkpoint/000002/server.safetensors"] == packed(folder)["checkpoint/000002/server.safetensors"]
    assert json.loads(files["environment.json"])["command"].startswith(Path(sys.argv[0]).name)


def test_a_stopped_run_comes_back_unfinished_and_goes_on_elsewhere() -> None:
    one = asked_for()
    failure, first = run_here(job(one, {}), lambda rounds: rounds == 1)
    assert failure == ""
    assert len(numbers(first["rounds.jsonl"].decode())) == 1
    assert "done" not in first
    begun: list[int] = []
    failure, second = run_here(job(one, first), lambda rounds: bool(begun.append(rounds)))
    assert (failure, begun) == ("", [1])
    assert second["checkpoint/000001/server.safetensors"] == first["checkpoint/000001/server.safetensors"]
    _, whole = run_here(job(one, {}), NEVER)
    assert second["checkpoint/000002/server.safetensors"] == whole["checkpoint/000002/server.safetensors"]


def test_a_run_that_fails_elsewhere_says_why() -> None:
    failure, files = run_here(job(asked_for(optimizer={"name": "sgd", "lr": 1e30}), {}), NEVER)
    assert "diverged" in failure
    assert "done" not in files


def test_a_node_that_would_compute_another_run_refuses() -> None:
    there = job(asked_for(), {})
    there["numerics"] = {**there["numerics"], "device": "cuda"}
    failure, files = run_here(there, NEVER)
    assert "device cuda there, cpu here" in failure
    assert files == {}
    there = job(asked_for(), {})
    there["identity"] = "another"
    assert "other data or code for the run another" in run_here(there, NEVER)[0]


METHOD = """
from dataclasses import dataclass
from protofed import FedAvg
from {helper} import STRENGTH

@dataclass(frozen=True)
class Mine(FedAvg):
    strength: float = STRENGTH
"""


def test_the_user_s_own_classes_travel_with_what_they_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "helper_of_mine.py").write_text("STRENGTH = 0.5\n")
    (tmp_path / "travelling_method.py").write_text(METHOD.format(helper="helper_of_mine"))
    (tmp_path / "unrelated.py").write_text("raise SystemExit\n")
    (tmp_path / "c.toml").write_text(
        '[common.training]\nrounds = 1\nepochs = 1\n[tasks.d.task]\nname = "minidigits"\n'
        '[methods.M.method]\nname = "travelling_method:Mine"\n'
    )
    one = compare.load(tmp_path / "c.toml").configs[0]
    there = job(one, {})
    assert there["code"].keys() == {"helper_of_mine.py", "travelling_method.py"}
    for name in ("helper_of_mine", "travelling_method"):  # another machine has not loaded them, and has no such folder
        monkeypatch.delitem(sys.modules, name)
    for path in tmp_path.glob("*.*"):
        path.unlink()
    path = list(sys.path)
    failure, files = run_here(there, NEVER)
    assert failure == ""
    assert "done" in files
    assert sys.path == path
    for name in ("helper_of_mine", "travelling_method"):
        monkeypatch.delitem(sys.modules, name)


def test_what_cannot_travel_is_refused_by_name(tiny_task: Task) -> None:
    class Local(type(asked_for().method)):  # type: ignore[misc]
        pass

    parts = vars(asked_for())
    with pytest.raises(BadInput, match=r"the run .* \(Local\) cannot travel to another machine: .*Local"):
        job(Config(**{**parts, "method": Local()}), {})
    with pytest.raises(BadInput, match="its task was built in Python"):
        job(Config(**{**parts, "task": tiny_task}), {})


def test_versions_are_those_that_decide_numbers_without_the_build() -> None:
    assert {"protofed", "torch", "numpy"} <= versions().keys()
    assert not any("+" in version for version in versions().values())


@pytest.mark.parametrize(
    "name",
    [
        *("../evil", "/etc/evil", "checkpoint/../../evil", "checkpoint/000001/../../../evil", "lock", "evil.py", ""),
        *("done\n", "checkpoint/memories/../x.safetensors", "checkpoint/000001/deeper/manifest", 3),
    ],
)
def test_a_name_that_no_run_folder_has_is_refused(name: Any) -> None:
    with pytest.raises(RunFailed, match="no file of a run folder; nothing was written"):
        checked({"done": b"", name: b""}, "run x")


def test_what_is_not_bytes_is_refused() -> None:
    with pytest.raises(RunFailed, match=r"rounds\.jsonl came back as str"):
        checked({"rounds.jsonl": "text"}, "run x")
    with pytest.raises(RunFailed, match="no run folder but list"):
        checked([b""], "run x")


def test_too_much_is_refused_at_both_ends(tmp_path: Path) -> None:
    assert checked({"done": b"", "rounds.jsonl": b"123"}, "run x", limit=3)
    with pytest.raises(RunFailed, match="has 4 bytes, and at most 3 travel"):
        checked({"config.toml": b"1", "rounds.jsonl": b"123"}, "run x", limit=3)
    (tmp_path / "rounds.jsonl").write_bytes(b"1234")
    with pytest.raises(RunFailed, match="has 4 bytes, and at most 3 travel"):
        packed(RunFolder(tmp_path), limit=3)


@pytest.mark.parametrize("name", ["rounds.jsonl", "checkpoint"])
def test_a_link_does_not_travel(tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "outside")
    with pytest.raises(RunFailed, match=f"{name} is a link"):
        packed(RunFolder(tmp_path / "run"))


def states(tmp_path: Path) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The folder of a run of five rounds after the first one, and after the last."""
    folder = RunFolder(tmp_path / "there")
    execute(small_experiment("scaffold", 5), folder, should_stop=lambda: folder.rounds_saved == 1)
    first = packed(folder)
    execute(small_experiment("scaffold", 5), folder, resume=True)
    return first, packed(folder)


def test_what_arrives_replaces_what_was_there_and_only_a_run_s_files_leave(tmp_path: Path) -> None:
    first, last = states(tmp_path)
    here = RunFolder(tmp_path / "here")
    unpack(first, here)
    assert (here.rounds_saved, here.is_done) == (1, False)
    unpack(last, here)
    assert (here.rounds_saved, here.is_done) == (5, True)
    (here.path / "notes.txt").write_text("the user's")
    assert packed(here) == last
    assert any(name.startswith("checkpoint/memories/") for name in last)


def test_wherever_writing_fails_a_whole_state_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = states(tmp_path)
    write, left = disk.write, 0

    def full(folder: int, name: str, data: bytes) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(28, "No space left on device")
        write(folder, name, data)

    for stop in range(len(last)):
        here = RunFolder(tmp_path / f"here-{stop}")
        left = len(first)
        monkeypatch.setattr(disk, "write", full)
        unpack(first, here)
        left = stop
        with pytest.raises(RunFailed, match="No space left on device"):
            unpack(last, here)
        newest = max(p for p in here.checkpoints.iterdir() if p.name.isdigit())
        assert is_whole(newest.parent, newest.name)
        assert not here.is_done
        monkeypatch.setattr(disk, "write", write)
        execute(small_experiment("scaffold", 5), here, resume=True)
        assert packed(here)["checkpoint/000005/server.safetensors"] == last["checkpoint/000005/server.safetensors"]


def test_without_ray_the_option_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "protofed.runs.ray_sweep", raising=False)
    with pytest.raises(BadInput, match=r"pip install 'protofed\[ray\]'"):
        _chosen_sweep("auto", None, None)


def test_options_of_ray_need_its_address() -> None:
    assert _chosen_sweep(None, None, None) is None
    with pytest.raises(BadInput, match="for --ray ADDRESS, which is not given"):
        _chosen_sweep(None, 1.0, None)


def test_nothing_of_a_run_elsewhere_stays_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run_here(job(asked_for(), {}), lambda rounds: True)
    assert os.listdir(tmp_path) == []
