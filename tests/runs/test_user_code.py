"""Code of the user's own counts in a run's hash with all that it uses: an edited loss is another run."""

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import protofed
from models.handing import vectors, write_tables
from protofed import BadInput, FedAvg
from protofed.runs.config import config
from protofed.runs.config.user_code import code_digest, model_code

numbers = itertools.count()

METHOD = """
from dataclasses import dataclass
from protofed import FedAvg
{imports}

@dataclass(frozen=True)
class Mine(FedAvg):
    def loss(self, model, batch, message, memory):
        {body}
"""


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("coded_"):
            del sys.modules[name]


def written(folder: Path, text: str, name: str = "") -> str:
    name = name or f"coded_{next(numbers)}"
    (folder / f"{name}.py").write_text(text)
    return name


def digest_of(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of the class Mine in a module, as a new process would see it."""
    for loaded in [one for one in sys.modules if one.startswith("coded_")]:
        del sys.modules[loaded]
    monkeypatch.setattr("protofed.runs.config.user_code._FIRST_SEEN", {})
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    return code_digest([importlib.import_module(name).Mine])


IMPORTS = {
    "from {0} import scaled": "return scaled(batch)",
    "import {0}": "return {0}.scaled(batch)",
    "": "from {0} import scaled\n        return scaled(batch)",
}


@pytest.mark.parametrize("line", IMPORTS)
def test_a_helper_that_is_edited_makes_another_run(tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = written(tmp_path, "SCALE = 2\n")
    helper = written(tmp_path, f"from {constants} import SCALE\ndef scaled(batch):\n    return SCALE * batch\n")
    body = IMPORTS[line].format(helper)
    name = written(tmp_path, METHOD.format(imports=line.format(helper), body=body))
    first = digest_of(tmp_path, name, monkeypatch)
    assert first == digest_of(tmp_path, name, monkeypatch)
    (tmp_path / f"{helper}.py").write_text(f"from {constants} import SCALE\ndef scaled(batch):\n    return batch\n")
    second = digest_of(tmp_path, name, monkeypatch)
    (tmp_path / f"{constants}.py").write_text("SCALE = 3\n")
    third = digest_of(tmp_path, name, monkeypatch)
    assert len({first, second, third}) == 3


def test_code_that_moves_is_the_same_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old").mkdir()
    name = written(tmp_path / "old", METHOD.format(imports="", body="return 1"))
    before = digest_of(tmp_path / "old", name, monkeypatch)
    (tmp_path / "old").rename(tmp_path / "new")
    assert digest_of(tmp_path / "new", name, monkeypatch) == before


def test_a_module_that_is_edited_while_python_runs_is_not_taken_for_the_new_one(tmp_path: Path) -> None:
    name = written(tmp_path, METHOD.format(imports="", body="return 1"))
    experiment = tmp_path / "experiment.toml"
    experiment.write_text(f'[task]\nname = "minidigits"\n[method]\nname = "{name}:Mine"\n')
    config.load(experiment)
    (tmp_path / f"{name}.py").write_text(METHOD.format(imports="", body="return 2"))
    with pytest.raises(BadInput, match="has changed since Python loaded it, and what would run is the old code"):
        config.load(experiment)


# ---- what stands in the main script or in a notebook


def cell(text: str) -> dict[str, Any]:
    """The names that a cell of a notebook defines."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(text, names)  # noqa: S102
    return names


CELL = """
FACTOR = {factor}
def helper(x):
    return {helper}
def unrelated():
    return {unrelated}
class Base:
    weight = {weight}
class Mine(Base):
    '''{words}'''
    def loss(self, x):
        return FACTOR * helper(x)
"""
PLAIN = {"factor": 2, "helper": "x + 1", "unrelated": "5", "weight": 0.5, "words": "A method."}


@pytest.mark.parametrize(
    ("change", "is_other"),
    [
        ({"factor": 3}, True),
        ({"helper": "x + 2"}, True),
        ({"weight": 0.6}, True),
        ({"unrelated": "6"}, False),
        ({"words": "Other words."}, False),
    ],
)
def test_a_cell_counts_with_what_it_refers_to(change: dict[str, Any], is_other: bool) -> None:
    one, other = (code_digest([cell(CELL.format(**{**PLAIN, **own}))["Mine"]]) for own in ({}, change))
    assert one
    assert (one != other) == is_other


def test_networks_count(tmp_path: Path) -> None:
    def lambdas(width: int) -> Callable[[str], Any]:
        return cell(f"def make(width):\n    return lambda client: width\nmodel = make({width})")["model"]

    assert code_digest(model_code(lambdas(8))) != code_digest(model_code(lambdas(9)))
    assert not code_digest(model_code(vectors().model)), "protofed's own code is not the user's"
    assert not code_digest([FedAvg])


def test_an_edited_method_is_not_answered_with_the_old_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python, with a folder: what was seen was the old number for the new code."""

    def method(body: str) -> Any:
        return cell(METHOD.format(imports="", body=body))["Mine"]

    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    old, new = (method(f"return {scale} * batch.cross_entropy(model.logits(batch.x))") for scale in (1, 5))
    main.Mine = old  # type: ignore[attr-defined]
    run = {"rounds": 1, "epochs": 1, "runtime": "sequential", "folder": tmp_path / "run"}
    protofed.run(old(), vectors(), **run)
    main.Mine = new  # type: ignore[attr-defined]
    with pytest.raises(protofed.RunFailed, match="its configuration or data differ"):
        protofed.run(new(), vectors(), resume=True, **run)


def test_a_network_of_ones_own_is_named_in_an_experiment(tmp_path: Path) -> None:
    write_tables(tmp_path / "data")
    body = "def narrow(inputs, num_classes):\n    return mlp(inputs, num_classes, 5)\n"
    name = written(tmp_path, f"from protofed.tasks.models import mlp\n{body}")
    experiment = tmp_path / "experiment.toml"
    experiment.write_text(
        f'[task]\nname = "custom"\nkind = "tables"\nlabel = "outcome"\npath = "{tmp_path / "data"}"\n'
        f'model = "{name}:narrow"\n[method]\nname = "fedavg"\n[training]\nrounds = 1\nepochs = 1\n'
    )
    loaded = config.load(experiment)
    federation = loaded.experiment().federation
    assert federation.networks_of("north").shapes["classifier.weight"] == (2, 5)
    assert "+" in loaded.identity
    experiment.write_text(experiment.read_text().replace("narrow", "absent"))
    with pytest.raises(BadInput, match="has no function absent"):
        config.load(experiment)
    with pytest.raises(BadInput, match="only an experiment file may name"):
        config.parse({"task": {"name": "custom", "model": f"{name}:narrow"}, "method": {"name": "fedavg"}}, "a table")
