"""A run's folder: configuration, rounds, checkpoints, and a lock that dies with its process.

config.toml         what was run, every default resolved
environment.json    versions, hardware and command
rounds.jsonl        one line per round
checkpoint/         the last two states
done                present when the run has ended well
"""

import contextlib
import fcntl
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from protofed.errors import BadInput
from protofed.experiments.checkpoint import rounds_saved, write_atomically
from protofed.version import __version__


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoint"

    @property
    def is_done(self) -> bool:
        return (self.path / "done").exists()

    @property
    def rounds_saved(self) -> int:
        return rounds_saved(self.checkpoints)

    def read_rounds(self) -> str:
        path = self.path / "rounds.jsonl"
        return path.read_text() if path.exists() else ""

    def write_rounds(self, lines: str) -> None:
        write_atomically(self.path / "rounds.jsonl", lines.encode())

    def begin(self, config: str) -> None:
        """Writes down what is run, and where."""
        write_atomically(self.path / "config.toml", config.encode())
        write_atomically(self.path / "environment.json", json.dumps(environment(), indent=2).encode())

    def end(self) -> None:
        write_atomically(self.path / "done", b"")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the folder for this process; refused if another one has it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise BadInput(
                f"cannot write to {self.path}: {error.strerror}; choose another folder with --out"
            ) from error
        try:
            self._take(handle)
            yield
        finally:
            os.close(handle)

    def _take(self, handle: int) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 200).decode(errors="replace").strip() or "unknown"
            raise BadInput(f"{self.path} is in use by another process ({holder}); wait for it or stop it") from None
        os.ftruncate(handle, 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        os.write(handle, f"pid {os.getpid()} on {socket.gethostname()} since {since}".encode())


def environment() -> dict[str, str | int]:
    """What a reader needs to judge a number: versions, hardware, command."""
    return {
        "protofed": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }
