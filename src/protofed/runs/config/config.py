"""Experiments: a TOML file with overrides becomes a Config, with every default filled in and a hash that names the run.

sections.py says which sections there are.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from protofed.api.method import Method
from protofed.api.task import Task
from protofed.engine.federation import Federation
from protofed.engine.private import Private
from protofed.engine.secure_settings import SecureSettings
from protofed.engine.training import Training
from protofed.errors import BadInput
from protofed.nn.networks import Parts
from protofed.privacy.settings import PrivacySettings
from protofed.runs.config.checks import check_device, check_sections, check_task
from protofed.runs.config.messages import collected, listed, refuse, without_place
from protofed.runs.config.recording import digest_of, settings, text_digest
from protofed.runs.config.renames import renamed
from protofed.runs.config.schema import Problems, UnknownKey, chosen, filled, named
from protofed.runs.config.sections import (
    REGISTRIES,
    SECTIONS,
    EvaluationSettings,
    SavingSettings,
    built,
    keys_of_sections,
)
from protofed.runs.config.toml import Place, Table, document, overlap, overridden, section_text
from protofed.runs.config.toml_locations import Key
from protofed.runs.config.user_classes import Importer, importer_for, user_classes, user_networks
from protofed.runs.config.user_code import code_digest
from protofed.runs.observers import LoggingSettings
from protofed.runs.runner import Experiment
from protofed.runs.runtime_choice import RuntimeSettings
from protofed.runtimes.jobs import Runtime
from protofed.runtimes.sequential import Sequential
from protofed.tasks import TASKS, ReadsOwnFiles, TaskSettings
from protofed.tasks.models import known_networks
from protofed.transforms.chain import UploadPipeline, UploadSettings
from protofed.transforms.robust_stage import RobustSettings

T = TypeVar("T")

NO_IMPORTS = Importer()

HASHED = ("task", "method", "training", "uploads", "robust")
"""Sections that change what is trained."""


@dataclass(frozen=True)
class Config:
    task: TaskSettings | Task
    method: Method[Any, Any, Any, Any]
    training: Training
    runtime: RuntimeSettings
    evaluation: EvaluationSettings
    saving: SavingSettings = field(default_factory=SavingSettings)
    uploads: UploadSettings = field(default_factory=UploadSettings)
    secure: SecureSettings = field(default_factory=SecureSettings)
    privacy: PrivacySettings = field(default_factory=PrivacySettings)
    robust: RobustSettings = field(default_factory=RobustSettings)
    logging: LoggingSettings = field(default_factory=LoggingSettings)
    user_code: str = ""
    """A digest of the code of a method, task or network of the user's own."""
    networks: Mapping[str, Callable[..., Parts]] = field(default_factory=dict)
    """Networks of the user's own that the task names."""

    @property
    def pipeline(self) -> UploadPipeline:
        """What happens to uploads on their way to the method."""
        return self.uploads.pipeline(self.robust, is_own_data=isinstance(self.task, ReadsOwnFiles))

    @property
    def own_parts(self) -> list[Any]:
        """What may be the user's own code."""
        return [self.method, self.task, *self.networks.values()]

    def resolved(self) -> dict[str, dict[str, Any]]:
        """Every setting of the run, by section."""
        return {key: section.recorded(getattr(self, key)) for key, section in SECTIONS.items()}

    @property
    def identity(self) -> str:
        """The hash of what changes numbers: task, method, training and the numerics of the runtime. If the user's
        own files decide too, data or code: `+` and their hash."""
        table = self.resolved()
        hashed: dict[str, Any] = {**{key: table[key] for key in HASHED}, "numerics": self.runtime.numerics()}
        if self.evaluation.fine_tune:  # of what is tested, not of how often
            hashed["fine_tune"] = self.evaluation.fine_tune
        if self.secure.sums:  # masks change no number
            hashed["secure_sums"] = True
        if self.privacy.is_on:
            hashed["privacy"] = table["privacy"]
        if self.privacy.is_on and self.secure.sums:
            hashed["noise_shares"] = [self.secure.threshold, self.secure.colluders]
        if self.evaluation.patience:
            hashed["patience"] = [self.evaluation.patience, self.evaluation.every, self.evaluation.clients]
        digest = digest_of(hashed)
        files = self.user_code + (self.task.stamp() if isinstance(self.task, ReadsOwnFiles) else "")
        return f"{digest}+{text_digest(files)}" if files else digest

    def toml(self) -> str:
        return "\n".join(section_text(name, table) for name, table in self.resolved().items())

    def experiment(self, alone: bool = True) -> Experiment:
        """The run, with its task built. `alone`: no other run shares the cores."""
        refuse([*check_sections(vars(self)), *check_device(self.runtime)])
        with known_networks(self.networks):
            task = self.task if isinstance(self.task, Task) else self.task.build()
        messages = [without_place(p) for p in check_task(self.evaluation, task)]
        runtime: Runtime = Sequential()
        with collected(messages):
            runtime = self.runtime.build(task, self.training, alone)
        with collected(messages):
            federation = Federation(
                self.method,
                task,
                self.training,
                runtime,
                uploads=self.pipeline,
                secure=self.secure.made(),
                private=Private(self.privacy) if self.privacy.is_on else None,
                fine_tune=self.evaluation.fine_tune,
                name=self.identity,
            )
        if messages:
            raise BadInput("\n".join(messages))
        return Experiment(
            federation,
            evaluate_every=self.evaluation.every,
            evaluate_clients_every=self.evaluation.clients,
            global_models=self.evaluation.global_models,
            patience=self.evaluation.patience,
            threads=self.runtime.threads,
            config=self.toml(),
            identity=self.identity,
            runtime={"name": type(runtime).__name__.lower(), **self.runtime.numerics()},
            on_save_error=self.saving.on_error,
            keep=tuple(self.saving.keep),
            logging=self.logging,
        )


def load(path: Path, overrides: Iterable[str] = (), data_elsewhere: bool = False) -> Config:
    """The configuration in a file, with overrides such as `method.temperature=0.05`. `data_elsewhere`: own files may be
    at sites, and so without a path."""
    table, place = document(path)
    if not table.keys() & {"task", "method"} and table.keys() & {"tasks", "methods"}:
        raise BadInput(f"{path} is a comparison of several runs, not one experiment: protofed compare {path}")
    return parse(table, place, overrides, importer_for(path), data_elsewhere)


def parse(
    table: Table,
    source: str | Place,
    overrides: Iterable[str] = (),
    importer: Importer = NO_IMPORTS,
    data_elsewhere: bool = False,
) -> Config:
    """The configuration in a table. Raises one BadInput that lists all problems. Without an importer, the table can
    only name registered methods and tasks."""
    tree = copy.deepcopy(dict(table))
    overridden_keys, problems = overridden(tree, overrides)
    problems += [UnknownKey((key,), "unknown section", known=(*SECTIONS,)) for key in tree if key not in SECTIONS]
    methods, tasks, not_imported = user_classes(tree, importer)
    networks, not_found = user_networks(tree, importer)
    not_imported += not_found
    registries = REGISTRIES.extended(methods, tasks)
    values: dict[str, Any] = {}
    for key in SECTIONS:
        try:
            values[key] = built(tree, key, registries)
        except Problems as error:
            problems += error.all
            values[key] = error.rest
    first = [*renamed(tree), *not_imported]  # these say more of a key than that its value is unknown
    problems = [*first, *(p for p in problems if p.key not in {f.key for f in first})]
    wrong = {p.key for p in problems}
    found = check_sections(values, data_elsewhere)
    problems += [p for p in found if not any(overlap(k, w) for k in (p.key, *p.others) for w in wrong)]
    if problems:
        in_file = source if callable(source) else lambda key: source

        def place(key: Key) -> str:
            return "--set" if _is_overridden(key, table, overridden_keys) else in_file(key)

        raise BadInput(listed(problems, keys_of_sections(tree, registries), place))
    own = [*methods.values(), *tasks.values(), *networks.values()]
    return Config(**values, user_code=code_digest(own), networks=networks)


def task_settings(name: str, overrides: Iterable[str] = ()) -> TaskSettings:
    """The settings of a registered task, with overrides such as `fraction=0.02`."""
    tree: dict[str, Any] = {"name": name}
    refuse([*renamed({"task": tree})])
    chosen(TASKS, name, "task")
    _, problems = overridden(tree, overrides)
    refuse(problems)
    try:
        return named(TASKS, tree, "task")
    except Problems as error:
        raise BadInput("\n".join(map(without_place, error.all))) from None


def checked(instance: T) -> T:
    """The same settings, each with the type of its field. Raises BadInput if one is out of range."""
    name = type(instance).__name__
    if isinstance(instance, type) or not is_dataclass(instance):
        raise BadInput(f"give an instance of a frozen dataclass, such as FPL(), not {instance!r}")
    values = {key: checked(v) if is_dataclass(v) and key != "task" else v for key, v in settings(instance).items()}
    try:
        return filled(type(instance), values, name)
    except Problems as error:
        raise BadInput("\n".join(map(without_place, error.all))) from None


def _is_overridden(key: Key, table: Table, overridden_keys: Iterable[Key]) -> bool:
    """Whether a key comes from --set. A table that the file lacks does, if --set gave one of its keys."""
    return any(overlap(key, one) and (len(one) <= len(key) or not _holds(table, key)) for one in overridden_keys)


def _holds(table: Any, key: Key) -> bool:
    return not key or (isinstance(table, Mapping) and key[0] in table and _holds(table[key[0]], key[1:]))
