"""A model is exported, and predicts as in training: elsewhere, in a new process, without the data of the training."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import protofed
from models.handing import COLUMNS, IMAGES, TABLES, config_of, executed, run_of, vectors, write_images, write_tables
from protofed import BadInput, Result, RunFailed
from protofed.datasets.tabular import read_table
from protofed.models.evaluating import judged
from protofed.models.loading import LoadedModel, load_model
from protofed.models.predicting import predictions
from protofed.runs.config.config import parse
from protofed.runs.loading import open_run
from protofed.runs.store import disk

SOURCE = Path(__file__).parents[2] / "src"
UNNEEDED = ("sklearn", "scipy", "matplotlib", "pandas", "onnx", "onnxruntime", "datasets")


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on tables whose folder has been moved since, and its exported model."""
    home = tmp_path_factory.mktemp("tables")
    write_tables(home / "data")
    executed(config_of({"path": str(home / "data"), **TABLES}), home / "run")
    (home / "data").rename(home / "moved")
    protofed.export(open_run(home / "run").at(data=False), home / "model", onnx=False)
    return home


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("images")
    write_images(home / "data")
    executed(config_of({"path": str(home / "data"), **IMAGES}, "fedproto"), home / "run")
    protofed.export(open_run(home / "run").at(data=False), home / "model", "south", onnx=False)
    return home


def in_new_process(home: Path, *words: str) -> str:
    """What the command prints in a process that has none of the packages which only training needs."""
    block = f"import sys; sys.modules.update(dict.fromkeys({UNNEEDED!r})); "
    code = block + "from protofed.cli.start import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", code, *words]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=home, env=environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def trained(home: Path, data: Path, task: dict[str, Any], method: str) -> Result:
    """The run with its data, wherever they are now."""
    config = config_of({"path": str(data), **task}, method)
    federation = config.experiment().federation
    return Result(federation, open_run(home / "run").at(data=False).state, ())


def test_rows_are_predicted_in_a_new_process_as_in_training(tables: Path) -> None:
    found = json.loads(in_new_process(tables, "predict", "model", "moved/north.csv", "--json"))
    result = trained(tables, tables / "moved", TABLES, "fpl")
    rows = result.federation.task.preprocessing.encoded(read_table(tables / "moved/north.csv"))  # type: ignore
    scores = result.predict("north", rows).softmax(-1)
    assert len(found) == 40
    assert np.allclose([list(one["probabilities"].values()) for one in found], scores.numpy(), atol=1e-5)
    assert [one["label"] for one in found] == [("ill", "well")[k] for k in scores.argmax(-1)]
    first = found[0]
    assert first["source"] == "moved/north.csv, line 2"
    assert {moved["column"] for moved in first["explanation"]} == {"age", "ward", "score"}
    assert first["nearest"]["label"] in ("ill", "well")


def test_images_are_predicted_in_a_new_process_as_in_training(images: Path) -> None:
    found = json.loads(in_new_process(images, "predict", "model", "data/south", "--json"))
    result = trained(images, images / "data", IMAGES, "fedproto")
    paths = sorted((images / "data/south").rglob("*.png"))
    x = result.federation.task.preprocessing.read(paths)  # type: ignore
    assert [one["source"] for one in found] == [str(path.relative_to(images)) for path in paths]
    scores = result.predict("south", x).softmax(-1)
    assert np.allclose([list(one["probabilities"].values()) for one in found], scores.numpy(), atol=1e-5)


def test_a_run_is_loaded_where_its_data_are_not(tables: Path) -> None:
    result = protofed.load(tables / "run")
    assert isinstance(result, Result)
    x = torch.zeros(2, len(result.module().blank()[0]))
    assert result.predict("north", x).shape == (2, 2)
    for forbidden in (
        lambda: result.federation.advance(result.state),
        lambda: result.federation.evaluated(result.state),
    ):
        with pytest.raises(BadInput, match="loaded without its data"):
            forbidden()
    with pytest.raises(BadInput, match="is not a folder"):
        result.confusion()
    assert result.confusion("north").tolist() == result.rounds[-1].confusion["north"], "what the run has counted"


def test_the_card_says_what_is_known(tables: Path, images: Path) -> None:
    without, with_data = ((home / "model/model_card.md").read_text() for home in (tables, images))
    assert "The confusion matrix is not known" in without
    assert str(tables) not in without, "no path of the machine is handed over"
    confusion = protofed.load(images / "run").with_data().confusion("south")  # type: ignore
    assert confusion.sum() == 4
    assert f"| bright | {confusion[0, 0]} | {confusion[0, 1]} |" in with_data
    assert "fedproto" in with_data
    assert "site south" in with_data


