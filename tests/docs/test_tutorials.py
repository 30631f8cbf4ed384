"""What the tutorials and how-tos say can be done as they say it: commands, files and Python."""

import io
import os
import re
import runpy
import shlex
import tomllib
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import protofed
from protofed.cli.app import app
from protofed.runs import compare
from protofed.runs.config import config

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
GUIDES = [*sorted((DOCS / "tutorials").glob("*.md")), *sorted((DOCS / "how-to").glob("*.md"))]
DOCUMENTS = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:\.venv/bin/)?protofed .*")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, *languages: str) -> list[str]:
    return [body for kind, body in FENCE.findall(path.read_text(encoding="utf-8")) if kind in languages]


def commands(path: Path) -> list[list[str]]:
    """The words of every `protofed` command in the shell blocks of a page, without comments and redirections."""
    lines = [line for block in blocks(path, "sh") for line in block.splitlines()]
    parts = [part.strip() for line in lines for part in line.split("&&")]
    words = [shlex.split(part, comments=True) for part in parts if COMMAND.fullmatch(part)]
    return [line[1 : line.index(">") if ">" in line else None] for line in words]


def parsed(words: list[str]) -> None:
    """Raises if these are not words that the command takes. Nothing is run."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"there is no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    if not hasattr(command, "commands"):
        command.make_context(command.name, words).close()
        return
    known = {option for one in command.params for option in one.opts}
    assert {*words} <= known, f"{words} are not options of protofed"


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if commands(path)], ids=name)
def test_commands_exist_with_their_options(path: Path) -> None:
    for words in commands(path):
        parsed(list(words))


@pytest.mark.parametrize("words", [["fly"], ["run", "a.toml", "--fast"], ["run"], ["data", "mend", "x"], ["--fast"]])
def test_a_command_that_does_not_exist_is_seen(words: list[str]) -> None:
    with pytest.raises(Exception, match=r"no command|No such option|Missing parameter|not options"):
        parsed(words)


@pytest.mark.parametrize("path", [path for path in GUIDES if blocks(path, "toml")], ids=name)
def test_files_of_guides_are_experiments_or_comparisons(path: Path) -> None:
    for block in blocks(path, "toml"):
        table = tomllib.loads(block)
        is_across = path.name.startswith("federation")
        if is_across and not table.keys() & {"task", "method", "training"}:
            continue  # of a site or a server; tests/federation/test_policy.py and test_kits.py read such files
        if "methods" in table:
            assert compare.parse(table, name(path)).configs
        else:
            table = {"task": {"name": "minidigits"}, "method": {"name": "fedavg"}, **table}
            config.parse(table, name(path), data_elsewhere=is_across)


@pytest.mark.parametrize("path", [path for path in GUIDES if blocks(path, "python")], ids=name)
def test_the_python_of_a_guide_runs(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = protofed.run
    monkeypatch.setattr(
        protofed, "run", lambda *args, **settings: whole(*args, **{**settings, "rounds": 1, "epochs": 1})
    )
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "guide.py"
    file.write_text("\n".join(blocks(path, "python")), encoding="utf-8")
    with redirect_stdout(io.StringIO()):
        assert runpy.run_path(str(file))["result"].is_complete


def test_the_first_run_can_be_followed_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file and every command of the page, in order, with one round of one epoch instead of ten of five."""
    page = DOCS / "tutorials" / "first-run.md"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # a process more takes longer to start than to do its runs
    files = re.findall(r"Save this as `([\w.]+)`", page.read_text(encoding="utf-8"))
    for file, text in zip(files, blocks(page, "toml"), strict=True):
        Path(file).write_text(text.replace("rounds = 10", "rounds = 1\nepochs = 1"), encoding="utf-8")
    done = []
    for words in commands(page):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, (words, result.output, result.exception)
        done.append(words[0])
    assert done == ["run", "run", "compare", "report", "export"]
    assert "<html" in Path("report.html").read_text(encoding="utf-8")
    assert Path("digits/weights.safetensors").exists()
    assert Path("digits/model_card.md").exists()
