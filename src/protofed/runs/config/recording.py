"""Settings as plain tables: what config.toml holds and what the run's hash is made of."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from math import isnan
from typing import Any

from protofed.api.registry import Registry
from protofed.api.task import Task
from protofed.errors import BadInput
from protofed.runs.config.schema import shown
from protofed.runs.config.toml import MAX_DEPTH
from protofed.tasks import TASKS, TaskSettings


def settings(instance: Any) -> dict[str, Any]:
    """The init fields of a dataclass by name."""
    return {f.name: getattr(instance, f.name) for f in fields(instance) if f.init}


def named_table(registry: Mapping[str, type], instance: Any) -> dict[str, Any]:
    """Name and settings of a method, task or optimiser, and of its `base`."""
    values = settings(instance)
    if is_dataclass(values.get("base")):
        values["base"] = named_table(registry, values["base"])
    for name, value in values.items():
        if not _can_be_recorded(value):
            raise BadInput(
                f"{type(instance).__name__}.{name} is {shown(value)}, which a run cannot record: settings are plain "
                "numbers, strings, booleans, lists or tuples of these, dicts from strings to these, or None"
            )
    return {"name": registered_name(registry, instance), **values}


def registered_name(registry: Mapping[str, type], instance: object) -> str:
    """The name in the registry, or `module:Class` for a class that is not in it."""
    cls = type(instance)
    names = registry.names_in(cls.__module__) if isinstance(registry, Registry) else registry
    return next((name for name in names if registry.get(name) is cls), f"{cls.__module__}:{cls.__qualname__}")


def task_table(task: TaskSettings | Task) -> dict[str, Any]:
    """The settings of a task, or a digest of the data if the task was built in Python."""
    if isinstance(task, Task):
        return {"name": task.name, "fingerprint": fingerprint(task)}
    return named_table(TASKS, task)


def fingerprint(task: Task) -> str:
    """A digest of everything in a task except its networks, so that a run is not resumed on other data."""
    digest = hashlib.sha256(repr((task.num_classes, sorted(task.domain_of.items()), task.transform)).encode())
    public = [] if task.public is None else [("public", task.public)]
    if task.held_out:
        digest.update(repr(sorted(task.held_out)).encode())
    validation = {f"validation {name}": data for name, data in task.validation.items()}
    sets = (task.clients, task.tests, task.local_tests, validation)
    for name, data in (*(item for one in sets for item in sorted(one.items())), *public):
        for leaf in (data.x[data.index], data.labels):
            digest.update(repr((name, leaf.dtype, leaf.shape)).encode())
            digest.update(leaf.contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()[:12]


def digest_of(table: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits. The order of keys does not matter."""
    return text_digest(json.dumps(table, sort_keys=True, ensure_ascii=False))


def text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _can_be_recorded(value: Any, depth: int = 0) -> bool:
    """Whether TOML can hold the value and gives the same value back. Exact types: a numpy number does not qualify."""
    if type(value) in (list, tuple) and depth < MAX_DEPTH // 2:
        return all(_can_be_recorded(item, depth + 1) and type(item) not in (dict, type(None)) for item in value)
    if type(value) is dict and depth < MAX_DEPTH // 2:
        return all(_is_text(key) and _can_be_recorded(item, depth + 1) for key, item in value.items())
    is_small = type(value) is int and -(2**63) <= value < 2**63
    is_number = type(value) is float and not isnan(value)
    return value is None or type(value) is bool or is_small or is_number or _is_text(value)


def _is_text(value: Any) -> bool:
    """A string that UTF-8 can encode: no lone surrogates."""
    return type(value) is str and not any("\ud800" <= letter <= "\udfff" for letter in value)
