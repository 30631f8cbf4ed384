"""`protofed audit`, as a user types it."""

import json
from pathlib import Path

import pytest

from cli.test_cli import protofed
from protofed import BadInput
from protofed.cli.app import BAD_INPUT
from protofed.cli.audit import audit

EXPERIMENT = """
[task]
name = "minidigits"

[method]
name = "fpl"

[training]
rounds = 1
epochs = 1
batch_size = 256
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audit")
    (folder / "first.toml").write_text(EXPERIMENT)
    ended = protofed("run", folder / "first.toml", "--folder", folder / "run")
    assert ended.returncode == 0, ended.stderr
    return folder / "run"


def test_the_report_is_printed_and_lies_in_the_run_s_folder(run: Path) -> None:
    ended = protofed("audit", run)
    assert ended.returncode == 0, ended.stderr
    assert "# Audit of fpl on minidigits" in ended.stdout
    names = ["membership.png", "prototypes.png", "report.md", "audit.json"]
    assert ended.stdout.split()[-4:] == [str(run / "audit" / name) for name in names]
    assert "replaying the last round" in ended.stderr, "long work says what it does"


def test_attacks_and_canaries_go_where_they_are_told(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    audit(run, tmp_path, poison=True, attack=["prototypes x 100"], rule=["gate"], attackers=[1], as_json=True)
    poisoned = json.loads(capsys.readouterr().out)
    assert [(one["attack"], one["rule"], one["attackers"]) for one in poisoned["found"]] == [
        ("prototypes x 100", "gate", 1),
    ]
    audit(run, tmp_path, canaries=48, as_json=True)
    assert json.loads(capsys.readouterr().out)["found"]["canaries"] == 48
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"poison_prototypes.png", "poison.md", "poison.json", "canaries.md", "canaries.json"}


def test_one_thing_at_a_time(run: Path) -> None:
    with pytest.raises(BadInput, match="--poison and --canaries exclude each other"):
        audit(run, poison=True, canaries=100)
    with pytest.raises(BadInput, match="are for --poison"):
        audit(run, attack=["ALIE"])
    with pytest.raises(BadInput, match="replays the run's last round"):
        audit(run, rounds=3)
    ended = protofed("audit", run.parent)
    assert ended.returncode == BAD_INPUT
    assert "is not a run folder" in ended.stderr
