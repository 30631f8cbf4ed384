"""The name under which sites know a run."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from federation.grids import config_of
from protofed.cli.app import app
from protofed.errors import BadInput

pytest.importorskip("flwr", reason="needs Flower: pip install 'protofed[flower]'")

from protofed.federation import kits, serve
from protofed.federation.serve import run_name
from protofed.federation.site_store import RUN
from protofed.methods import METHODS
from protofed.runs.runner import execute
from protofed.runs.store.folder import RunFolder


def test_a_run_keeps_its_name_and_another_gets_its_own(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "results" / "0a1b+2c")
    first = run_name(folder, resume=False)
    assert RUN.fullmatch(first)
    assert run_name(folder, resume=False) != first  # nothing of it is there yet
    first = run_name(folder, resume=True)
    folder.path.mkdir()
    assert run_name(folder, resume=True) == first
    assert run_name(folder, resume=False) == first  # such a command is refused later, and must not change it


@pytest.mark.parametrize("text", ["", "../x", "a\nb", "ä"])
def test_a_run_without_its_name_is_not_resumed(tmp_path: Path, text: str) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    with pytest.raises(BadInput, match="cannot be read"):
        run_name(folder, resume=True)
    (tmp_path / "run.name").write_text(text)
    with pytest.raises(BadInput):
        run_name(folder, resume=True)


def test_the_status_counts_the_rounds_that_are_done(tmp_path: Path) -> None:
    kits.init(tmp_path / "fed", ["A"], "127.0.0.1:1")
    config, folder = config_of(METHODS["local"]()), RunFolder(tmp_path / "run")
    stop = iter([False, False, True, True])
    execute(config.experiment(), folder, should_stop=lambda: next(stop))
    serve.note(kits.read_server(tmp_path / "fed"), folder, 3)
    shown = CliRunner().invoke(app, ["federation", "status", str(tmp_path / "fed"), "--json"])
    assert shown.exit_code == 0, shown.output
    run = json.loads(shown.output)["run"]
    assert (run["done"], run["rounds"], run["is_done"]) == (2, 3, False)
