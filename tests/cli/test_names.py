"""Names of sites, classes and files that are commands for a terminal, words of ours, or not UTF-8."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from cli.test_cli import protofed
from protofed.cli.console import SafeConsole
from protofed.printable import one_line, printable, printable_json

COMMANDS = "\x1b[31m", "\x9b2J", "\x1b]0;title\x07", "\u202e", "\x7f", "\n1. an error of ours"
SITES = [f"s{k}{command}" for k, command in enumerate(COMMANDS)]
METRICS = ["global", "up", "auc", "own", "average", "accuracy", "public", "personal", "round", "new", "all", "down"]


def tables(folder: Path, sites: list[str], classes: tuple[str, str] = ("ill", "well")) -> Path:
    folder.mkdir()
    numbers = np.random.default_rng(0)
    for site in sites:
        rows = [f"{numbers.normal():.3f},{numbers.normal():.3f},{classes[k % 2]}" for k in range(12)]
        (folder / f"{site}.csv").write_text("\n".join(["u,v\x1b[5m,y", *rows]) + "\n", encoding="utf-8")
    return folder


COMPARISON = """
title = "Names"
seeds = [0]
[common.training]
rounds = 1
epochs = 1
[tasks.own.task]
name = "custom"
path = "data"
kind = "tables"
label = "y"
[methods.FedAvg.method]
name = "fedavg"
[methods.Ditto.method]
name = "ditto"
"""


EXPERIMENT = """
[task]
name = "custom"
path = "data"
kind = "tables"
label = "y"
[method]
name = "fpl"
"""


def everything_said(folder: Path) -> list[str]:
    """What all commands print and write about the tables in `data`; they must succeed."""
    said = []

    def call(*words: object) -> str:
        found = protofed(*words, cwd=folder)
        assert found.returncode == 0, found.stdout + found.stderr
        said.extend([found.stdout, found.stderr])
        return found.stdout

    call("data", "inspect", "data", "--label", "y", "--write", "x.toml")
    short = ("--set", "training.rounds=1", "--set", "training.epochs=1")
    call("compare", "x.toml", *short, "--method", "local", "--method", "fpl", "--jobs", "1", "--report", "first")
    said.append((folder / "first/report.md").read_text(encoding="utf-8"))
    (folder / "one.toml").write_text(EXPERIMENT)
    call("run", "one.toml", *short, "--folder", "run")
    call("show", "run")
    assert json.loads(call("show", "run", "--json"))["done"] is True
    settings = [word for pair in ("path=data", "kind=tables", "label=y") for word in ("--set", pair)]
    call("tasks", "custom", *settings)
    json.loads(call("tasks", "custom", *settings, "--json"))
    call("tasks", "custom", *settings, "--plot")
    (folder / "c.toml").write_text(COMPARISON)
    call("compare", "c.toml", "--report", "report", "--jobs", "1")
    said += [path.read_text(encoding="utf-8") for path in (folder / "report").glob("*.[mj]*")]
    return said


def is_seen(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sites that are called like commands for a terminal, and others like metrics."""
    found = tmp_path_factory.mktemp("names")
    tables(found / "data", [*SITES, *METRICS], ("ill\x1b[1m", "well\x9b"))
    return found


@pytest.fixture(scope="module")
def said(folder: Path) -> list[str]:
    return everything_said(folder)


def test_commands_in_names_reach_no_terminal_and_no_report(said: list[str]) -> None:
    assert all(is_seen(text) for text in said)
    assert any("s0\\x1b[31m" in text for text in said)
    assert not any(line.strip().startswith("1. an error of ours") for text in said for line in text.split("\n"))


@pytest.mark.usefixtures("said")
def test_sites_may_be_called_like_metrics(folder: Path) -> None:
    rounds = json.loads(protofed("show", "run", "--json", cwd=folder).stdout)
    domains = rounds["last_five"]["domains"]
    assert sorted(domains) == sorted([*SITES, *METRICS])
    assert rounds["last_five"]["metrics"]["average"] == pytest.approx(
        np.mean([scores["accuracy"] for scores in domains.values()])
    )


