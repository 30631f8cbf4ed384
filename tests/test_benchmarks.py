"""Benchmarks that no other test runs still run, on their smallest case."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_the_cost_of_a_secure_sum_is_measured() -> None:
    pytest.importorskip("cryptography", reason="secure sums need protofed[privacy]")
    command = [sys.executable, "benchmarks/secure_sums.py", "--clients", "5", "--numbers", "100"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("| 5 | 100 |")
