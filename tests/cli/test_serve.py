"""`protofed serve`, as far as it comes without a site."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

pytest.importorskip("cryptography", reason="a federation has keys, for which the extra flower brings cryptography")
pytest.importorskip("flwr", reason="needs Flower: pip install 'protofed[flower]'")

from federation.test_runs import digit_sites
from protofed.cli.app import app
from protofed.federation import keys, kits
from protofed.federation.in_process import InProcess
from protofed.federation.server import prepared
from protofed.runs.config import config as configuration
from protofed.runs.runner import execute
from protofed.runs.store.folder import RunFolder

EXPERIMENT = """
[task]
name = "minidigits"
[method]
name = "fedavg"
[training]
rounds = 1
epochs = 1
deadline = 60.0
on_divergence = "skip"
"""


@pytest.fixture
def federation(tmp_path: Path) -> Path:
    """One site, which is not there. Whatever is started would find its port taken by nobody, and wait."""
    kits.init(tmp_path / "fed", ["A"], "127.0.0.1:1")
    key = keys.new_private_key(tmp_path / "A.key")
    kits.enrol(tmp_path / "fed", "A", keys.public_text(key.public_key()))
    return tmp_path / "fed"


def served(federation: Path, text: str, *words: str) -> Result:
    path = federation.parent / "experiment.toml"
    path.write_text(text)
    options = ("--federation", federation, "--folder", federation.parent / "run", *words)
    return CliRunner().invoke(app, ["serve", str(path), *map(str, options)])


def test_a_run_that_has_ended_is_shown_again(federation: Path, tmp_path: Path) -> None:
    """As it is after a reboot of a server that runs as a service."""
    path = tmp_path / "experiment.toml"
    path.write_text(EXPERIMENT)
    config = configuration.load(path, [], data_elsewhere=True)
    execute(prepared(InProcess(digit_sites(tmp_path)), config, "r1"), RunFolder(tmp_path / "run"))
    for words in ((), ("--resume",)):
        again = served(federation, EXPERIMENT, *words)
        assert again.exit_code == 0, again.output
        assert "average" in again.output
    other = served(federation, EXPERIMENT.replace("rounds = 1", "rounds = 2"))
    assert other.exit_code == 1
    assert "training.rounds" in str(other.exception)
    assert not (federation / "server" / "superlink.log").exists()


def test_what_no_site_can_take_part_in_is_refused_before_anything_starts(federation: Path) -> None:
    refused = served(federation, EXPERIMENT.replace("deadline = 60.0", ""))
    assert refused.exit_code == 1
    assert "training.deadline" in str(refused.exception)
    assert not (federation / "server" / "superlink.log").exists()