def test_an_error_shows_commands_in_names_as_escapes(tmp_path: Path) -> None:
    (tmp_path / "data/north\x1b[2J/a").mkdir(parents=True)
    (tmp_path / "data/north\x1b[2J/a/x.png").write_bytes(b"")
    (tmp_path / "x.toml").write_text('[task]\nname = "custom"\npath = "data"\n[method]\nname = "fedavg"\n')
    found = protofed("run", "x.toml", cwd=tmp_path)
    assert found.returncode == 2
    assert is_seen(found.stderr)
    assert "north\\x1b[2J/a/x.png" in found.stderr


BROKEN = os.fsdecode(b"caf\xe9")
"""A name that is not UTF-8. Python keeps the byte as half a character, which cannot be encoded."""


def named(path: Path) -> Path:
    """The path. Skips the test where no file can be called like that."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        path.unlink()
    except OSError:
        pytest.skip("the file system accepts UTF-8 only")
    return path


@pytest.mark.parametrize("where", ["folder", "table", "site", "class", "image", "beside", "experiment", "out", "plot"])
def test_names_that_are_not_utf_8_end_in_no_traceback(tmp_path: Path, where: str) -> None:
    """Each command says what is wrong, or works; what it prints can be encoded."""
    data = named(tmp_path / BROKEN) if where == "folder" else tmp_path / "data"
    tables(data, ["north", BROKEN if where == "table" else "south"])
    if where in ("site", "class", "image", "beside"):
        words = [BROKEN if where == part else part for part in ("site", "class", "image")]
        (data / words[0] / words[1]).mkdir(parents=True)
        (data / words[0] / words[1] / f"{words[2]}.png").write_bytes(b"")
        (data / f"{BROKEN if where == 'beside' else 'notes'}.txt").touch()
    name, out, pictures = (BROKEN if where == part else "x" for part in ("experiment", "out", "plot"))
    settings = [word for pair in (f"path={data}", "kind=tables", "label=y") for word in ("--set", pair)]
    (tmp_path / f"{name}.toml").write_text(
        '[task]\nname = "custom"\n[method]\nname = "fedavg"\n[training]\nrounds = 1\n'
    )
    run = [word.replace("path=", "task.path=") for word in settings]
    run = [word.replace("kind=", "task.kind=").replace("label=", "task.label=") for word in run]
    for words in (
        ["data", "inspect", data, "--label", "y"],
        ["data", "inspect", data, "--label", "y", "--write", f"{name}-written.toml"],
        ["run", f"{name}.toml", *run, "--out", out],
        ["run", f"{name}.toml", *run, "--out", out, "--json"],
        ["tasks", "custom", *settings, "--json"],
        ["tasks", "custom", *settings, "--plot", "--out", pictures],
    ):
        found = protofed(*words, cwd=tmp_path)
        assert found.returncode in (0, 2), found.stderr
        (found.stdout + found.stderr).encode()
        assert is_seen(found.stdout + found.stderr)


def test_what_cannot_be_seen_is_escaped_and_the_rest_is_not() -> None:
    assert printable("Größe 中 a\nb") == "Größe 中 a\nb"
    assert printable("\x1b\x9b\u202e\udce9\t") == r"\x1b\x9b\u202e\udce9\t"
    assert one_line("a\nb\x1b") == r"a\nb\x1b"


def test_json_is_printable_and_its_values_are_the_same() -> None:
    value = {"é\x1b\x7f\x9b": ["\u202e\udce9\n", "\U000e0001"]}
    text = printable_json(value, indent=1)
    assert is_seen(text)
    assert "é" in text
    assert json.loads(text) == value


def test_a_console_prints_its_own_commands_and_no_others() -> None:
    console: Console = SafeConsole(force_terminal=True, color_system="standard", width=40)
    with console.capture() as captured:
        console.print("a\x1b[31mb", style="green", markup=False, highlight=False)
    assert captured.get() == "\x1b[32ma\\x1b[31mb\x1b[0m\n"
