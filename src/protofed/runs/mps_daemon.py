"""Keeps NVIDIA's Multi-Process Service running for as long as the process that started this one lives.

It is run as a program, by mps.py, and needs nothing but Python's own library. It prints the folder of the daemon's
pipes, or why there is no daemon. When its input ends, because the parent closed it or died, the daemon is told to quit.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = "nvidia-cuda-mps-control"
LONGEST_FOLDER = 60
"""Letters. The names of Unix sockets have at most 107, and the daemon adds its own."""
START_SECONDS, QUIT_SECONDS = 20, 30
QUIT = b"quit -t 5\n"
"""Waits for processes that still use the service, for at most five seconds."""


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends below, in `finally`
    folder = Path(tempfile.mkdtemp(prefix="protofed-mps-", dir=_base()))
    environment = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    has_ended = True
    try:
        refusal = _started(folder, environment)
        print(refusal or f"ready {folder}", flush=True)
        if not refusal:
            has_ended = False
            sys.stdin.read()
    finally:
        if has_ended or _has_quit(environment):
            shutil.rmtree(folder, ignore_errors=True)
    return 0


def _base() -> str | None:
    return None if len(tempfile.gettempdir()) <= LONGEST_FOLDER else "/tmp"  # noqa: S108


def _started(folder: Path, environment: dict[str, str]) -> str:
    """Why the daemon did not start; nothing if it did. Its output goes to a file: it would keep a pipe open."""
    said = folder / "start.txt"
    try:
        with said.open("wb") as output:
            command = [PROGRAM, "-d"]
            subprocess.run(  # noqa: S603
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                check=True,
                timeout=START_SECONDS,
            )
    except (OSError, subprocess.SubprocessError) as error:
        words = said.read_text(errors="replace").split()
        return " ".join([f"{error}", *words])
    return ""


def _has_quit(environment: dict[str, str]) -> bool:
    try:
        subprocess.run(  # noqa: S603
            [PROGRAM], input=QUIT, stdout=subprocess.DEVNULL, env=environment, check=True, timeout=QUIT_SECONDS
        )
    except (OSError, subprocess.SubprocessError) as error:
        print(f"{PROGRAM} did not quit: {error}; its pipes are in {environment['CUDA_MPS_PIPE_DIRECTORY']}", flush=True)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
