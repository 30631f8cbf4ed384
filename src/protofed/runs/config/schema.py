"""Checks a section against the dataclass that it fills. The fields, their types and ranges are the schema."""

import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from protofed.errors import BadInput
from protofed.runs.config.toml_locations import Key

T = TypeVar("T")

MAX_QUOTED = 120
"""Characters of the user's text that a message quotes."""


@dataclass(frozen=True)
class Problem:
    """Something wrong with the value at a key."""

    key: Key
    what: str
    others: tuple[Key, ...] = ()
    """Other keys that are part of the problem."""


@dataclass(frozen=True)
class UnknownKey(Problem):
    known: tuple[str, ...] = ()
    """Keys that are valid here."""


class Problems(Exception):
    """Everything that is wrong with a section."""

    def __init__(self, problems: Iterable[Problem], rest: Any = None) -> None:
        super().__init__()
        self.all = tuple(problems)
        self.rest = rest
        """The section without its wrong keys; None if that cannot be built."""


def filled(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """An instance of the dataclass with these values. Raises Problems with everything that is wrong."""
    key, known = tuple(where.split(".")), field_names(cls)
    unknown = [UnknownKey((*key, word), "unknown key", known=known) for word in values if word not in known]
    if unknown:  # guard: no-unknown-key
        return joined(unknown, lambda: filled(cls, {word: values[word] for word in known if word in values}, where))
    try:
        checked = schema_of(cls)(**values)  # type: ignore[arg-type]
    except ValidationError as error:
        problems = [_problem(detail, key, values) for detail in error.errors()]
        raise Problems(problems, _without(cls, values, where, {p.key[len(key)] for p in problems})) from None
    converted = {name: getattr(checked, name) for name in known}
    changed = [name for name, value in values.items() if _is_not_whole(value, converted[name])]
    if changed:
        problems = [Problem((*key, name), f"must be a whole number, not {shown(values[name])}") for name in changed]
        raise Problems(problems, _without(cls, values, where, set(changed)))
    try:
        return cls(**converted)
    except ValueError as error:  # BadInput is one
        raise Problems([Problem(key, str(error))]) from None


def named(registry: Mapping[str, type[T]], values: Mapping[str, Any], where: str) -> T:
    """An instance of the class that `name` names, filled with the other values."""
    key = tuple(where.split("."))
    name = values.get("name")
    if "name" not in values:
        known = ("name", *{word: None for cls in registry.values() for word in field_names(cls)})
        unknown = [UnknownKey((*key, word), "unknown key", known=known) for word in values if word not in known]
        raise Problems([Problem((*key, "name"), f"is missing; one of {', '.join(registry)}"), *unknown])
    if not isinstance(name, str) or name not in registry:
        raise Problems([Problem((*key, "name"), f"{shown(name)} is unknown{nearest(str(name), registry)}")])
    return filled(registry[name], {word: value for word, value in values.items() if word != "name"}, where)


def joined(problems: Sequence[Problem], build: Callable[[], T]) -> T:
    """The result of `build`. Raises its problems together with the earlier ones."""
    try:
        built = build()
    except Problems as error:
        raise Problems([*problems, *error.all], error.rest) from None
    if problems:
        raise Problems(problems, built)
    return built


def field_names(cls: type) -> tuple[str, ...]:
    return tuple(f.name for f in fields(cls) if f.init)


def chosen(registry: Mapping[str, type[T]], name: str, kind: str) -> type[T]:
    """The registered class of this name."""
    if name not in registry:
        raise BadInput(f"{kind} {name!r} is unknown{nearest(name, registry)}")
    return registry[name]


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or the list of valid words. Ignores case, dashes and spaces."""
    known = list(known)
    forms = {_letters(one): one for one in known}
    close = difflib.get_close_matches(_letters(word), forms, n=1, cutoff=0.5)
    return f"; did you mean {forms[close[0]]!r}?" if close else f"; known: {', '.join(known) or 'none'}"


def written(key: Key) -> str:
    """A key as TOML writes it. Characters outside ASCII are escaped, so that look-alikes can be told apart."""
    return clipped(".".join(word if _is_bare(word) else json.dumps(word) for word in key))


def shown(value: Any) -> str:
    """A value as a message quotes it."""
    return clipped(repr(value))


def clipped(text: str) -> str:
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}…"


def _letters(word: str) -> str:
    return "".join(letter for letter in word.lower() if letter.isalnum())


def _is_bare(word: str) -> bool:
    return word.isascii() and word.replace("_", "").replace("-", "").isalnum()


def _is_not_whole(given: Any, read: Any) -> bool:
    """Whether `true` or 1.0 was given for a Literal such as 1. Python calls them equal."""
    return type(read) is int and type(given) is not int


def _without(cls: type[T], values: Mapping[str, Any], where: str, wrong: set[str]) -> T | None:
    if not wrong & values.keys():
        return None  # a key without a default is missing: no other key can be left out for it
    try:
        return filled(cls, {word: value for word, value in values.items() if word not in wrong}, where)
    except Problems:
        return None


@cache
def schema_of(cls: type) -> type[BaseModel]:
    hints = get_type_hints(cls, include_extras=True)
    hinted: dict[str, Any] = {}
    for f in (f for f in fields(cls) if f.init):
        default = f.default if f.default_factory is MISSING else f.default_factory()
        hinted[f.name] = (hints[f.name], ... if default is MISSING else default)
    # guard: bare-word-no-number, numbers-finite
    config = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=False)
    schema: type[BaseModel] = create_model(cls.__name__, __config__=config, **hinted)
    return schema


def _problem(detail: Any, where: Key, values: Mapping[str, Any]) -> Problem:
    what = detail["msg"].replace("Input should be", "must be")
    return Problem((*where, *_given(detail["loc"], values)), f"{what}, not {shown(detail['input'])}")


def _given(place: tuple[str | int, ...], values: Any) -> Key:
    """The part of pydantic's location that is in the user's file. It also has words of its own, as for a union."""
    first, *deeper = place
    words = [str(first)]
    inner = values.get(first)
    for word in deeper:
        if not isinstance(inner, Mapping) or word not in inner:
            break
        words.append(str(word))
        inner = inner[word]
    return tuple(words)
