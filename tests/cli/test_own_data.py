"""Own data from the command: what each site gets comes first, whatever its models do elsewhere."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from cli.test_cli import protofed

EXPERIMENT = """
[task]
name = "custom"
path = "sites"
kind = "tables"
label = "y"

[method]
name = "local"

[training]
rounds = 3
epochs = 5
batch_size = 8
optimizer = { name = "sgd", lr = 0.1, momentum = 0.9 }
"""
COMPARISON = """
seeds = [0]
summary = "last"
[common.training]
rounds = 2
epochs = 5
batch_size = 8
optimizer = { name = "sgd", lr = 0.1, momentum = 0.9 }
[tasks.ours.task]
name = "custom"
path = "sites"
kind = "tables"
label = "y"
[methods.local.method]
name = "local"
[methods.fedavg.method]
name = "fedavg"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two sites whose labels mean the opposite of each other: a model of one is right at home and wrong elsewhere."""
    (tmp_path / "sites").mkdir()
    draw = np.random.default_rng(0)
    for k, site in enumerate(("leeds", "oslo")):
        x = draw.uniform(0.3, 1, size=40) * np.tile([-1, 1], 20)
        lines = [f"{value:.3f},{'ill' if (value > 0) == (k == 0) else 'well'}" for value in x]
        (tmp_path / f"sites/{site}.csv").write_text("\n".join(["x,y", *lines]) + "\n", encoding="utf-8")
    (tmp_path / "own.toml").write_text(EXPERIMENT)
    (tmp_path / "compared.toml").write_text(COMPARISON)
    return tmp_path


def cells(text: str, first: str) -> list[str]:
    """What stands in the line that begins with this word."""
    (line,) = [line for line in text.splitlines() if re.match(rf"\W*{first}\b", line)][:1]
    return re.split(r"\s{2,}", line.strip(" │┃"))


def test_the_headline_is_what_each_site_gets_at_home(folder: Path) -> None:
    shown = protofed("run", "own.toml", cwd=folder)
    assert shown.returncode == 0, shown.stderr
    results = shown.stdout[shown.stdout.index("What each site gets") :]
    # Every site is right in all of its 10 test examples; on foreign ones the models are always wrong, so that their
    # mean over both sites is 50.
    assert cells(results, "leeds") == ["leeds", "10", "100.0", "100.0", "100.0", "100.0", "50.0"]
    assert cells(results, "oslo")[:4] == ["oslo", "10", "100.0", "100.0"]
    assert cells(results, "mean")[:3] == ["mean", "100.0", "100.0"]
    assert "average" not in shown.stdout
    facts = json.loads(protofed("show", *(folder / "results").iterdir(), "--json").stdout)
    assert facts["last_five"]["metrics"]["average"] == 0.5
    assert facts["sites"]["of"]["oslo"]["confusion"] == [[5, 0], [0, 5]]
    assert facts["sites"]["of"]["oslo"]["accuracy"] == {"value": 1.0, "interval": None}
    assert facts["sites"]["classes"] == ["ill", "well"]
    assert facts["remarks"] == []


def test_a_site_that_is_held_out_is_tested_and_counts_in_no_mean(folder: Path) -> None:
    words = ("--set", "method.name=fedavg", "--set", "training.rounds=1")
    shown = protofed("run", "own.toml", "--hold-out", "oslo", *words, cwd=folder)
    results = shown.stdout[shown.stdout.index("What each site gets") :]
    assert cells(results, "oslo")[:3] == ["oslo (held out)", "10", "0.0"]  # the others have learnt the opposite
    assert cells(results, "leeds")[:3] == ["leeds", "10", "100.0"]
    assert 'name = "local"' in results  # how to compare with local training alone
    facts = json.loads(protofed("show", *(folder / "results").iterdir(), "--json").stdout)
    assert [r["participants"] for r in facts["rounds"]] == [1]
    refused = protofed("run", "own.toml", "--hold-out", "bergen", cwd=folder)
    assert (refused.returncode, "hold_out names 'bergen'; the sites are leeds, oslo" in refused.stderr) == (2, True)


def test_a_comparison_says_where_a_method_is_worse_than_local_training(folder: Path) -> None:
    shown = protofed("compare", "compared.toml", "--jobs", 1, cwd=folder)
    assert shown.returncode == 0, shown.stderr
    table = shown.stdout[shown.stdout.index("What each site gets, accuracy") :]
    assert cells(table, "local")[1:4] == ["100.0", "100.0", "100.0"]
    assert cells(table, "majority")[1:] == ["50.0", "50.0"]
    assert cells(table, "test examples")[1:] == ["10", "10"]
    gain = float(cells(table, "fedavg")[-1])
    assert gain == pytest.approx(float(cells(table, "fedavg")[-2]) - 100)
    said = " ".join(shown.stdout.split())
    assert "fedavg is worse than local training alone at" in said
    report = (folder / "results/reports/compared/report.md").read_text(encoding="utf-8")
    assert report.index("What each site gets, accuracy") < report.index("foreign ones too")
    held_out = protofed("compare", "compared.toml", "--jobs", 1, "--hold-out", "oslo", "--method", "fedavg", cwd=folder)
    assert "oslo (held out)" in held_out.stdout
    assert "Local training alone is not among the methods" in " ".join(held_out.stdout.split())
