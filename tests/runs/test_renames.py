"""Settings of version 0.1 get an error that names the new key or value."""

from pathlib import Path
from typing import Any

import pytest

import protofed
from protofed import BadInput
from protofed.runs import compare
from protofed.runs.config import config
from protofed.runs.config.renames import RENAMED, Renamed, refuse_run_of_old_version, renamed
from protofed.runs.config.schema import field_names
from protofed.tasks import TASKS

PLAIN: dict[str, Any] = {"task": {"name": "minidigits"}, "method": {"name": "fedavg"}}

every_rename = pytest.mark.parametrize("rename", RENAMED, ids=[f"{'.'.join(r.key)} {r.value or ''}" for r in RENAMED])


def old(rename: Renamed) -> dict[str, Any]:
    """A configuration with the old key or value."""
    section, word = rename.key
    table = {key: dict(value) for key, value in PLAIN.items()}
    table.setdefault(section, {})[word] = rename.value or 1
    return table


@every_rename
def test_an_old_key_or_value_is_refused_with_the_new_one_and_nothing_else_is_said_of_it(rename: Renamed) -> None:
    with pytest.raises(BadInput) as caught:
        config.parse(old(rename), "old.toml")
    (line,) = [line for line in str(caught.value).splitlines() if line.startswith(f"old.toml: {'.'.join(rename.key)}:")]
    assert rename.new in line
    assert "version 0.2" in line


@every_rename
def test_so_is_an_override(rename: Renamed) -> None:
    with pytest.raises(BadInput, match=f"--set: {'.'.join(rename.key)}: .*{rename.new}"):
        config.parse(PLAIN, "new.toml", [f"{'.'.join(rename.key)}={rename.value or 1}"])


@every_rename
def test_what_the_error_names_is_there(rename: Renamed) -> None:
    section, word = rename.key
    if rename.key == ("task", "name"):
        assert rename.new in TASKS
    elif rename.value is not None:
        named = {"name": "cifar10"} if section == "task" else {}
        config.parse({**PLAIN, section: {**named, word: rename.new}}, "new.toml")
    else:
        assert rename.new in field_names(type(getattr(config.parse(PLAIN, "new.toml"), section)))


def test_a_renamed_key_is_named_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protofed.runs.config.renames.RENAMED", (Renamed(("training", "epoch"), new="epochs"),))
    (problem,) = renamed({"training": {"epoch": 3}})
    assert "write training.epochs" in problem.what
    assert not [*renamed({"training": {"epochs": 3}})]


def test_a_file_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "old.toml"
    path.write_text('[task]\nname = "own"\npath = "x"\n[method]\nname = "fedavg"\n')
    with pytest.raises(BadInput, match=r'old\.toml:2: task\.name: .*write name = "custom"'):
        config.load(path)


def test_a_comparison_names_it_too() -> None:
    table = {"tasks": {"a": {"task": {"name": "own"}}}, "methods": {"b": {"method": {"name": "fedavg"}}}}
    with pytest.raises(BadInput, match='write name = "custom"'):
        compare.parse(table, "old.toml")


def test_so_does_python() -> None:
    with pytest.raises(BadInput, match="retry_half_lr"):
        protofed.run("fedavg", on_divergence="halve")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match='write name = "custom"'):
        protofed.run("fedavg", "own")
    with pytest.raises(BadInput, match='write name = "custom"'):
        config.task_settings("own")


@pytest.mark.parametrize(
    ("table", "environment"),
    [(old(RENAMED[0]), {}), (PLAIN, {"protofed": "0.1.0"}), (PLAIN, {"protofed": "0.2.0.dev1"})],
)
def test_a_run_folder_of_version_0_1_is_refused_by_name(table: dict[str, Any], environment: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=r"results/x was made by protofed 0\.1.*start the run again"):
        refuse_run_of_old_version(table, environment, "results/x")


def test_a_run_folder_of_this_version_is_not_refused() -> None:
    refuse_run_of_old_version(PLAIN, {"protofed": "0.2.0", "runtime": {}}, "results/x")
    refuse_run_of_old_version(PLAIN, {}, "results/x")
