"""Methods and tasks of the user's own, named as module:Class in an experiment file."""

import itertools
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from protofed import BadInput, FedAvg
from protofed.methods.averaging import Averaging
from protofed.runs import compare
from protofed.runs.config import config
from protofed.runs.runner import execute
from protofed.runs.store.folder import RunFolder
from protofed.runs.sweep import sweep

EXAMPLES = Path(__file__).parents[2] / "examples"

METHOD = """
from dataclasses import dataclass
from protofed import FedAvg
from protofed.api.method import Positive

@dataclass(frozen=True)
class Mine(FedAvg):
    strength: Positive = 1.0
"""
TASK = """
from dataclasses import dataclass
from protofed.tasks.minidigits import Minidigits

@dataclass(frozen=True)
class Digits:
    seed: int = 0

    def build(self):
        return Minidigits().build()
"""
EXPERIMENT = """
[task]
name = "{task}"
[method]
name = "{method}"
[training]
rounds = 1
epochs = 1
"""

numbers = itertools.count()


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """What a test imports is forgotten after it, and the path is as it was."""
    modules, path = set(sys.modules), list(sys.path)
    yield
    assert sys.path == path
    for name in set(sys.modules) - modules:
        if name.startswith("mine_"):
            del sys.modules[name]


def new_module(folder: Path, text: str) -> str:
    """The name of a module that no test has imported yet."""
    name = f"mine_{next(numbers)}"
    (folder / f"{name}.py").write_text(text)
    return name


def written(folder: Path, method: str = "fedavg", task: str = "minidigits", more: str = "") -> Path:
    path = folder / "experiment.toml"
    path.write_text(EXPERIMENT.format(method=method, task=task) + more)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(BadInput) as caught:
        config.load(path)
    return str(caught.value)


def test_a_method_next_to_the_file_is_found_and_its_settings_are_checked(tmp_path: Path) -> None:
    name = f"{new_module(tmp_path, METHOD)}:Mine"
    loaded = config.load(written(tmp_path, name), ["method.strength=2"])
    assert isinstance(loaded.method, FedAvg)
    assert loaded.resolved()["method"] == {"name": name, "strength": 2.0, "weighting": "training"}
    for override, said in (
        ("method.strength=-1", "--set: method.strength: must be greater than 0"),
        ("method.strenth=1", "--set: method.strenth: unknown key; did you mean 'strength'?"),
    ):
        with pytest.raises(BadInput, match=said.replace("?", r"\?")):
            config.load(written(tmp_path, name), [override])


def test_a_task_of_ones_own_is_built(tmp_path: Path) -> None:
    loaded = config.load(written(tmp_path, task=f"{new_module(tmp_path, TASK)}:Digits"))
    assert len(loaded.experiment().federation.ids) == 12


def test_a_module_on_the_path_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "elsewhere").mkdir()
    name = new_module(tmp_path / "package", METHOD)
    monkeypatch.syspath_prepend(tmp_path / "package")
    assert type(config.load(written(tmp_path / "elsewhere", f"{name}:Mine")).method).__name__ == "Mine"
    monkeypatch.undo()


def test_an_override_may_name_it(tmp_path: Path) -> None:
    name = f"{new_module(tmp_path, METHOD)}:Mine"
    assert config.load(written(tmp_path), [f"method.name={name}"]).resolved()["method"]["name"] == name


def test_it_may_be_the_base_of_a_wrapper(tmp_path: Path) -> None:
    name = f"{new_module(tmp_path, METHOD)}:Mine"
    loaded = config.load(written(tmp_path, "averaging", more=f'[method.base]\nname = "{name}"\nstrength = 3\n'))
    assert isinstance(loaded.method, Averaging)
    assert loaded.resolved()["method"]["base"] == {"name": name, "strength": 3.0, "weighting": "training"}
    personal = new_module(tmp_path, METHOD.replace("FedAvg", "LocalOnly"))
    said = refusal(written(tmp_path, "averaging", more=f'[method.base]\nname = "{personal}:Mine"\n'))
    assert "method.base" in said


def test_a_class_of_ours_by_its_module_is_ours(tmp_path: Path) -> None:
    ours = config.load(written(tmp_path, "protofed.methods.fedavg:FedAvg"))
    assert ours.identity == config.load(written(tmp_path, "fedavg")).identity


