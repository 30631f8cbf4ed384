"""Sections of a configuration, checked against the dataclass that they fill.

The fields of the dataclass, their types and ranges are the schema: there is no second list to keep in step.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from protofed.errors import BadInput

T = TypeVar("T")


class Problem(Exception):
    """Something wrong with the value at a key."""

    def __init__(self, key: str, what: str) -> None:
        super().__init__(key, what)
        self.key, self.what = key, what


class Problems(Exception):
    """Everything that is wrong with a section."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        super().__init__()
        self.all = tuple(problems)


def filled(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """An instance of the dataclass with these values, or all that is wrong with them."""
    try:
        checked = _schema(cls)(**values)
    except ValidationError as error:
        raise Problems(_problem(cls, detail, where) for detail in error.errors()) from None
    return cls(**{f.name: getattr(checked, f.name) for f in fields(cls)})  # type: ignore[arg-type]


def named(registry: Mapping[str, type[T]], values: Mapping[str, Any], where: str) -> T:
    """An instance of the registered class that `name` names, filled with the other values."""
    name = values.get("name")
    if name is None:
        raise Problems([Problem(f"{where}.name", f"is missing; one of {', '.join(registry)}")])
    if not isinstance(name, str) or name not in registry:
        raise Problems([Problem(f"{where}.name", f"{name!r} is unknown{nearest(str(name), registry)}")])
    return filled(registry[name], {key: value for key, value in values.items() if key != "name"}, where)


def chosen(registry: Mapping[str, type[T]], name: str, kind: str) -> type[T]:
    """The registered class of this name."""
    if name not in registry:
        raise BadInput(f"{kind} {name!r} is unknown{nearest(name, registry)}")
    return registry[name]


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or what there is to choose from."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known) or 'none'}"


def _schema(cls: type) -> type[BaseModel]:
    hints = get_type_hints(cls, include_extras=True)
    own: dict[str, Any] = {}
    for f in fields(cls):
        default = f.default if f.default_factory is MISSING else f.default_factory()
        own[f.name] = (hints[f.name], ... if default is MISSING else default)
    config = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True, allow_inf_nan=False)
    schema: type[BaseModel] = create_model(cls.__name__, __config__=config, **own)
    return schema


def _problem(cls: type, detail: Any, where: str) -> Problem:
    key = ".".join([where, *(str(word) for word in detail["loc"][:1])])
    if detail["type"] == "extra_forbidden":
        return Problem(key, f"unknown key{nearest(str(detail['loc'][0]), [f.name for f in fields(cls)])}")
    what = detail["msg"].replace("Input should be", "must be")
    return Problem(key, f"{what}, not {detail['input']!r}")
