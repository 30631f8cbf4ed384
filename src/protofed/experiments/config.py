"""Experiments as TOML: a file, overrides, every default resolved, and a hash that names the run.

[task]        name, and the task's own settings
[method]      name, and the method's hyper-parameters
[training]    rounds, epochs, batch_size, fraction, minimum_replies, seed, and [training.optimizer]
[runtime]     name, threads
[evaluation]  every, clients
"""

import copy
import hashlib
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from annotated_types import Ge

from protofed.errors import BadInput
from protofed.experiments.run import Experiment
from protofed.experiments.sections import Problem, Problems, filled, named, nearest
from protofed.method import Method, Task
from protofed.methods import METHODS
from protofed.optim import OPTIMIZERS
from protofed.runtimes.federation import Federation, Training
from protofed.runtimes.settings import RuntimeSettings
from protofed.tasks import TASKS, ReadsOwnFiles, TaskSettings

T = TypeVar("T")
Table = Mapping[str, Any]


@dataclass(frozen=True)
class EvaluationSettings:
    every: Annotated[int, Ge(1)] = 1
    """Rounds between evaluations; the last round is always evaluated."""
    clients: Annotated[int, Ge(0)] = 0
    """Rounds between evaluations of every client's own model, right after it was trained (PM(V), PM(L), I_local, HM);
    the last round is then evaluated too. 0: never."""


@dataclass(frozen=True)
class Config:
    task: TaskSettings | Task
    method: Method[Any, Any, Any, Any]
    training: Training
    runtime: RuntimeSettings
    evaluation: EvaluationSettings

    def resolved(self) -> dict[str, Any]:
        """Every setting of the run."""
        return {
            "task": _task_table(self.task),
            "method": _table(METHODS, self.method),
            "training": {**settings(self.training), "optimizer": _table(OPTIMIZERS, self.training.optimizer)},
            "runtime": settings(self.runtime),
            "evaluation": settings(self.evaluation),
        }

    @property
    def identity(self) -> str:
        """The hash of the resolved configuration, and of the files that the task reads if a user may change them."""
        text = json.dumps(self.resolved(), sort_keys=True, ensure_ascii=False)
        stamp = self.task.stamp() if isinstance(self.task, ReadsOwnFiles) else ""
        return hashlib.sha256((text + stamp).encode()).hexdigest()[:12]

    def toml(self) -> str:
        return "\n".join(_toml_table(name, table) for name, table in self.resolved().items())

    def experiment(self, alone: bool = True) -> Experiment:
        """The run; `alone` if no other shares the cores."""
        task = self.task if isinstance(self.task, Task) else self.task.build()
        runtime = self.runtime.build(task, self.training, alone)
        federation = Federation(self.method, task, self.training, runtime)
        return Experiment(
            federation,
            evaluate_every=self.evaluation.every,
            judge_clients_every=self.evaluation.clients,
            threads=self.runtime.threads,
            config=self.toml(),
            identity=self.identity,
        )


def load(path: Path, overrides: Iterable[str] = ()) -> Config:
    """The configuration in a file, with overrides such as `method.temperature=0.05`."""
    return parse(read(path), str(path), overrides)


def read(path: Path) -> dict[str, Any]:
    """The table in a TOML file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BadInput(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{path}: not valid TOML: {error}") from error
    except RecursionError:
        raise BadInput(f"{path}: nested too deeply") from None


def parse(table: Table, source: str, overrides: Iterable[str] = ()) -> Config:
    """The configuration in a table; all that is wrong with it is said at once."""
    tree = copy.deepcopy(dict(table))
    overridden = {_override(tree, text) for text in overrides}
    problems = [Problem(key, f"unknown section{nearest(key, SECTIONS)}") for key in tree if key not in SECTIONS]
    built: dict[str, Any] = {}
    for key, build in SECTIONS.items():
        section = tree.get(key, {})
        try:
            if not isinstance(section, dict):
                raise Problems([Problem(key, f"must be a section, [{key}]")])
            built[key] = build(section)
        except Problems as found:
            problems += found.all
    if problems:
        raise BadInput("\n".join(f"{'--set' if p.key in overridden else source}: {p.key}: {p.what}" for p in problems))
    return Config(**built)


def task_settings(name: str, overrides: Iterable[str] = ()) -> TaskSettings:
    """A registered task's settings, with overrides such as `fraction=0.02`."""
    tree: dict[str, Any] = {"name": name}
    for text in overrides:
        _override(tree, text)
    try:
        return named(TASKS, tree, "task")
    except Problems as found:
        raise BadInput("\n".join(f"{p.key}: {p.what}" for p in found.all)) from None


def settings(instance: Any) -> dict[str, Any]:
    """The fields of a dataclass, by name."""
    return {f.name: getattr(instance, f.name) for f in fields(instance)}


def checked(instance: T) -> T:
    """The same settings, each of the type that its field says; refused if out of range or not a dataclass."""
    name = type(instance).__name__
    if isinstance(instance, type) or not is_dataclass(instance):
        raise BadInput(f"give an instance of a frozen dataclass, such as FPL(), not {instance!r}")
    values = {key: checked(v) if is_dataclass(v) and key != "task" else v for key, v in settings(instance).items()}
    try:
        return filled(type(instance), values, name)
    except Problems as found:
        raise BadInput("\n".join(f"{p.key}: {p.what}" for p in found.all)) from None


def _training(table: Table) -> Training:
    values = dict(table)
    problems: list[Problem] = []
    if "optimizer" in values:
        try:
            values["optimizer"] = _optimizer(values["optimizer"])
        except Problems as found:
            problems += found.all
            del values["optimizer"]
    try:
        training = filled(Training, values, "training")
    except Problems as found:
        problems += found.all
    if problems:
        raise Problems(problems)
    return training


def _optimizer(table: Any) -> Any:
    if (
        isinstance(table, dict) and "name" not in table
    ):  # a change to the optimiser that there is, not a choice of another
        table = {**_table(OPTIMIZERS, Training().optimizer), **table}
    return _nested(OPTIMIZERS, table, "training.optimizer")


def _nested(registry: Mapping[str, type[T]], table: Any, where: str) -> T:
    """An instance of a registered class, which may hold another one as its `base`."""
    if not isinstance(table, dict):
        raise Problems([Problem(where, f"must be a section, [{where}], not {table!r}")])
    values = dict(table)
    if "base" in values:
        values["base"] = _nested(registry, values["base"], f"{where}.base")
    return named(registry, values, where)


SECTIONS: dict[str, Callable[[Table], Any]] = {
    "task": lambda table: named(TASKS, table, "task"),
    "method": lambda table: _nested(METHODS, table, "method"),
    "training": _training,
    "runtime": lambda table: filled(RuntimeSettings, table, "runtime"),
    "evaluation": lambda table: filled(EvaluationSettings, table, "evaluation"),
}


def _override(tree: dict[str, Any], text: str) -> str:
    """Sets one value in the tree; its key."""
    key, equals, value = text.partition("=")
    words = key.strip().split(".")
    if not equals or not all(words):
        raise BadInput(f"--set {text}: write it as section.key=value")
    for word in words[:-1]:
        tree = tree.setdefault(word, {})
        if not isinstance(tree, dict):
            raise BadInput(f"--set {text}: {word!r} is a value, not a section")
    tree[words[-1]] = _value(value.strip())
    return ".".join(words)


def _value(text: str) -> Any:
    """As TOML reads it; a bare word is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


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
    if "base" in values:
        values["base"] = _table(registry, values["base"])
    return {"name": _name(registry, instance), **values}


def _toml_table(name: str, table: Table) -> str:
    known = {key: value for key, value in table.items() if value is not None}
    plain = [f"{_toml_key(key)} = {_toml_value(v)}" for key, v in known.items() if not isinstance(v, Mapping)]
    nested = [_toml_table(f"{name}.{key}", v) for key, v in table.items() if isinstance(v, Mapping)]
    return "\n".join([f"[{name}]", *plain, "", *nested])


def _toml_key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)


def _toml_value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value, ensure_ascii=False)
        case int() | float():
            return repr(value)
        case list() | tuple():
            return f"[{', '.join(_toml_value(item) for item in value)}]"
    raise TypeError(f"{value!r} cannot be written as TOML")
