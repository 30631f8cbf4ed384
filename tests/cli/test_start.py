"""The first moments of the command, and signals with limits that no clock can hold (R8)."""

import os
import signal
import subprocess
import sys
from math import inf, nan
from pathlib import Path

import pytest

from clocks import PATIENCE
from protofed.cli import start
from protofed.cli.signals import stop_on_signal

INTERRUPTED = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(10)\n"


@pytest.mark.parametrize("module", ["typer", "torch", "numpy"])
def test_ctrl_c_during_an_import_is_quiet(module: str, tmp_path: Path) -> None:
    """R8. The module is interrupted in the middle of its import."""
    (tmp_path / f"{module}.py").write_text(INTERRUPTED)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(start.__file__).parents[2]}"}
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); sys.argv[0] = 'protofed'; "
    code += "from protofed.cli.start import main; main()"
    words = [sys.executable, "-c", code, "run", "experiment.toml"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False, timeout=PATIENCE)
    assert done.returncode == 130, done.stderr
    assert done.stderr.strip() == ""


def test_ctrl_c_elsewhere_is_an_exception_as_ever() -> None:
    with pytest.raises(KeyboardInterrupt):
        start._interrupted(signal.SIGINT, sys._getframe())


@pytest.mark.parametrize("seconds", [inf, 1e300, 1e9, nan])
def test_a_grace_period_that_no_timer_can_hold_has_no_end(seconds: float) -> None:
    """R8."""
    with stop_on_signal("resume", seconds) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_made()
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
