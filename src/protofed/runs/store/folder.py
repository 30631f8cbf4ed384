"""A run's folder: configuration, rounds, checkpoints, and a lock.

config.toml         what was run, every default resolved
environment.json    versions, hardware and command
task.json           what is known of the task without its data
rounds.jsonl        one line per round
checkpoint/         the last two states
done                present when the run has ended well
lock                who works here

A folder may have been damaged, or come from somebody else: whatever is read is checked, and no link is followed.
"""

import functools
import hashlib
import json
import logging
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from protofed.errors import BadInput, RunFailed
from protofed.models import formats
from protofed.models.formats import Outline
from protofed.privacy.ledger import FOLDER
from protofed.runs.config import toml
from protofed.runs.store import disk, opening
from protofed.runs.store.checkpoint import rounds_digests, rounds_saved, write_atomically
from protofed.runs.store.lock import Lock, locked
from protofed.version import __version__

log = logging.getLogger(__name__)

MAX_BYTES = 1_000_000
"""Of config.toml and environment.json, which have some thousand."""
TASK = "task.json"
COPY = "put it back from a copy, or start the run afresh in another folder"


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoint"

    @property
    def privacy(self) -> Path:
        """Where a private run has its ledger and its outbox."""
        return self._part(FOLDER)

    @property
    def sums(self) -> Path:
        """Where a run with secure sums over sites has those that were unmasked."""
        return self._part("sums")

    def _part(self, name: str) -> Path:
        """A folder in this one. No link in it is followed, as nowhere in the folder."""
        try:
            opening.refuse_strange(self.path, name)
        except FileNotFoundError:
            pass  # the folder itself is not there yet
        except OSError as error:
            raise BadInput(f"{self.path / name}: {opening.reason(error)}; {COPY}") from error
        return self.path / name

    @property
    def is_done(self) -> bool:
        return self.has("done")

    @property
    def rounds_saved(self) -> int:
        return rounds_saved(self.checkpoints)

    def has(self, name: str) -> bool:
        """Whether the folder holds a file of this name, readable or not."""
        try:
            with opening.folder(self.path) as own:
                return opening.kind(own, name) is not None
        except OSError:
            return False

    def read_rounds(self) -> str:
        """The lines of rounds.jsonl, if they are those of a checkpoint. A save writes them after it."""
        advice = "it is written again from the checkpoint when the run is resumed"
        advice += f": remove {self.path / 'done'} first" if self.is_done else ""
        count = 1 if self.is_done else None
        before = rounds_digests(self.checkpoints)[:count]
        lines = self._text("rounds.jsonl", advice)
        saved = {*before, *rounds_digests(self.checkpoints)[:count]}  # a run may go on meanwhile
        is_expected = bool(saved) and (self.is_done or self.has("rounds.jsonl"))
        # guard: rounds-have-their-checksum
        if is_expected and hashlib.sha256(lines.encode()).hexdigest() not in saved:
            raise BadInput(f"{self.path / 'rounds.jsonl'} is damaged: it is not what was saved; {advice}")
        return lines

    def write_rounds(self, lines: str) -> None:
        write_atomically(self.path / "rounds.jsonl", lines.encode())

    def begin(self, config: str, runtime: Mapping[str, Any] = MappingProxyType({}), task: bytes = b"") -> None:
        """Writes down what is run, and where. `task` is the outline of its task."""
        if task:
            write_atomically(self.path / TASK, task)
        self.write_config(config)
        self.write_environment(runtime)

    def write_environment(self, runtime: Mapping[str, Any]) -> None:
        facts = {**environment(), "runtime": dict(runtime)}
        write_atomically(self.path / "environment.json", json.dumps(facts, indent=2).encode())

    def read_environment(self) -> dict[str, Any]:
        advice = "put it back from a copy, or remove it: then nothing is known of what the run began with"
        text = self._text("environment.json", advice, most=MAX_BYTES)
        try:
            facts = json.loads(text) if text or self.has("environment.json") else {}
        except (ValueError, RecursionError) as error:  # guard: environment-damaged
            raise BadInput(f"{self.path / 'environment.json'} is damaged: {error}; {advice}") from error
        if not isinstance(facts, dict) or not isinstance(facts.get("runtime", {}), dict):
            raise BadInput(f"{self.path / 'environment.json'} is damaged: it is not a table of facts; {advice}")
        return facts

    def read_task(self) -> Outline | None:
        """The outline of the task; None in a folder of a version that wrote none."""
        if not self.has(TASK):
            return None
        text = self._text(TASK, COPY, most=formats.MAX_BYTES)
        return formats.read(Outline, text.encode(), str(self.path / TASK))

    def read_classes(self) -> tuple[str, ...]:
        """The names of the classes; none in a folder of a version that wrote none."""
        outline = self.read_task()
        return outline.classes if outline else ()

    def read_config(self) -> str:
        """The configuration, which is valid TOML; nothing if there is none."""
        text = self._text("config.toml", COPY, most=MAX_BYTES)
        try:
            toml.loaded(text, "config.toml")
        except BadInput as error:  # guard: configuration-damaged
            raise BadInput(f"{self.path / 'config.toml'} is damaged: {error}; {COPY}") from error
        return text

    def _text(self, name: str, advice: str, most: int | None = None) -> str:
        """A file's text; nothing if it is not there."""
        try:
            return opening.read(self.path, name, most=most).decode("utf-8")
        except FileNotFoundError:
            return ""
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            raise BadInput(f"{self.path / name} cannot be read: {why}; {advice}") from error

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
            with opening.folder(self.path, self.checkpoints.name) as own:
                disk.sync(own)  # guard: done-only-when-last-state-durable
        except OSError as error:
            raise RunFailed(f"could not wait for {self.checkpoints}: {error.strerror or error}; resume") from error
        write_atomically(self.path / "done", b"")

    def reopen(self) -> None:
        """A run that goes on is not done any more."""
        try:
            with opening.folder(self.path) as own:
                disk.remove(own, "done")
        except OSError as error:
            raise RunFailed(f"could not remove {self.path / 'done'}: {opening.reason(error)}") from error

    def locked(self, steal: bool = False) -> AbstractContextManager[Lock]:
        """Holds the folder for this process; see `lock`."""
        commit()  # asks git, whose process must not be born with the lock: it would outlive a killed run for a moment
        return locked(self.path, steal)


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


NO_PROGRAMS = ("--no-optional-locks", "-c", "core.fsmonitor=", "-c", "core.hooksPath=/dev/null")
"""git asks no program that a repository's configuration names."""


def _git(folder: Path, *words: str) -> str:
    """What git says, nothing if it cannot."""
    command = ["git", *NO_PROGRAMS, "-C", str(folder), *words]  # guard: git-runs-no-program
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""


def processor() -> str:
    """The name of the processor, as the system gives it."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
