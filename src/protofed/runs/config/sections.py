"""The sections of an experiment file. To add one, add it to SECTIONS here and as a field of Config.

[task]        name, and the settings of the task; a name may be `module:Class` for one of the user's own
[method]      name, and the hyper-parameters of the method; likewise
[training]    rounds, epochs, batch_size, fraction, minimum_replies, seed and others, [training.optimizer]
              and [training.schedule]
[uploads]     precision, clip, max_prototype_ratio, max_update_ratio, min_class_count, min_owners
[robust]      faulty, weights, prototypes
[secure]      sums, threshold, masks
[privacy]     level, epsilon, delta, clip_features, clip_gradients, releases, prototype_share, noise
[runtime]     name, threads, device, precision
[evaluation]  every, clients
[saving]      on_error, keep
[logging]     tensorboard, mlflow, wandb
"""

from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, cast

from annotated_types import Ge

from protofed.api.method import Method
from protofed.engine.secure_settings import SecureSettings
from protofed.engine.training import Training
from protofed.methods import METHODS, bases_of
from protofed.optim.optimizers import OPTIMIZERS, PLAIN
from protofed.optim.schedules import SCHEDULES
from protofed.privacy.settings import PrivacySettings
from protofed.runs.config.recording import named_table, settings, task_table
from protofed.runs.config.schema import Problem, Problems, field_names, filled, joined, named, shown
from protofed.runs.config.toml import Table
from protofed.runs.observers import LoggingSettings
from protofed.runs.runtime_choice import RuntimeSettings
from protofed.tasks import TASKS, TaskSettings
from protofed.transforms.chain import UploadSettings
from protofed.transforms.robust_stage import RobustSettings

T = TypeVar("T")


@dataclass(frozen=True)
class EvaluationSettings:
    every: Annotated[int, Ge(1)] = 1
    """Rounds between evaluations. The last round is always evaluated."""
    clients: Annotated[int, Ge(0)] = 0
    """Rounds between evaluations of each client's own model, right after training (PM(V), PM(L), I_local, HM). The last
    round is then evaluated too. 0: never."""
    fine_tune: Annotated[int, Ge(0)] = 0
    """Epochs in which each client fine-tunes the model that it would use, on its own data, before that is tested. The
    run goes on without what was fine-tuned. 0: models are tested as they are."""
    global_models: bool = False
    """Whether global models are tested too that can be made of clients' own, of methods that have no public one (FedPC,
    FedPer, FedRep): GM of the mean of the heads, of the nearest global prototype, and of the initial head."""
    patience: Annotated[int, Ge(0)] = 0
    """Evaluations without a better score on validation examples after which the run ends. Rounds are compared by the
    clients' mean balanced accuracy on examples that are neither trained on nor tested. 0: all rounds are run."""


@dataclass(frozen=True)
class SavingSettings:
    on_error: Literal["stop", "warn"] = "stop"
    """What happens when the state cannot be saved, as on a full disk: the run ends, or it warns and tries again after
    the next round."""
    keep: list[Annotated[int, Ge(0)]] = field(default_factory=list)
    """Rounds whose states stay in the run's folder, to be looked at later; 0 is the state before the first one. Others
    go when two later ones are saved."""


@dataclass(frozen=True)
class Registries:
    """The classes that `name` may name."""

    methods: Mapping[str, type[Method[Any, Any, Any, Any]]]
    tasks: Mapping[str, type[TaskSettings]]

    def extended(self, methods: dict[str, type], tasks: dict[str, type]) -> "Registries":
        """With classes of the user's own, which are listed last."""
        return Registries(ChainMap(methods, cast(Any, self.methods)), ChainMap(tasks, cast(Any, self.tasks)))


REGISTRIES = Registries(METHODS, TASKS)


@dataclass(frozen=True)
class Section:
    build: Callable[[Table, Registries], Any]
    """The settings in a table of the file. Raises Problems."""
    keys: Callable[[Table, Registries], Mapping[str, tuple[str, ...]]]
    """The keys that the section and the ones inside it may have, by header."""
    recorded: Callable[[Any], dict[str, Any]]
    """The settings as a plain table."""


def _plain(header: str, cls: type) -> Section:
    """A section that fills one dataclass."""
    return Section(
        build=lambda table, registries: filled(cls, table, header),
        keys=lambda table, registries: {header: field_names(cls)},
        recorded=settings,
    )


IN_TRAINING: dict[str, Mapping[str, type[Any]]] = {"optimizer": OPTIMIZERS, "schedule": SCHEDULES}
"""Sections inside [training], and the classes that `name` may name there."""