def test_an_explanation_is_the_change_from_an_ordinary_value(tables: Path, tmp_path: Path) -> None:
    loaded = load_model(tables / "model")
    rows = [["50", "B", "1.5", ""], ["", "A", "-0.25", ""]]
    (tmp_path / "new.csv").write_text("\n".join(",".join(row) for row in (COLUMNS, *rows)) + "\n")
    for row, one in zip(rows, predictions(loaded, [tmp_path / "new.csv"]), strict=True):
        x = loaded.preprocessing.encoded(read_table(tmp_path / "new.csv"))[rows.index(row)]  # type: ignore
        # The features are age, age missing, then ward as A, B, C, other, missing, then score.
        label, found = ("ill", "well").index(one.label), {moved.column: moved.change for moved in one.explanation}
        p = one.probability

        def with_values(changes: dict[int, float], x: torch.Tensor = x, label: int = label) -> float:
            other = x.clone()
            for place, value in changes.items():
                other[place] = value
            return float(loaded.predict(other[None]).softmax(-1)[0, label])

        wards = [with_values({2: a, 3: b, 4: c}) for a, b, c in ((1, 0, 0), (0, 1, 0), (0, 0, 1))]
        assert found["age"] == pytest.approx(p - with_values({0: 0, 1: 0}), abs=1e-6)
        assert found["score"] == pytest.approx(p - with_values({7: 0}), abs=1e-6)
        assert found["ward"] == pytest.approx(p - sum(wards) / 3, abs=1e-6)
        assert [abs(moved.change) for moved in one.explanation] == sorted(map(abs, found.values()), reverse=True)


def test_the_nearest_prototype_is_the_nearest(images: Path) -> None:
    loaded = load_model(images / "model")
    path = images / "data/north/dark/0.png"
    [one] = predictions(loaded, [path])
    z = loaded.model.embed(loaded.model.transform(loaded.preprocessing.read([path])))[0]  # type: ignore
    points = loaded.model.prototypes["global prototypes"]
    distances = {
        int(label): (z - value).square().sum().sqrt().item()
        for value, label in zip(points.values, points.label, strict=True)
    }
    best = min(distances, key=lambda label: distances[label])
    assert one.nearest is not None
    assert one.nearest.label == loaded.classes[best]
    assert one.nearest.distance == pytest.approx(distances[best], rel=1e-5)


def test_evaluation_counts_what_was_predicted(tables: Path, tmp_path: Path) -> None:
    loaded = load_model(tables / "model")
    found = list(predictions(loaded, [tables / "moved/south.csv"]))
    labels = read_table(tables / "moved/south.csv").column("outcome")
    counts = [
        [sum(t == a and one.label == b for t, one in zip(labels, found, strict=True)) for b in ("ill", "well")]
        for a in ("ill", "well")
    ]
    one = judged(loaded, tables / "moved/south.csv")["south"]
    assert one.confusion.tolist() == counts
    (truth_ill, truth_well) = map(sum, counts)
    assert one.sensitivity == [counts[0][0] / truth_ill, counts[1][1] / truth_well]
    assert one.scores["accuracy"] == (counts[0][0] + counts[1][1]) / 40
    assert [*judged(loaded, tables / "moved")] == ["north", "south"]
    (tmp_path / "odd.csv").write_text("age,ward,score,outcome\n1,A,1,dead\n")
    with pytest.raises(BadInput, match="does not know the class 'dead'; it knows ill, well"):
        judged(loaded, tmp_path / "odd.csv")


def test_evaluation_reads_folders_of_one_and_of_many_sites(images: Path) -> None:
    loaded = load_model(images / "model")
    many = judged(loaded, images / "data")
    assert {site: int(one.confusion.sum()) for site, one in many.items()} == {"north": 16, "south": 16}
    assert judged(loaded, images / "data/north")["north"].confusion.tolist() == many["north"].confusion.tolist()


def test_nothing_is_overwritten(images: Path, tmp_path: Path) -> None:
    result = run_of("fedavg")
    protofed.export(result, tmp_path / "model", onnx=False)
    before = (tmp_path / "model/weights.safetensors").read_bytes()
    with pytest.raises(BadInput, match="is there already"):
        protofed.export(run_of("fpl"), tmp_path / "model", onnx=False)
    assert (tmp_path / "model/weights.safetensors").read_bytes() == before
    protofed.export(run_of("fpl"), tmp_path / "model", onnx=False, replace=True)
    assert load_model(tmp_path / "model").facts.method["name"] == "fpl"
    (tmp_path / "model/thesis.txt").write_text("mine")
    with pytest.raises(BadInput, match=r"more than a model, such as thesis\.txt"):
        protofed.export(result, tmp_path / "model", onnx=False, replace=True)


def test_a_full_disk_leaves_no_half_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = disk.write

    def full(folder: int, name: str, data: bytes) -> None:
        if name == "model.json":
            raise OSError(28, "No space left on device")
        whole(folder, name, data)

    monkeypatch.setattr(disk, "write", full)
    with pytest.raises(RunFailed, match="No space left"):
        protofed.export(run_of("fedavg"), tmp_path / "model", onnx=False)
    assert not list(tmp_path.iterdir())


