"""Models that come from somebody else: whatever is wrong with one is said, and nothing of it is run."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

import protofed
from models.handing import run_of
from protofed import BadInput
from protofed.models.loading import load_model

Facts = dict[str, Any]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "model"
    protofed.export(run_of("fedproto", {"inference": "nearest_prototype"}), folder, "c1", onnx=False)
    return folder


@pytest.fixture
def model(good: Path, tmp_path: Path) -> Path:
    shutil.copytree(good, tmp_path / "model")
    return tmp_path / "model"


def changed(model: Path, change: Callable[[Facts], None]) -> None:
    """Changes model.json."""
    facts = json.loads((model / "model.json").read_text())
    change(facts)
    (model / "model.json").write_text(json.dumps(facts))


def resealed(model: Path, name: str, data: bytes) -> None:
    """Replaces a file, with a checksum that is right."""
    (model / name).write_bytes(data)
    changed(model, lambda facts: facts["files"].update({name: hashlib.sha256(data).hexdigest()}))


@pytest.mark.parametrize("name", ["weights.safetensors", "prototypes.safetensors", "preprocessing.json"])
def test_a_changed_file_is_noticed(model: Path, name: str) -> None:
    data = bytearray((model / name).read_bytes())
    data[-2] ^= 1
    (model / name).write_bytes(data)
    with pytest.raises(BadInput, match="does not have its checksum"):
        load_model(model)


CHANGES: dict[str, tuple[Callable[[Facts], None], str]] = {
    "an unknown key": (lambda facts: facts.update(hook="x"), "hook"),
    "another format": (lambda facts: facts.update(format=2), "format"),
    "no number": (lambda facts: facts.update(round="many"), "round"),
    "a huge network": (lambda facts: facts["network"]["settings"].update(width=10**12), "its network has"),
    "a setting of the network that it does not have": (lambda facts: facts["network"]["settings"].update(x=1), "x"),
    "another network": (lambda facts: facts["network"].update(name="cnn2"), "cannot be built"),
    "an unknown network": (lambda facts: facts["network"].update(name="eval"), "eval"),
    "other classes": (lambda facts: facts.update(classes=["a", "b"]), "are not the model's"),
    "an unknown method": (lambda facts: facts.update(method={"name": "os.system"}), "is unknown"),
    "a setting out of range": (lambda facts: facts["method"].update(pull_weight=-1), "greater than or equal to 0"),
    "a method of its own": (lambda facts: facts["method"].update(name="evil:Method"), "not imported: give the folder"),
    "a network of its own": (lambda facts: facts["network"].update(name="evil:build"), "not imported: give the folder"),
    "knowledge that is not there": (lambda facts: facts.update(known=["message/mean", "x", "y"]), "known_2 is missing"),
    "more prototypes": (lambda facts: facts["prototypes"][0].update(count=7), "are not prototypes"),
    "other features": (lambda facts: facts.update(features=3), "are not the model's"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_is_wrong_is_said(model: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, said = CHANGES[what]
    changed(model, change)
    (model.parent / "evil.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(model.parent)
    with pytest.raises(BadInput, match=said):
        load_model(model)


def test_weights_of_another_shape_are_refused(model: Path) -> None:
    weights = load((model / "weights.safetensors").read_bytes())
    resealed(model, "weights.safetensors", save({**weights, "features.1.bias": torch.zeros(4)}))
    with pytest.raises(BadInput, match=r"features\.1\.bias is \(4,\)"):
        load_model(model)
    resealed(model, "weights.safetensors", save({n: w for n, w in weights.items() if n != "features.1.bias"}))
    with pytest.raises(BadInput, match=r"features\.1\.bias is missing"):
        load_model(model)
    resealed(model, "weights.safetensors", save({**weights, "spy.weight": torch.zeros(4)}))
    with pytest.raises(BadInput, match="no part 'spy'"):
        load_model(model)


def test_a_pickle_is_not_opened(model: Path, tmp_path: Path) -> None:
    torch.save({"x": 1}, tmp_path / "pickle")
    resealed(model, "weights.safetensors", (tmp_path / "pickle").read_bytes())
    with pytest.raises(BadInput, match=r"weights\.safetensors is damaged: not a safetensors file"):
        load_model(model)


def test_inputs_that_do_not_fit_are_refused(model: Path) -> None:
    inputs = json.loads((model / "preprocessing.json").read_text())
    for change in ({"shape": [10**5, 10**5]}, {"shape": [-1]}, {"mean": [1.0]}, {"std": [0.0]}, {"dtype": "object"}):
        resealed(model, "preprocessing.json", json.dumps({**inputs, **change}).encode())
        with pytest.raises(BadInput, match=r"preprocessing\.json is damaged"):
            load_model(model)


def test_links_and_pipes_are_not_followed(model: Path, tmp_path: Path) -> None:
    (model / "weights.safetensors").rename(tmp_path / "elsewhere")
    (model / "weights.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadInput, match="it is a link"):
        load_model(model)
    (model / "weights.safetensors").unlink()
    os.mkfifo(model / "weights.safetensors")
    with pytest.raises(BadInput, match="it is not a file"):
        load_model(model)


def test_what_is_no_model_is_said(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(BadInput, match=r"is not a model: it has no model\.json"):
            load_model(path)


def test_code_of_ones_own_is_imported_from_the_folder_that_is_given(tmp_path: Path) -> None:
    body = "def mine(inputs, num_classes):\n    return mlp(inputs, num_classes, 8)\n"
    (tmp_path / "handed_nets.py").write_text(f"from protofed.tasks.models import mlp\n{body}")
    protofed.export(run_of("fedavg"), tmp_path / "model", onnx=False)
    own = {"name": "handed_nets:mine", "settings": {"inputs": 6, "num_classes": 3}}
    changed(tmp_path / "model", lambda facts: facts.update(network=own))
    with pytest.raises(BadInput, match="not imported: give the folder of its module with --code"):
        load_model(tmp_path / "model")
    assert load_model(tmp_path / "model", code=tmp_path).predict(torch.zeros(2, 6)).shape == (2, 3)
