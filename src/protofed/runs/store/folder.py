"""A run's folder: configuration, rounds, checkpoints, and a lock that dies with its process.

config.toml         what was run, every default resolved
environment.json    versions, hardware and command
rounds.jsonl        one line per round
checkpoint/         the last two states
done                present when the run has ended well
"""

import contextlib
import fcntl
import functools
import json
import logging
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from protofed.errors import BadInput, RunFailed
from protofed.runs.store import disk
from protofed.runs.store.checkpoint import rounds_saved, write_atomically
from protofed.version import __version__

log = logging.getLogger(__name__)


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
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def write_rounds(self, lines: str) -> None:
        write_atomically(self.path / "rounds.jsonl", lines.encode())

    def begin(self, config: str, runtime: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Writes down what is run, and where."""
        self.write_config(config)
        self.write_environment(runtime)

    def write_environment(self, runtime: Mapping[str, Any]) -> None:
        facts = {**environment(), "runtime": dict(runtime)}
        write_atomically(self.path / "environment.json", json.dumps(facts, indent=2).encode())

    def read_environment(self) -> dict[str, Any]:
        path = self.path / "environment.json"
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return facts

    def read_config(self) -> str:
        path = self.path / "config.toml"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def write_config(self, config: str) -> None:
        write_atomically(self.path / "config.toml", config.encode())

    def change_config(self, config: str) -> None:
        """The configuration from here on; the one so far stays beside it, named by the rounds that it was for."""
        # guard: old-configuration-stays
        write_atomically(self.path / f"config-until-{self.rounds_saved}.toml", self.read_config().encode())
        self.write_config(config)

    def warn_of_other_versions(self) -> None:
        """Says so if the run began with other software, which may change its last bits or more."""
        before, now = self.read_environment(), environment()
        changed = [f"{key} {before.get(key)} then, {now[key]} now" for key in VERSIONS if before.get(key) != now[key]]
        if changed:
            log.warning("%s was begun with other software: %s", self.path, "; ".join(changed))

    def end(self) -> None:
        """Marks a run that has ended well. Its last state may have been written by a process that was killed before it
        could wait for the disk."""
        try:
            disk.sync(self.checkpoints)  # guard: done-only-when-last-state-durable
        except OSError as error:
            raise RunFailed(f"could not wait for {self.checkpoints}: {error.strerror or error}; resume") from error
        write_atomically(self.path / "done", b"")

    def reopen(self) -> None:
        """A run that goes on is not done any more."""
        (self.path / "done").unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self, steal: bool = False) -> Iterator[None]:
        """Holds the folder for this process; refused if another one has it. A lock that a process on another machine
        has left behind is taken only with `steal`: whether that process lives cannot be known here."""
        commit()  # asks git, whose process must not be born with the lock: it would outlive a killed run for a moment
        try:
            disk.make(self.path)
            handle = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise BadInput(
                f"cannot write to {self.path}: {error.strerror}; choose another folder with --out"
            ) from error
        try:
            self._take(handle, steal)
            try:  # guard: failed-run-gives-folder-back
                yield  # guard: failed-run-gives-folder-back
            finally:  # guard: failed-run-gives-folder-back
                with contextlib.suppress(OSError):  # guard: failed-run-gives-folder-back
                    # guard: failed-run-gives-folder-back
                    os.ftruncate(handle, 0)  # nothing works here any more: nobody need wonder
        finally:
            os.close(handle)

    def _take(self, handle: int, steal: bool) -> None:
        holder = os.read(handle, 200).decode(errors="replace").strip()
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # guard: lock
        except BlockingIOError:
            raise BadInput(
                f"{self.path} is in use by another process ({holder or 'unknown'}); wait for it or stop it"
            ) from None
        # guard: note-another-machine, steal-lock
        if holder and f" on {socket.gethostname()} since " not in holder and not steal:
            raise BadInput(
                f"{self.path} was in use on another machine ({holder}) and was not given back; "
                "if nothing runs there any more, take it with --steal-lock"
            )
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        with contextlib.suppress(OSError):  # the lock holds without the note on a full disk
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"pid {os.getpid()} on {socket.gethostname()} since {since}".encode(), 0)


VERSIONS = ("protofed", "python", "torch", "numpy", "scipy", "scikit-learn", "pillow", "matplotlib")
"""What a result may depend on; the last ones draw the images of minidigits."""


def environment() -> dict[str, str | int]:
    """What a reader needs to judge a number: versions, hardware, command."""
    own = {"protofed": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    return {
        **{name: own.get(name) or metadata.version(name) for name in VERSIONS},
        "commit": commit(),
        "system": platform.platform(),
        "processor": processor(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),  # guard: no-environment-variable-written
    }


@functools.cache
def commit() -> str:
    """The commit of the source tree that runs, marked if files differ from it; unknown outside of a checkout."""
    own = Path(__file__)
    is_tracked = _git(own.parent, "ls-files", "--error-unmatch", own.name)  # installed ones lie in others' checkouts
    return (
        is_tracked and _git(own.parent, "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12")
    ) or "unknown"


def _git(folder: Path, *words: str) -> str:
    """What git says, nothing if it cannot."""
    try:
        found = subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, timeout=10)  # noqa: S603, S607
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""


def processor() -> str:
    """The name of the processor, as the system gives it."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