KINDS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "public": ("fedavg", {}, None),
    "personal": ("ditto", {}, "c1"),
    "nearest prototype": ("fedproto", {"inference": "nearest_prototype"}, "c1"),
    "exemplars": ("pfedcspc", {}, None),
    "parts of the method": ("fedseproto", {}, None),
    "a wrapper": ("ccvr", {}, None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_is_read_back(kind: str, tmp_path: Path) -> None:
    name, settings, site = KINDS[kind]
    result = run_of(name, settings)
    protofed.export(result, tmp_path / "model", site, onnx=False)
    loaded, x = protofed.load(tmp_path / "model"), vectors().tests["low"].x
    assert isinstance(loaded, LoadedModel)
    with torch.no_grad():
        assert torch.allclose(loaded.predict(x), result.module(site)(x), atol=1e-6)
    assert loaded.classes == ("ann", "bob", "eve")
    program = torch.export.load(tmp_path / "model/model.pt2").module()
    assert torch.allclose(program(x)[0], loaded.predict(x), atol=1e-4)


def test_a_network_without_a_name_is_handed_over_as_a_graph(tmp_path: Path) -> None:
    task = protofed.Task(vectors().clients, {}, 3, lambda client: vectors().model(client))
    result = protofed.run("fedavg", task, rounds=1, epochs=1, runtime="sequential", folder=tmp_path / "run")
    written = protofed.export(result, tmp_path / "model", onnx=False)
    assert "has no name" in written.notes[0]
    with pytest.raises(BadInput, match="a network without a name, which was made in Python"):
        protofed.load(tmp_path / "model")
    with pytest.raises(BadInput, match=r"give it again, as load\(\.\.\., task=\.\.\.\)"):
        protofed.load(tmp_path / "run")


def test_a_run_made_in_python_is_loaded_with_networks_that_have_names(tmp_path: Path) -> None:
    result = run_of("fedproto", folder=tmp_path / "run")
    shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    again, x = protofed.load(tmp_path / "elsewhere"), vectors().tests["low"].x
    assert torch.equal(again.predict("c1", x), result.predict("c1", x))  # type: ignore


# ---- real data


needs_data = pytest.mark.skipif("PROTOFED_DATA" not in os.environ, reason="needs the published files: PROTOFED_DATA")


@needs_data
def test_patients_of_four_hospitals(tmp_path: Path) -> None:
    table = {"task": {"name": "heart_disease"}, "method": {"name": "fedproto"}, "training": {"rounds": 2, "epochs": 1}}
    config = parse({**table, "runtime": {"name": "sequential"}}, "a test")
    result = executed(config, tmp_path / "run")
    protofed.export(result, tmp_path / "model", "va", onnx=False)
    published = (Path(os.environ["PROTOFED_DATA"]) / "heart_disease/processed.va.data").read_text()
    names = "age,sex,cp,trestbps,chol,fbs,restecg,thalach,exang,oldpeak,slope,ca,thal,num"
    (tmp_path / "va.csv").write_text(f"{names}\n{published}")
    found = list(predictions(load_model(tmp_path / "model"), [tmp_path / "va.csv"], explain=False))
    assert len(found) == 200
    # Every patient of the site is in its training or its test set, so the predicted classes are the same.
    task = result.federation.task
    x = torch.cat([task.clients["va"].x[task.clients["va"].index], task.tests["va"].x[task.tests["va"].index]])
    expected = result.predict("va", x).argmax(-1).bincount(minlength=2).tolist()
    assert [sum(one.label == name for one in found) for name in ("healthy", "disease")] == expected


@needs_data
def test_lesions_of_two_sources(tmp_path: Path) -> None:
    source = Path(os.environ["PROTOFED_DATA"]) / "ham10000_lesions"
    if not source.is_dir():
        pytest.skip("ham10000_lesions is not there")
    sites = sorted(path for path in source.iterdir() if path.is_dir())[:2]
    for site in sites:
        for kind in sorted(path for path in site.iterdir() if path.is_dir())[:3]:
            (tmp_path / "data" / site.name / kind.name).mkdir(parents=True)
            for file in sorted(kind.iterdir())[:6]:
                shutil.copy(file, tmp_path / "data" / site.name / kind.name / file.name)
    result = executed(config_of({"path": str(tmp_path / "data"), **IMAGES}, "fpl"), tmp_path / "run")
    protofed.export(result, tmp_path / "model", onnx=False)
    paths = sorted((tmp_path / "data").rglob("*.jpg"))
    assert paths
    x = result.federation.task.preprocessing.read(paths)  # type: ignore
    scores = result.predict(sites[0].name, x).softmax(-1)
    shutil.rmtree(tmp_path / "run")
    found = list(predictions(load_model(tmp_path / "model"), [tmp_path / "data"]))
    assert np.allclose([list(one.probabilities.values()) for one in found], scores.numpy(), atol=1e-5)
