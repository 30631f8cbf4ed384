"""The examples run as they stand."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def lines_of_code(path: Path) -> int:
    return sum(1 for line in path.read_text().splitlines() if line.strip())


@pytest.mark.parametrize(
    ("name", "printed"), [("your_own_method.py", "average"), ("your_own_data.py", "a new patient in the south")]
)
def test_an_example_runs_and_prints(name: str, printed: str, tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ended.returncode == 0, ended.stderr
    assert printed in ended.stdout
    assert list(tmp_path.iterdir()) == [], "an example left something behind"


def test_a_method_of_ones_own_takes_under_forty_lines() -> None:
    assert lines_of_code(EXAMPLES / "your_own_method.py") < 40


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"your_own_method.py", "your_own_data.py"}
