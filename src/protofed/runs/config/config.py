"""Experiments as TOML: a file, overrides, every default resolved, and a hash that names the run.

[task]        name, and the task's own settings
[method]      name, and the method's hyper-parameters
[training]    rounds, epochs, batch_size, fraction, minimum_replies, seed, and [training.optimizer]
[runtime]     name, threads
[evaluation]  every, clients
[saving]      on_error
"""

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from math import isnan
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge

from protofed.api.method import Method
from protofed.api.task import Task
from protofed.engine.federation import Federation, Training
from protofed.errors import BadInput
from protofed.methods import METHODS, bases_of
from protofed.optim.optimizers import OPTIMIZERS
from protofed.runs.config.checks import absent_device, contradictions, unfit
from protofed.runs.config.config_diff import without_harmless
from protofed.runs.config.schema import (
    Problem,
    Problems,
    UnknownKey,
    field_names,
    filled,
    joined,
    named,
    nearest,
    shown,
    written,
)
from protofed.runs.config.toml import DEEPEST, Place, Table, document, overlap, overridden, section_text
from protofed.runs.config.toml_locations import Key
from protofed.runs.runner import Experiment
from protofed.runs.runtime_choice import RuntimeSettings
from protofed.runtimes.base import Runtime
from protofed.runtimes.sequential import Sequential
from protofed.tasks import TASKS, ReadsOwnFiles, TaskSettings

T = TypeVar("T")
MOST_PROBLEMS = 100
"""Named in one message."""


@dataclass(frozen=True)
class EvaluationSettings:
    every: Annotated[int, Ge(1)] = 1
    """Rounds between evaluations; the last round is always evaluated."""
    clients: Annotated[int, Ge(0)] = 0
    """Rounds between evaluations of every client's own model, right after it was trained (PM(V), PM(L), I_local, HM);
    the last round is then evaluated too. 0: never."""


@dataclass(frozen=True)
class SavingSettings:
    on_error: Literal["stop", "warn"] = "stop"
    """Whether a run whose state cannot be saved, as on a full disk, ends, or goes on with a warning and tries again
    after the next round."""


@dataclass(frozen=True)
class Config:
    task: TaskSettings | Task
    method: Method[Any, Any, Any, Any]
    training: Training
    runtime: RuntimeSettings
    evaluation: EvaluationSettings
    saving: SavingSettings = SavingSettings()

    def resolved(self) -> dict[str, Any]:
        """Every setting of the run."""
        return {
            "task": _task_table(self.task),
            "method": _table(METHODS, self.method),
            "training": {**settings(self.training), "optimizer": _table(OPTIMIZERS, self.training.optimizer)},
            "runtime": settings(self.runtime),
            "evaluation": settings(self.evaluation),
            "saving": settings(self.saving),
        }

    @property
    def identity(self) -> str:
        """The hash of all settings that decide a result; behind a plus that of the files that the task reads, if a user
        may change them."""
        text = json.dumps(without_harmless(self.resolved()), sort_keys=True, ensure_ascii=False)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        if not isinstance(self.task, ReadsOwnFiles):
            return digest
        return f"{digest}+{hashlib.sha256(self.task.stamp().encode()).hexdigest()[:12]}"

    def toml(self) -> str:
        return "\n".join(section_text(name, table) for name, table in self.resolved().items())

    def experiment(self, alone: bool = True) -> Experiment:
        """The run; `alone` if no other shares the cores."""
        _refuse([*contradictions(vars(self)), *absent_device(self.runtime)])
        task = self.task if isinstance(self.task, Task) else self.task.build()
        problems = [_plain(p) for p in unfit(self.evaluation, task)]
        runtime: Runtime = Sequential()
        with _noted(problems):
            runtime = self.runtime.build(task, self.training, alone)
        with _noted(problems):
            federation = Federation(self.method, task, self.training, runtime, name=self.identity)
        if problems:
            raise BadInput("\n".join(problems))
        return Experiment(
            federation,
            evaluate_every=self.evaluation.every,
            evaluate_clients_every=self.evaluation.clients,
            threads=self.runtime.threads,
            config=self.toml(),
            identity=self.identity,
            on_save_error=self.saving.on_error,
        )


def load(path: Path, overrides: Iterable[str] = ()) -> Config:
    """The configuration in a file, with overrides such as `method.temperature=0.05`."""
    table, place = document(path)
    return parse(table, place, overrides)


def parse(table: Table, source: str | Place, overrides: Iterable[str] = ()) -> Config:
    """The configuration in a table; all that is wrong with it is said at once."""
    tree = copy.deepcopy(dict(table))
    changed, problems = overridden(tree, overrides)
    problems += [UnknownKey((key,), "unknown section", known=(*SECTIONS,)) for key in tree if key not in SECTIONS]
    built: dict[str, Any] = {}
    for key, build in SECTIONS.items():
        try:
            built[key] = build(_section(tree, key))
        except Problems as found:
            problems += found.all
            built[key] = found.rest
    wrong = {p.key for p in problems}
    problems += [p for p in contradictions(built) if not any(overlap(k, w) for k in (p.key, *p.others) for w in wrong)]
    if problems:
        place = source if callable(source) else lambda key: source
        raise BadInput(_complaint(problems, tree, lambda key: "--set" if _is_set(key, table, changed) else place(key)))
    return Config(**built)


def task_settings(name: str, overrides: Iterable[str] = ()) -> TaskSettings:
    """A registered task's settings, with overrides such as `fraction=0.02`."""
    tree: dict[str, Any] = {"name": name}
    _, problems = overridden(tree, overrides)
    _refuse(problems)
    try:
        return named(TASKS, tree, "task")
    except Problems as found:
        raise BadInput("\n".join(_plain(p) for p in found.all)) from None


def settings(instance: Any) -> dict[str, Any]:
    """The fields of a dataclass that it is made with, by name."""
    return {f.name: getattr(instance, f.name) for f in fields(instance) if f.init}


def checked(instance: T) -> T:
    """The same settings, each of the type that its field says; refused if out of range or not a dataclass."""
    name = type(instance).__name__
    if isinstance(instance, type) or not is_dataclass(instance):
        raise BadInput(f"give an instance of a frozen dataclass, such as FPL(), not {instance!r}")
    values = {key: checked(v) if is_dataclass(v) and key != "task" else v for key, v in settings(instance).items()}
    try:
        return filled(type(instance), values, name)
    except Problems as found:
        raise BadInput("\n".join(_plain(p) for p in found.all)) from None


def _section(tree: Table, key: str) -> Table:
    section = tree.get(key, {})
    if not isinstance(section, dict):
        raise Problems([Problem((key,), f"must be a section, [{key}], not {shown(section)}")])
    return section


def _training(table: Table) -> Training:
    values = dict(table)
    problems: list[Problem] = []
    if "optimizer" in values:
        try:
            values["optimizer"] = _optimizer(values["optimizer"])
        except Problems as found:
            problems += found.all
            del values["optimizer"]
    return joined(problems, lambda: filled(Training, values, "training"))


def _optimizer(table: Any) -> Any:
    if isinstance(table, dict) and "name" not in table:
        # a change to the optimiser that there is, not a choice of another
        table = {**_table(OPTIMIZERS, Training().optimizer), **table}
    return _nested(OPTIMIZERS, table, "training.optimizer", lambda cls: ["sgd", "adam"])


def _nested(registry: Mapping[str, type[T]], table: Any, where: str, bases: Callable[[type[T]], list[str]]) -> T:
    """An instance of a registered class, which may hold another one as its `base`, one of `bases`."""
    key = tuple(where.split("."))
    if not isinstance(table, dict):
        raise Problems([Problem(key, f"must be a section, [{where}], not {shown(table)}")])
    values = dict(table)
    problems: list[Problem] = []
    if "base" in values and "base" in _keys(registry, values):
        base = values.pop("base")
        try:
            values["base"] = _nested(registry, base, f"{where}.base", bases)
            known = bases(registry[values["name"]])
            if base["name"] not in known:
                what = f"{values['name']} cannot go around {base['name']}: choose one of {', '.join(known)}"
                raise Problems([Problem((*key, "base", "name"), what)])
        except Problems as found:
            problems += found.all
            values.pop("base", None)
    return joined(problems, lambda: named(registry, values, where))


SECTIONS: dict[str, Callable[[Table], Any]] = {
    "task": lambda table: named(TASKS, table, "task"),
    "method": lambda table: _nested(METHODS, table, "method", bases_of),
    "training": _training,
    "runtime": lambda table: filled(RuntimeSettings, table, "runtime"),
    "evaluation": lambda table: filled(EvaluationSettings, table, "evaluation"),
    "saving": lambda table: filled(SavingSettings, table, "saving"),
}


# ---- what is said of mistakes


def _complaint(problems: list[Problem], tree: Table, place: Place) -> str:
    """One line for each problem; what a key could be is looked for only in those that are named."""
    keys = _keys_of_sections(tree)
    lines = [f"{place(p.key)}: {written(p.key)}: {_explained(p, keys)}" for p in problems[:MOST_PROBLEMS]]
    left = len(problems) - len(lines)
    return "\n".join([*lines, *([f"and {left} more"] if left else [])])


def _explained(problem: Problem, keys: Mapping[str, tuple[str, ...]]) -> str:
    if not isinstance(problem, UnknownKey):
        return problem.what
    word = problem.key[-1]
    homes = [f"[{section}]" for section, own in keys.items() if word in own]
    if homes:
        return f"{problem.what}; it is a key of {' and '.join(homes)}"
    return problem.what + nearest(word, problem.known)


def _plain(problem: Problem) -> str:
    """A problem that no file has."""
    return f"{written(problem.key)}: {_explained(problem, {})}"


def _refuse(problems: list[Problem]) -> None:
    if problems:
        raise BadInput("\n".join(map(_plain, problems)))


@contextmanager
def _noted(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except BadInput as error:
        problems.append(str(error))


def _keys_of_sections(tree: Table) -> dict[str, tuple[str, ...]]:
    """The keys that each section may have, with the task, method and optimiser that it names."""
    tables = {key: value if isinstance(value, Mapping) else {} for key, value in tree.items()}
    optimizer = tables.get("training", {}).get("optimizer", {})
    default = {"name": _name(OPTIMIZERS, Training().optimizer)}
    return {
        "task": _keys(TASKS, tables.get("task", {})),
        "method": _keys(METHODS, tables.get("method", {})),
        "training": field_names(Training),
        "training.optimizer": _keys(OPTIMIZERS, {**default, **(optimizer if isinstance(optimizer, Mapping) else {})}),
        "runtime": field_names(RuntimeSettings),
        "evaluation": field_names(EvaluationSettings),
        "saving": field_names(SavingSettings),
    }


def _keys(registry: Mapping[str, type], table: Table) -> tuple[str, ...]:
    """Those of a section that names a registered class."""
    name = table.get("name")
    cls = registry.get(name) if isinstance(name, str) else None
    return ("name", *(field_names(cls) if cls else ()))


def _is_set(key: Key, table: Table, changed: Iterable[Key]) -> bool:
    """Whether a key comes from an override, as does a table that the file does not have."""
    return any(overlap(key, own) and (len(own) <= len(key) or not _holds(table, key)) for own in changed)


def _holds(table: Any, key: Key) -> bool:
    return not key or (isinstance(table, Mapping) and key[0] in table and _holds(table[key[0]], key[1:]))


def _name(registry: Mapping[str, type], instance: object) -> str:
    """The registered name; for a class of the user's own, where it is defined."""
    own = f"{type(instance).__module__}.{type(instance).__qualname__}"
    return next((name for name, cls in registry.items() if cls is type(instance)), own)


def _task_table(task: TaskSettings | Task) -> dict[str, Any]:
    """Settings of a registered task; a digest of the data of one of the user's own."""
    if isinstance(task, Task):
        return {"name": task.name, "fingerprint": fingerprint(task)}
    return _table(TASKS, task)


def fingerprint(task: Task) -> str:
    """A digest of all that a task is but its networks, so that a run is not resumed on another one."""
    digest = hashlib.sha256(repr((task.num_classes, sorted(task.domain_of.items()), task.transform)).encode())
    public = [] if task.public is None else [("public", task.public)]
    sets = (task.clients, task.tests, task.local_tests)
    for name, data in (*(item for own in sets for item in sorted(own.items())), *public):
        for leaf in (data.x[data.index], data.labels):
            digest.update(repr((name, leaf.dtype, leaf.shape)).encode())
            digest.update(leaf.contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()[:12]


def _table(registry: Mapping[str, type], instance: Any) -> dict[str, Any]:
    """Name and settings, those of a `base` included."""
    values = settings(instance)
    if is_dataclass(values.get("base")):
        values["base"] = _table(registry, values["base"])
    for name, value in values.items():
        if not _can_be_recorded(value):
            raise BadInput(
                f"{type(instance).__name__}.{name} is {shown(value)}, which a run cannot record: settings are plain "
                "numbers, strings, booleans, lists or tuples of these, dicts from strings to these, or None"
            )
    return {"name": _name(registry, instance), **values}


def _can_be_recorded(value: Any, depth: int = 0) -> bool:
    """Whether it can be written as TOML and read again as the same; what only behaves like a number or a string, as
    numpy's do, cannot."""
    if type(value) in (list, tuple) and depth < DEEPEST // 2:
        return all(_can_be_recorded(item, depth + 1) and type(item) not in (dict, type(None)) for item in value)
    if type(value) is dict and depth < DEEPEST // 2:
        return all(_is_text(key) and _can_be_recorded(item, depth + 1) for key, item in value.items())
    is_small = type(value) is int and -(2**63) <= value < 2**63
    is_number = type(value) is float and not isnan(value)
    return value is None or type(value) is bool or is_small or is_number or _is_text(value)


def _is_text(value: Any) -> bool:
    return type(value) is str and not any("\ud800" <= letter <= "\udfff" for letter in value)
