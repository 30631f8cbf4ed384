"""`protofed analyse`, as a user types it."""

import json
from pathlib import Path

import pytest

from cli.test_cli import protofed
from protofed.cli.app import BAD_INPUT
from protofed.reports.analysis.gallery import FIGURES

EXPERIMENT = """
[task]
name = "minidigits"

[method]
name = "fpl"

[training]
rounds = 2
epochs = 1
batch_size = 256

[saving]
keep = [1]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("analyse")
    (folder / "first.toml").write_text(EXPERIMENT)
    ended = protofed("run", folder / "first.toml", "--folder", folder / "run")
    assert ended.returncode == 0, ended.stderr
    assert "training loss" in ended.stdout
    return folder / "run"


def test_figures_and_numbers_are_written_and_named(run: Path, tmp_path: Path) -> None:
    drawn = protofed("analyse", run, "--out", tmp_path, "--figure", "tsne", "--figure", "curves", "--examples", 80)
    assert drawn.returncode == 0, drawn.stderr
    assert drawn.stdout.split() == [str(tmp_path / name) for name in NAMES]
    assert all((tmp_path / name).stat().st_size > 100 for name in NAMES)
    assert "t-SNE of" in drawn.stderr, "long work says what it does"


NAMES = ("tsne_by_class.png", "tsne_by_domain.png", "tsne.csv", "tsne_separation.csv", "curves.png", "curves.csv")


def test_what_the_runs_do_not_allow_is_said_and_the_rest_drawn(run: Path, tmp_path: Path) -> None:
    drawn = protofed("analyse", run, "--out", tmp_path, "--examples", 40, "--json")
    facts = json.loads(drawn.stdout)
    assert drawn.returncode == 0, drawn.stderr
    assert facts["skipped"].keys() == {"sensitivity", "ablation", "calibration", "relations"}
    assert all(Path(name).exists() for name in facts["files"])


def test_the_list_of_figures() -> None:
    listed = protofed("analyse", "--list")
    assert [line.split()[0] for line in listed.stdout.splitlines()] == list(FIGURES)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--figure", "tsne", "--rounds", "1,5"), "no state of round 5, but those of 1, 2"),
        (("--rounds", "first"), "'first' is not the number of a round"),
        (("--figure", "calibration"), "calibration: the server calibrates nothing in fpl"),
        (("--figure", "picture"), "'picture' is unknown"),
    ],
)
def test_what_cannot_be_is_said(run: Path, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    failed = protofed("analyse", run, "--out", tmp_path / "out", *words)
    assert failed.returncode == BAD_INPUT
    assert said in failed.stderr
    assert not (tmp_path / "out").exists()


def test_without_runs_and_with_what_is_no_run(tmp_path: Path) -> None:
    assert "name one or more run folders" in protofed("analyse").stderr
    assert "is not a run folder" in protofed("analyse", tmp_path).stderr


def test_a_run_folder_imports_nothing(run: Path, tmp_path: Path) -> None:
    """A configuration in a run folder that names a class is refused, and its module is not imported."""
    (tmp_path / "run").mkdir()
    config = (run / "config.toml").read_text().replace('name = "fpl"', 'name = "canary:Method"')
    (tmp_path / "run" / "config.toml").write_text(config)
    (tmp_path / "run" / "canary.py").write_text("raise SystemExit('the canary was imported')")
    refused = protofed("analyse", tmp_path / "run", cwd=tmp_path / "run")
    assert refused.returncode == BAD_INPUT
    assert "'canary:Method' is not imported" in refused.stderr
