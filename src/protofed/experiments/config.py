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
import math
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge

from protofed.errors import BadInput
from protofed.experiments.changes import without_harmless
from protofed.experiments.contradictions import absent_device, contradictions, unfit
from protofed.experiments.lines import Key, Lines, nesting
from protofed.experiments.run import Experiment
from protofed.experiments.sections import (
    Problem,
    Problems,
    UnknownKey,
    clipped,
    field_names,
    filled,
    joined,
    named,
    nearest,
    shown,
    written,
)
from protofed.method import Method, Task
from protofed.methods import METHODS, bases_of
from protofed.optim import OPTIMIZERS
from protofed.runtimes.federation import Federation, Training
from protofed.runtimes.jobs import Runtime
from protofed.runtimes.sequential import Sequential
from protofed.runtimes.settings import RuntimeSettings
from protofed.tasks import TASKS, ReadsOwnFiles, TaskSettings

T = TypeVar("T")
Table = Mapping[str, Any]
Place = Callable[[Key], str]
"""Where a key stands, for a message: `file:line`."""

MOST_BYTES = 1_000_000
"""Of a file; a configuration has some hundred."""
DEEPEST = 32
"""Tables and arrays inside one another."""
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
        return "\n".join(_toml_table(name, table) for name, table in self.resolved().items())

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
            judge_clients_every=self.evaluation.clients,
            threads=self.runtime.threads,
            config=self.toml(),
            identity=self.identity,
            on_save_error=self.saving.on_error,
        )


def load(path: Path, overrides: Iterable[str] = ()) -> Config:
    """The configuration in a file, with overrides such as `method.temperature=0.05`."""
    table, place = document(path)
    return parse(table, place, overrides)


def read(path: Path) -> dict[str, Any]:
    """The table in a TOML file."""
    table, _ = document(path)
    return table


def document(path: Path) -> tuple[dict[str, Any], Place]:
    """The table in a TOML file, and where its keys stand."""
    text = _text(path)
    table = _loaded(text, str(path))
    return table, _placed(str(path), Lines(text, table))


def _placed(source: str, lines: Lines) -> Place:

    def place(key: Key) -> str:
        line = lines.of(key)
        return source if line is None else f"{source}:{line}"

    return place


def parse(table: Table, source: str | Place, overrides: Iterable[str] = ()) -> Config:
    """The configuration in a table; all that is wrong with it is said at once."""
    tree = copy.deepcopy(dict(table))
    overridden, problems = _overridden(tree, overrides)
    problems += [UnknownKey((key,), "unknown section", known=(*SECTIONS,)) for key in tree if key not in SECTIONS]
    built: dict[str, Any] = {}
    for key, build in SECTIONS.items():
        try:
            built[key] = build(_section(tree, key))
        except Problems as found:
            problems += found.all
            built[key] = found.rest
    wrong = {p.key for p in problems}
    problems += [p for p in contradictions(built) if not any(_overlap(k, w) for k in (p.key, *p.others) for w in wrong)]
    if problems:
        place = source if callable(source) else lambda key: source
        raise BadInput(
            _complaint(problems, tree, lambda key: "--set" if _is_set(key, table, overridden) else place(key))
        )
    return Config(**built)


def task_settings(name: str, overrides: Iterable[str] = ()) -> TaskSettings:
    """A registered task's settings, with overrides such as `fraction=0.02`."""
    tree: dict[str, Any] = {"name": name}
    _, problems = _overridden(tree, overrides)
    _refuse(problems)
    try:
        return named(TASKS, tree, "task")
    except Problems as found:
        raise BadInput("\n".join(_plain(p) for p in found.all)) from None


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


def _overlap(one: Key, other: Key) -> bool:
    """Whether one key is the other, or a table that holds it."""
    return all(a == b for a, b in zip(one, other, strict=False))


def _is_set(key: Key, table: Table, overridden: Iterable[Key]) -> bool:
    """Whether a key comes from an override, as does a table that the file does not have."""
    return any(_overlap(key, own) and (len(own) <= len(key) or not _holds(table, key)) for own in overridden)


def _holds(table: Any, key: Key) -> bool:
    return not key or (isinstance(table, Mapping) and key[0] in table and _holds(table[key[0]], key[1:]))


# ---- files and overrides


def _text(path: Path) -> str:
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):  # a pipe would be waited for, a device may have no end
            raise BadInput(f"{path}: cannot be read: it is not a file")
        if facts.st_size <= MOST_BYTES:
            with path.open("rb") as file:
                content = file.read(MOST_BYTES + 1)
        if facts.st_size > MOST_BYTES or len(content) > MOST_BYTES:
            raise BadInput(f"{path}: is larger than {MOST_BYTES} bytes: a configuration is not")
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        raise BadInput(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from error


def _loaded(text: str, source: str) -> dict[str, Any]:
    """The table in a text that is neither too deep nor holds numbers that would become others."""
    too_deep = f"{source}: nested too deeply: more than {DEEPEST} tables or arrays inside one another"
    if nesting(text) > DEEPEST:
        raise BadInput(too_deep)
    try:
        table = tomllib.loads(text, parse_float=_float)
    except ValueError as error:
        raise BadInput(f"{source}: not valid TOML: {error}") from error
    inner: list[tuple[Key, Any, int]] = [((), table, 0)]
    while inner:
        key, value, depth = inner.pop()
        if isinstance(value, dict | list) and depth > DEEPEST:
            raise BadInput(too_deep)
        if isinstance(value, dict):
            inner += [((*key, word), own, depth + 1) for word, own in value.items()]
        elif isinstance(value, list):
            inner += [(key, own, depth + 1) for own in value]
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            place = _placed(source, Lines(text, table))
            raise BadInput(f"{place(key)}: {written(key)}: a whole number must fit into 64 bits")
    return table


def _float(text: str) -> float:
    """A number of TOML, unless it would be read as infinity or nothing."""
    number = float(text)
    if math.isinf(number) and "inf" not in text:
        raise ValueError(f"{clipped(text)} is too large for a number")
    if number == 0 and text.lower().partition("e")[0].strip("+-0._"):
        raise ValueError(f"{clipped(text)} is too near to 0 for a number")
    return number


def _overridden(tree: dict[str, Any], overrides: Iterable[str]) -> tuple[set[Key], list[Problem]]:
    """Sets values in the tree; their keys, and those that are set twice."""
    given: dict[Key, Any] = {}
    problems = []
    for text in overrides:
        key, value = _override(text)
        for other, before in given.items():
            if key == other and repr(before) != repr(value):
                what = f"is set twice, to {shown(before)} and to {shown(value)}: set it once"
                problems.append(Problem(key, what))
            elif key != other and _overlap(key, other):
                problems.append(Problem(key, f"is set twice, also by {written(other)}: set it once"))
        given[key] = value
        _put(tree, key, value, text)
    return {*given}, problems


def _override(text: str) -> tuple[Key, Any]:
    key, equals, value = text.partition("=")
    words = tuple(key.strip().split("."))
    if not equals or not all(words) or not value.strip():
        raise BadInput(f'--set {clipped(text)}: write it as section.key=value, an empty text as ""')
    if len(words) > DEEPEST:
        raise BadInput(f"--set {clipped(text)}: nested too deeply")
    return words, _value(value.strip(), text)


def _put(tree: dict[str, Any], key: Key, value: Any, text: str) -> None:
    for word in key[:-1]:
        tree = tree.setdefault(word, {})
        if not isinstance(tree, dict):
            raise BadInput(f"--set {clipped(text)}: {word!r} is a value, not a section")
    tree[key[-1]] = value


def _value(text: str, source: str) -> Any:
    """As TOML reads it; a bare word is a string."""
    try:
        # inside a table on one line, where nothing can follow the value unseen: no comment, no second key
        tables = _loaded(f"set = {{value = {text}}}", f"--set {clipped(source)}")
        if tables.keys() == {"set"} and tables["set"].keys() == {"value"}:
            return tables["set"]["value"]
    except BadInput as error:
        if text[0] in "\"'[{" or not isinstance(error.__cause__, tomllib.TOMLDecodeError):
            raise
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
