"""Runs that were made before, read back from their folders: settings, rounds, and the states that are there."""

import tomllib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from protofed.api.method import Method
from protofed.api.task import Task
from protofed.engine.federation import Federation
from protofed.errors import BadInput
from protofed.methods import METHODS
from protofed.runs.config.config import Config, parse
from protofed.runs.config.recording import named_table, task_table
from protofed.runs.config.renames import refuse_run_of_old_version
from protofed.runs.results import Result, Round, parsed
from protofed.runs.runtime_choice import RuntimeSettings
from protofed.runs.store import checkpoint, verify
from protofed.runs.store.folder import COPY, RunFolder

AnyMethod = Method[Any, Any, Any, Any]


@dataclass(frozen=True)
class SavedRun:
    """A run in a folder. Its task is built when a state is first asked for."""

    folder: RunFolder
    config: Config
    rounds: tuple[Round, ...]
    has_own_objects: bool = False
    """Whether method or task were given as objects: then only their settings could be compared."""

    @property
    def rounds_there(self) -> list[int]:
        """The rounds whose states can be loaded: those that were kept, and the last."""
        return verify.rounds_there(self.folder.checkpoints)

    @cached_property
    def federation(self) -> Federation:
        """Works on the CPU, whatever the run worked on."""
        runtime = RuntimeSettings(name="sequential", device="cpu", threads=self.config.runtime.threads)
        return replace(self.config, runtime=runtime).experiment().federation

    def at(self, round: int | None = None) -> Result:
        """The run as it was after a round whose state is there; the last one by default."""
        there = self.rounds_there
        if not there:
            raise BadInput(f"{self.folder.path} has no state that is whole: let the run go on with --resume")
        number = there[-1] if round is None else round
        identity = None if self.has_own_objects else self.config.identity
        saved = checkpoint.load_round(self.folder.checkpoints, number, self.federation, identity)
        return Result(self.federation, saved.state, tuple(r for r in self.rounds if r.round <= number))


def open_run(path: Path, method: AnyMethod | None = None, task: Task | None = None) -> SavedRun:
    """The run in a folder. A method or task of the user's own is given as it was: a folder's word imports nothing."""
    folder = RunFolder(path.absolute())
    if not folder.has("config.toml"):
        raise BadInput(f"{path} is not a run folder: it has no config.toml")
    table = tomllib.loads(folder.read_config())
    if not table:
        raise BadInput(f"{path / 'config.toml'} is damaged: it is empty; {COPY}")
    refuse_run_of_old_version(table, folder.read_environment(), str(path))
    given = {**({} if method is None else {"method": method}), **({} if task is None else {"task": task})}
    if method is not None:
        _refuse_other("method", named_table(METHODS, method), table.get("method"), path)
        table["method"] = {"name": "fedavg"}
    if task is not None:
        _refuse_other("task", task_table(task), table.get("task"), path)
        table["task"] = {"name": "minidigits"}
    elif "fingerprint" in table.get("task", {}):
        raise BadInput(f"{path} was run on a Task that was made in Python: give it again, as load(..., task=...)")
    config = replace(parse(table, str(path / "config.toml")), **given)  # type: ignore[arg-type]
    rounds = parsed(folder.read_rounds(), str(path / "rounds.jsonl"))
    return SavedRun(folder, config, tuple(rounds), bool(given))


def load(
    folder: Path | str, round: int | None = None, method: AnyMethod | None = None, task: Task | None = None
) -> Result:
    """A run from its folder: as it was after `round`, if `keep` named that round, or as it is now.

    The task is built again from the run's configuration. A method or task that the run was given as an object of your
    own must be given again.
    """
    return open_run(Path(folder), method, task).at(round)


def _refuse_other(what: str, given: dict[str, Any], recorded: Any, path: Path) -> None:
    known = {key: value for key, value in given.items() if value is not None}
    if known != recorded:
        raise BadInput(f"{path} was run with another {what}: {recorded}, not {known}")
