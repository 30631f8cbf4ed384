"""Run folders as they are: settings, rounds and whether someone works there. No task is built and no state is read."""

import os
import socket
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from protofed.errors import BadInput
from protofed.runs.config.config_diff import flat
from protofed.runs.config.renames import refuse_run_of_old_version
from protofed.runs.results import Round, parsed, summed
from protofed.runs.store import opening
from protofed.runs.store.folder import COPY, RunFolder
from protofed.runs.store.lock import LOCK

Progress = Literal["done", "running", "stopped", "elsewhere"]
"""`elsewhere`: a process on another machine took the folder and has not given it back."""


@dataclass(frozen=True)
class ListedRun:
    """What a run's folder says."""

    path: Path
    settings: Mapping[str, Any]
    """By their whole names, such as `training.optimizer.lr`."""
    environment: Mapping[str, Any]
    rounds: tuple[Round, ...]
    progress: Progress

    @property
    def method(self) -> str:
        return str(self.settings.get("method.name", "?"))

    @property
    def task(self) -> str:
        return str(self.settings.get("task.name", "?"))

    @property
    def seed(self) -> int:
        seed = self.settings.get("training.seed", 0)
        return seed if isinstance(seed, int) else 0

    @property
    def total(self) -> int:
        """The rounds that the run is to have."""
        total = self.settings.get("training.rounds", 0)
        return total if isinstance(total, int) else 0

    @property
    def done(self) -> int:
        return max((r.round for r in self.rounds), default=0)

    @property
    def evaluated(self) -> list[Round]:
        return [r for r in self.rounds if r.is_evaluated]

    @property
    def headline(self) -> tuple[str, float] | None:
        """The metric that the method is made for, and its mean over the last five evaluated rounds."""
        if not self.evaluated:
            return None
        last = self.evaluated[-1]
        name = "own" if last.judged == "own models" and "own" in last.summary else "average"
        return name, summed(self.rounds, "last_five").metrics[name]

    @property
    def uses_own_models(self) -> bool:
        return any(r.judged == "own models" for r in self.rounds)


@dataclass(frozen=True)
class Listing:
    runs: list[ListedRun]
    left_out: dict[Path, str] = field(default_factory=dict)
    """Folders that cannot be read, and why."""


def listing(paths: Sequence[Path]) -> Listing:
    """The runs in these folders: each is a run's, or holds such folders. One that is damaged costs its run alone."""
    runs, left_out = list[ListedRun](), dict[Path, str]()
    for path in run_folders(paths):
        try:
            runs.append(listed(path))
        except BadInput as error:
            left_out[path] = str(error)
    return Listing(runs, left_out)


def run_folders(paths: Sequence[Path]) -> list[Path]:
    """Every run's folder that is named or lies in a named folder, each once."""
    found: dict[Path, Path] = {}
    for path in paths:
        own = [path] if RunFolder(path).has("config.toml") else list(_inside(path))
        found |= {each.resolve(): each for each in own if each.resolve() not in found}
    return list(found.values())


def _inside(path: Path) -> Iterator[Path]:
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}; name run folders, or one that holds them") from None
    yield from (path / name for name in names if RunFolder(path / name).has("config.toml"))


def listed(path: Path) -> ListedRun:
    """A run's folder. Raises BadInput if it is none, is damaged, or was made by a version that cannot be read."""
    folder = RunFolder(path)
    if not folder.has("config.toml"):
        raise BadInput(f"{path} is not a run folder: it has no config.toml")
    table = tomllib.loads(folder.read_config())
    if not table:
        raise BadInput(f"{path / 'config.toml'} is damaged: it is empty; {COPY}")
    environment = folder.read_environment()
    refuse_run_of_old_version(table, environment, str(path))
    rounds = parsed(folder.read_rounds(), str(path / "rounds.jsonl"))
    return ListedRun(path, dict(flat(table)), environment, tuple(rounds), progress_of(folder))


def progress_of(folder: RunFolder) -> Progress:
    """From the note in its lock. The lock itself is not touched: a run that begins just now would be refused it."""
    if folder.is_done:
        return "done"
    try:
        note = opening.read(folder.path, LOCK, most=1000).decode(errors="replace")
    except OSError:
        return "stopped"
    words = note.split()  # pid NUMBER on HOST since …
    if len(words) < 4 or words[0] != "pid" or not words[1].isdecimal():
        return "stopped"
    if words[3] != socket.gethostname():
        return "elsewhere"
    return "running" if _is_alive(int(words[1])) else "stopped"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True
