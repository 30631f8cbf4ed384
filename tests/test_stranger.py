"""From a folder of sites to a prediction elsewhere, by commands alone: what a stranger types, in under ten commands.

The model is used in a new environment that has only `protofed[predict]`, so the test installs one with pip."""

import csv
import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import protofed
from models.handing import write_images
from protofed import Result

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
DATA = os.environ.get("PROTOFED_DATA", "")
IMAGES_OF_A_CLASS = 12
COLUMNS = [
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg"),
    *("thalach", "exang", "oldpeak", "slope", "ca", "thal", "num"),
]
COMMAND = "from protofed.cli.start import main; main()"


def typed(python: Path | str, *words: object, cwd: Path) -> str:
    environment = {
        **os.environ,
        "PROTOFED_DATA": "",
        "PYTHONPATH": str(ROOT / "src") if python == sys.executable else "",
    }
    done = subprocess.run(
        [str(python), "-c", COMMAND, *map(str, words)], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python in an environment that has what `protofed predict` needs and nothing else."""
    home = tmp_path_factory.mktemp("elsewhere")
    venv.create(home, with_pip=True)
    pip = [
        str(home / "bin/pip"),
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "-c",
        str(ROOT / "constraints.txt"),
    ]
    with (ROOT / "pyproject.toml").open("rb") as file:
        needed = tomllib.load(file)["project"]["optional-dependencies"]["predict"]
    try:
        for what in (["torch"], [one for one in needed if not one.startswith("torch")], ["--no-deps", str(ROOT)]):
            subprocess.run([*pip, *what], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"pip cannot install here: {error.stderr[-300:]}")
    return home / "bin/python"


def handed_over(home: Path, inspected: list[str], site: str, new: list[str], elsewhere: Path) -> tuple[Result, Any]:
    """The run whose model was handed over, and what it predicts elsewhere. The data are not there any more."""
    typed(sys.executable, "data", "inspect", *inspected, "--write", "sites.toml", cwd=home)
    short = ("--set", "training.rounds=2", "--method", "fedavg", "--method", "fedproto", "--method", "local")
    typed(sys.executable, "compare", "sites.toml", *short, cwd=home)
    typed(sys.executable, "report", "results", "--html", "report.html", cwd=home)
    listed = json.loads(typed(sys.executable, "list", "--json", cwd=home))
    run = home / next(one["folder"] for one in listed if one["method"] == "fedproto" and one["seed"] == 0)
    typed(sys.executable, "export", run, "model", "--site", site, cwd=home)
    assert "<html" in (home / "report.html").read_text(encoding="utf-8")
    abroad = home / "abroad"
    abroad.mkdir()
    for name in ("model", *new):
        shutil.move(home / name, abroad / name)
    found = json.loads(typed(elsewhere, "predict", "model", *new, "--json", cwd=abroad))
    result = protofed.load(run)
    assert isinstance(result, Result)
    return result, found


def test_images_of_four_sites_become_predictions_elsewhere(tmp_path: Path, elsewhere: Path) -> None:
    source = Path(DATA) / "ham10000_lesions"
    if DATA and source.is_dir():
        for folder in sorted(source.glob("*/*")):
            for image in sorted(folder.iterdir())[:IMAGES_OF_A_CLASS]:
                target = tmp_path / "scans" / folder.parent.name / folder.name / image.name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(image, target)
        site, new = "rosendahl", sorted((source / "rosendahl/mel").iterdir())[IMAGES_OF_A_CLASS : IMAGES_OF_A_CLASS + 3]
    else:
        write_images(tmp_path / "scans", ("east", "north", "south", "west"), count=12)
        site, new = "east", sorted((tmp_path / "scans/west/dark").iterdir())[:3]
    (tmp_path / "new").mkdir()
    for image in new:
        shutil.copy(image, tmp_path / "new" / image.name)
    result, found = handed_over(tmp_path, ["scans"], site, ["new"], elsewhere)
    x = result.federation.task.preprocessing.read(sorted((tmp_path / "abroad/new").iterdir()))  # type: ignore[union-attr]
    expected = result.predict(site, x).softmax(-1).numpy()
    assert len(found) == 3
    assert np.allclose([list(one["probabilities"].values()) for one in found], expected, atol=1e-5)
    assert all(one["nearest"]["distance"] >= 0 for one in found)


def test_a_row_of_a_hospital_becomes_a_probability_and_its_explanation(tmp_path: Path, elsewhere: Path) -> None:
    sites = tmp_path / "hospitals"
    sites.mkdir()
    source = Path(DATA) / "heart_disease"
    if not (DATA and source.is_dir()):
        pytest.skip("needs the files of heart_disease below $PROTOFED_DATA")
    rows = {}
    for file in sorted(source.glob("processed.*.data")):
        site = file.name.split(".")[1]
        with file.open(newline="") as lines:
            rows[site] = [[*row[:-1], "ill" if float(row[-1]) else "well"] for row in csv.reader(lines) if row]
        with (sites / f"{site}.csv").open("w", newline="") as written:
            csv.writer(written).writerows([COLUMNS, *rows[site]])
    with (tmp_path / "patient.csv").open("w", newline="") as written:
        csv.writer(written).writerows([COLUMNS[:-1], rows["cleveland"][0][:-1]])
    inspected = ["hospitals", "--label", "num"]
    _, (found,) = handed_over(tmp_path, inspected, "cleveland", ["patient.csv"], elsewhere)
    assert found["label"] in ("ill", "well")
    assert 0.5 <= found["probability"] <= 1
    assert {one["column"] for one in found["explanation"]} <= {*COLUMNS}
    assert any(one["change"] for one in found["explanation"])
