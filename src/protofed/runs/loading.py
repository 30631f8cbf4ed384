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
from protofed.models.loading import LoadedModel, is_model, load_model
from protofed.models.outline import task_without_data
from protofed.runs.config.config import NO_IMPORTS, Config, parse
from protofed.runs.config.recording import named_table, task_table
from protofed.runs.config.renames import refuse_run_of_old_version
from protofed.runs.config.user_classes import Importer
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
    importer: Importer = NO_IMPORTS
    """For networks of the user's own."""

    @property
    def rounds_there(self) -> list[int]:
        """The rounds whose states can be loaded: those that were kept, and the last."""
        return verify.rounds_there(self.folder.checkpoints)

    @cached_property
    def federation(self) -> Federation:
        """Works on the CPU, whatever the run worked on."""
        runtime = RuntimeSettings(name="sequential", device="cpu", threads=self.config.runtime.threads)
        return replace(self.config, runtime=runtime).experiment().federation

    @cached_property
    def without_data(self) -> Federation:
        """The same, where the data need not be: it can predict, and nothing else."""
        outline = self.folder.read_task()
        if outline is None or self.has_own_task:
            return self.federation
        task = task_without_data(outline, self.importer.network, self.folder.path)
        uploads, fine_tune = self.config.pipeline, self.config.evaluation.fine_tune
        return Federation(self.config.method, task, self.config.training, uploads=uploads, fine_tune=fine_tune)

    @property
    def has_own_task(self) -> bool:
        return isinstance(self.config.task, Task) and self.config.task.has_data

    def at(self, round: int | None = None, data: bool = True) -> Result:
        """The run as it was after a round whose state is there; the last one by default. Without `data`, the task is
        not built, and the result can only predict."""
        there = self.rounds_there
        if not there:
            raise BadInput(f"{self.folder.path} has no state that is whole: let the run go on with --resume")
        number = there[-1] if round is None else round
        federation = self.federation if data else self.without_data
        identity = self.config.identity if federation.task.has_data and not self.has_own_objects else None
        saved = checkpoint.load_round(self.folder.checkpoints, number, federation, identity)
        rounds = tuple(r for r in self.rounds if r.round <= number)
        if federation.private is not None:
            federation.private.show(self.folder.privacy)
        return Result(federation, saved.state, rounds, self.config, self.folder.path)


def open_run(
    path: Path, method: AnyMethod | None = None, task: Task | None = None, code: Path | None = None
) -> SavedRun:
    """The run in a folder. A method or task of the user's own is given as it was, or `code` is the folder of its
    modules: a run folder's word alone imports nothing."""
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
    importer = NO_IMPORTS if code is None else Importer(code, refusal="")
    if task is None and "fingerprint" in table.get("task", {}):
        given["task"] = _outlined(folder, importer)
        table["task"] = {"name": "minidigits"}
    found = parse(table, str(path / "config.toml"), importer=importer, data_elsewhere=True)
    config = replace(found, **given)  # type: ignore[arg-type]
    rounds = parsed(folder.read_rounds(), str(path / "rounds.jsonl"))
    return SavedRun(folder, config, tuple(rounds), bool(given), importer)


def _outlined(folder: RunFolder, importer: Importer) -> Task:
    """The outline of a task that was made in Python: its data are nowhere but there."""
    outline = folder.read_task()
    if outline is None:
        raise BadInput(
            f"{folder.path} was run on a Task that was made in Python: give it again, as load(..., task=...)"
        )
    return task_without_data(outline, importer.network, folder.path)


def load(
    folder: Path | str,
    round: int | None = None,
    method: AnyMethod | None = None,
    task: Task | None = None,
    *,
    data: bool = False,
    code: Path | str | None = None,
) -> Result | LoadedModel:
    """A run from its folder, as it was after `round`, if `keep` named that round, or as it is now; or a model that
    `protofed export` has written.

    Neither needs the data of the training. With `data`, the run's task is built again, so that it can be evaluated and
    go on. A method that the run was given as an object of your own must be given again; so must a task, if its networks
    have no name. `code` is the folder of modules of your own that the run or the model names: they are imported.
    """
    path = Path(folder)
    if is_model(path):
        return load_model(path, method, None if code is None else Path(code))
    return open_run(path, method, task, None if code is None else Path(code)).at(round, data)


def _refuse_other(what: str, given: dict[str, Any], recorded: Any, path: Path) -> None:
    known = {key: value for key, value in given.items() if value is not None}
    if known != recorded:
        raise BadInput(f"{path} was run with another {what}: {recorded}, not {known}")