SECTIONS: dict[str, Section] = {
    "task": Section(
        build=lambda table, registries: named(registries.tasks, table, "task"),
        keys=lambda table, registries: {"task": _keys(registries.tasks, table)},
        recorded=task_table,
    ),
    "method": Section(
        build=lambda table, registries: _nested(registries.methods, table, "method", bases_of),
        keys=lambda table, registries: {"method": _keys(registries.methods, table)},
        recorded=lambda method: named_table(METHODS, method),
    ),
    "training": Section(
        build=lambda table, registries: _training(table),
        keys=lambda table, registries: _training_keys(table),
        recorded=lambda training: {**settings(training), **_inner_tables(training)},
    ),
    "uploads": _plain("uploads", UploadSettings),
    "robust": _plain("robust", RobustSettings),
    "secure": _plain("secure", SecureSettings),
    "privacy": _plain("privacy", PrivacySettings),
    "runtime": _plain("runtime", RuntimeSettings),
    "evaluation": _plain("evaluation", EvaluationSettings),
    "saving": _plain("saving", SavingSettings),
    "logging": _plain("logging", LoggingSettings),
}


def built(tree: Table, key: str, registries: Registries) -> Any:
    """The settings of one section. Raises Problems."""
    section = tree.get(key, {})
    if not isinstance(section, dict):
        raise Problems([Problem((key,), f"must be a section, [{key}], not {shown(section)}")])
    return SECTIONS[key].build(section, registries)


def keys_of_sections(tree: Table, registries: Registries) -> dict[str, tuple[str, ...]]:
    """The keys that each section may have, given the task, method and optimiser that the tree names."""
    tables = {key: value if isinstance(value, Mapping) else {} for key, value in tree.items()}
    keys: dict[str, tuple[str, ...]] = {}
    for key, section in SECTIONS.items():
        keys |= section.keys(tables.get(key, {}), registries)
    return keys


def _training(table: Table) -> Training:
    values = dict(table)
    problems: list[Problem] = []
    for key, registry in IN_TRAINING.items():
        if key in values:
            try:
                values[key] = _inner(key, registry, values[key])
            except Problems as error:
                problems += error.all
                del values[key]
    return joined(problems, lambda: filled(Training, values, "training"))


def _inner(key: str, registry: Mapping[str, type[Any]], table: Any) -> Any:
    if isinstance(table, dict) and "name" not in table:
        table = {**_inner_tables(Training())[key], **table}  # without a name, the keys change the default
    return _nested(registry, table, f"training.{key}", lambda cls: [*PLAIN])


def _inner_tables(training: Training) -> dict[str, dict[str, Any]]:
    return {key: named_table(registry, getattr(training, key)) for key, registry in IN_TRAINING.items()}


def _training_keys(table: Table) -> dict[str, tuple[str, ...]]:
    keys = {"training": field_names(Training)}
    for key, default in _inner_tables(Training()).items():
        given = table.get(key, {})
        named_one = {"name": default["name"], **(given if isinstance(given, Mapping) else {})}
        keys[f"training.{key}"] = _keys(IN_TRAINING[key], named_one)
    return keys


def _nested(registry: Mapping[str, type[T]], table: Any, where: str, bases: Callable[[type[T]], list[str]]) -> T:
    """An instance of a registered class. Its `base`, if it has one, is an instance too, of a class in `bases`."""
    key = tuple(where.split("."))
    if not isinstance(table, dict):
        raise Problems([Problem(key, f"must be a section, [{where}], not {shown(table)}")])
    values = dict(table)
    problems: list[Problem] = []
    if "base" in values and "base" in _keys(registry, values):
        base = values.pop("base")
        try:
            values["base"] = _nested(registry, base, f"{where}.base", bases)
            allowed = bases(registry[values["name"]])
            if base["name"] not in allowed and ":" not in base["name"]:  # the type of the field decides on those
                what = f"{values['name']} cannot go around {base['name']}: choose one of {', '.join(allowed)}"
                raise Problems([Problem((*key, "base", "name"), what)])
        except Problems as error:
            problems += error.all
            values.pop("base", None)
    return joined(problems, lambda: named(registry, values, where))


def _keys(registry: Mapping[str, type], table: Table) -> tuple[str, ...]:
    """The keys of a section that names a class."""
    name = table.get("name")
    cls = registry.get(name) if isinstance(name, str) else None
    return ("name", *(field_names(cls) if cls else ()))