@pytest.mark.parametrize(
    ("module", "cls", "said"),
    [
        (None, "Mine", "there is no module 'mine_"),
        (METHOD, "Yours", "has no class Yours"),
        ("Mine = 3", "Mine", "has no class Mine"),
        ("class Mine: pass", "Mine", "is not a method: derive it from protofed.Method"),
        (METHOD.replace("@dataclass(frozen=True)\n", ""), "Mine", "put @dataclass(frozen=True) above it"),
        (METHOD.replace("FedAvg", "Method") + "Method = None", "Mine", "lacks aggregate"),
        (METHOD.replace("strength", "name"), "Mine", "has a setting called name"),
        (METHOD.replace(": Positive", ": 'Nowhere'"), "Mine", "NameError"),
        ("import nowhere_at_all", "Mine", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("x = 1\ny = 1 / 0", "Mine", "ZeroDivisionError: division by zero"),
        ("def f(:", "Mine", "SyntaxError"),
        ("import sys\nsys.exit(3)", "Mine", "SystemExit: 3"),
    ],
)
def test_what_is_wrong_with_it_is_said_once_with_line_and_file(
    tmp_path: Path, module: str | None, cls: str, said: str
) -> None:
    name = f"mine_{next(numbers)}" if module is None else new_module(tmp_path, module)
    message = refusal(written(tmp_path, f"{name}:{cls}"))
    assert message.startswith(f"{tmp_path}/experiment.toml:5: method.name: ")
    assert said in message
    assert str(tmp_path / f"{name}.py" if module else tmp_path) in message.partition("method.name: ")[2]
    assert "\n" not in message


@pytest.mark.parametrize("name", [":Mine", "mine:", "a b:C", "../mine:C", "mine:C.d", "mine:C:d", "mine.py:C d"])
def test_a_name_that_is_no_name_is_refused(tmp_path: Path, name: str) -> None:
    assert "is not module:Class" in refusal(written(tmp_path, name))


def test_a_task_needs_to_be_built(tmp_path: Path) -> None:
    name = new_module(tmp_path, TASK.replace("def build", "def make"))
    assert "is not a task: it needs a method build()" in refusal(written(tmp_path, task=f"{name}:Digits"))


def test_a_library_is_not_hidden_by_a_file_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(9)")
    assert "has no class Mine" in refusal(written(tmp_path, "json:Mine"))
    assert json.loads("1") == 1


def test_two_files_of_one_name_are_not_taken_for_one_another(tmp_path: Path) -> None:
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
    name = new_module(tmp_path / "a", METHOD)
    (tmp_path / "b" / f"{name}.py").write_text(METHOD)
    config.load(written(tmp_path / "a", f"{name}:Mine"))
    config.load(written(tmp_path / "a", f"{name}:Mine"))
    assert f"already loaded from {tmp_path}/a/{name}.py" in refusal(written(tmp_path / "b", f"{name}:Mine"))
    assert "there is no module" in refusal(written(tmp_path / "c", f"{name}:Mine"))


def canary(folder: Path) -> str:
    return new_module(folder, f"from pathlib import Path\nPath({str(folder / 'sung')!r}).touch()\n" + METHOD)


def test_a_table_that_no_experiment_file_holds_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{canary(tmp_path)}:Mine"
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BadInput, match=r"method\.name: .* is not imported"):
        config.parse(tomllib.loads(EXPERIMENT.format(method=name, task="minidigits")), "test")
    monkeypatch.undo()
    assert not (tmp_path / "sung").exists()


def test_the_configuration_of_a_run_folder_imports_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    own = config.load(written(tmp_path))
    execute(own.experiment(), folder)
    name = f"{canary(folder.path)}:Mine"
    path = folder.path / "config.toml"
    path.write_text(path.read_text().replace('"fedavg"', f'"{name}"'))
    assert "is a run folder. If you trust config.toml" in refusal(path)
    with pytest.raises(BadInput, match="another configuration"):
        execute(own.experiment(), folder, resume=True)
    assert not (folder.path / "sung").exists()


def test_other_code_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = new_module(tmp_path, METHOD)
    path = written(tmp_path, f"{name}:Mine")
    first = config.load(path).identity
    assert config.load(path).identity == first
    (tmp_path / f"{name}.py").write_text(METHOD + "\nFACTOR = 2\n")
    del sys.modules[name]  # as in a new process
    monkeypatch.setattr("protofed.runs.config.user_code._FIRST_SEEN", {})
    assert config.load(path).identity.partition("+")[0] == first.partition("+")[0]
    assert config.load(path).identity != first


COMPARISON = """
seeds = [0]
[common.training]
rounds = 1
epochs = 1
[tasks.digits.task]
name = "minidigits"
[methods.Mine.method]
name = "{name}"
"""


def test_the_processes_of_a_comparison_find_it_too(tmp_path: Path) -> None:
    path = tmp_path / "comparison.toml"
    path.write_text(COMPARISON.format(name=f"{new_module(tmp_path, METHOD)}:Mine"))
    (outcome,) = sweep(compare.load(path).configs, tmp_path / "out", workers=1)
    assert outcome.failure is None
    assert outcome.is_done


def test_the_example_runs_from_the_command_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "protofed.cli.app", "run", str(EXAMPLES / "own_method" / "experiment.toml")]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr
    (folder,) = (tmp_path / "results").iterdir()
    recorded = tomllib.loads((folder / "config.toml").read_text())["method"]
    assert recorded == {"name": "my_method:FedSmall", "feature_decay": 0.05, "weighting": "training"}
