"""What needs no extra works without any: the package as `pip install protofed` leaves it."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMMANDS = """
import sys
from pathlib import Path
from protofed.cli.start import main

for words in {commands!r}:
    sys.argv[1:] = [str(next(Path("runs").iterdir())) if word == "RUN" else word for word in words]
    try:
        main()
    except SystemExit as end:
        if end.code:
            sys.exit(end.code)
"""
NO_EXTRAS = """
import sys
from importlib.machinery import PathFinder

class WithoutExtras(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {names!r} else super().find_spec(name, path, target)

sys.meta_path[:] = [WithoutExtras if finder is PathFinder else finder for finder in sys.meta_path]
"""
"""A `sitecustomize`, which every Python imports when it starts."""
MODULE_OF = {"mlflow_skinny": "mlflow"}
SMALL = """
[task]
name = "minidigits"
[method]
name = "fpl"
[training]
rounds = 1
epochs = 1
"""

Typed = Callable[..., subprocess.CompletedProcess[str]]


def extras() -> set[str]:
    """The modules of the packages that extras bring and the package itself does not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    brought = [one for name, of in project["optional-dependencies"].items() if name != "predict" for one in of]
    own, more = (
        {re.split(r"[^\w-]", one)[0].replace("-", "_") for one in of} for of in (project["dependencies"], brought)
    )
    return {MODULE_OF.get(name, name) for name in more - own - {"protofed"}}


@pytest.fixture
def typed(tmp_path: Path) -> Typed:
    """Types commands, until one fails."""
    (tmp_path / "sitecustomize.py").write_text(NO_EXTRAS.format(names=extras()), encoding="utf-8")
    (tmp_path / "small.toml").write_text(SMALL, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'src'}"}

    def done(*commands: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", COMMANDS.format(commands=commands)]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    return done


def test_a_run_its_report_and_its_model_need_no_extra(typed: Typed) -> None:
    done = typed(
        ("run", "small.toml", "--out", "runs"),
        ("report", "RUN", "--html", "page.html"),
        ("audit", "RUN"),
        ("export", "RUN", "model"),
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_needs_an_extra_names_it(typed: Typed) -> None:
    done = typed(("run", "small.toml", "--set", "method.name=fedavg", "--set", "secure.sums=true"))
    assert done.returncode == 2
    assert "protofed[privacy]" in done.stdout + done.stderr
