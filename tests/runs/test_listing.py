"""Run folders as lists show them."""

import os
import socket
from pathlib import Path

import pytest

from page_doubles import a_round, written
from protofed.errors import BadInput
from protofed.runs.listing import listed, listing


def noted(folder: Path, pid: int, host: str) -> Path:
    (folder / "lock").write_text(f"pid {pid} on {host} since 2026-01-01 10:00:00")
    return folder


def test_a_run_says_what_it_is_and_how_it_does(tmp_path: Path) -> None:
    rounds = [a_round(k, own) for k, own in enumerate((0.1, 0.2, 0.3, 0.4, 0.5, 0.6), 1)]
    settings = {"training": {"rounds": 9, "seed": 3}, "training.optimizer": {"lr": 0.1}}
    run = listed(written(tmp_path / "a", rounds, settings))
    assert (run.method, run.task, run.seed, run.done, run.total) == ("fedavg", "minidigits", 3, 6, 9)
    assert run.settings["training.optimizer.lr"] == 0.1
    assert run.headline == ("average", pytest.approx(0.75 * 0.4))  # of the last five: 0.2 to 0.6
    own = listed(written(tmp_path / "b", [a_round(1, 0.5, judged="own models")]))
    assert own.headline == ("own", 0.5)
    assert listed(written(tmp_path / "c", [])).headline is None


def test_who_works_in_a_folder_is_read_from_its_lock(tmp_path: Path) -> None:
    here, nobody = socket.gethostname(), 2**22 + 1  # above the largest pid of Linux
    states = {
        "done": written(tmp_path / "done", [a_round(1)]),
        "stopped": written(tmp_path / "a", [a_round(1)], is_done=False),
        "running": noted(written(tmp_path / "b", [a_round(1)], is_done=False), os.getpid(), here),
        "elsewhere": noted(written(tmp_path / "c", [a_round(1)], is_done=False), os.getpid(), "another-machine"),
    }
    assert {state: listed(folder).progress for state, folder in states.items()} == {state: state for state in states}
    killed = noted(written(tmp_path / "d", [a_round(1)], is_done=False), nobody, here)
    assert listed(killed).progress == "stopped"
    (killed / "lock").write_text("pid 99999999999999999999 on " + here + " since x")
    assert listed(killed).progress == "stopped"
    (killed / "lock").write_text("nonsense")
    assert listed(killed).progress == "stopped"


def test_folders_of_runs_and_runs_are_found_once_each(tmp_path: Path) -> None:
    for name in ("a", "b"):
        written(tmp_path / name, [a_round(1)])
    (tmp_path / "notes").mkdir()
    (tmp_path / "b" / "config.toml").write_text("[task\n")
    found = listing([tmp_path, tmp_path / "a"])
    assert [run.path.name for run in found.runs] == ["a"]
    assert [path.name for path in found.left_out] == ["b"]
    with pytest.raises(BadInput, match="cannot be read: No such file"):
        listing([tmp_path / "nowhere"])
    with pytest.raises(BadInput, match="is not a run folder"):
        listed(tmp_path / "notes")
