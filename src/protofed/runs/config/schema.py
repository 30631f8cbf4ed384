"""Sections of a configuration, checked against the dataclass that they fill.

The fields of the dataclass, their types and ranges are the schema: there is no second list to keep in step.
"""

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

LONGEST = 120
"""Characters of a user's own words that a message repeats."""


@dataclass(frozen=True)
class Problem:
    """Something wrong with the value at a key."""

    key: Key
    what: str
    others: tuple[Key, ...] = ()
    """The keys that it contradicts."""


@dataclass(frozen=True)
class UnknownKey(Problem):
    known: tuple[str, ...] = ()
    """What could stand in its place."""


class Problems(Exception):
    """Everything that is wrong with a section."""

    def __init__(self, problems: Iterable[Problem], rest: Any = None) -> None:
        super().__init__()
        self.all = tuple(problems)
        self.rest = rest
        """What the section would be without the keys that are wrong; None if it would be nothing."""


def filled(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """An instance of the dataclass with these values, or all that is wrong with them."""
    key, known = tuple(where.split(".")), field_names(cls)
    unknown = [UnknownKey((*key, word), "unknown key", known=known) for word in values if word not in known]
    if unknown:  # guard: no-unknown-key
        return joined(unknown, lambda: filled(cls, {word: values[word] for word in known if word in values}, where))
    try:
        checked = schema_of(cls)(**values)  # type: ignore[arg-type]
    except ValidationError as error:
        problems = [_problem(detail, key, values) for detail in error.errors()]
        raise Problems(problems, _without(cls, values, where, {p.key[len(key)] for p in problems})) from None
    own = {name: getattr(checked, name) for name in known}
    changed = [name for name, value in values.items() if _is_other_kind(value, own[name])]
    if changed:
        problems = [Problem((*key, name), f"must be a whole number, not {shown(values[name])}") for name in changed]
        raise Problems(problems, _without(cls, values, where, set(changed)))
    try:
        return cls(**own)
    except ValueError as error:  # BadInput is one
        raise Problems([Problem(key, str(error))]) from None


def named(registry: Mapping[str, type[T]], values: Mapping[str, Any], where: str) -> T:
    """An instance of the registered class that `name` names, filled with the other values."""
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
    """What is built, unless there were problems before or are now."""
    try:
        built = build()
    except Problems as found:
        raise Problems([*problems, *found.all], found.rest) from None
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
    """`; did you mean 'x'?`, or what there is to choose from. Capitals, dashes and spaces do not count."""
    known = list(known)
    forms = {_letters(own): own for own in known}
    close = difflib.get_close_matches(_letters(word), forms, n=1, cutoff=0.5)
    return f"; did you mean {forms[close[0]]!r}?" if close else f"; known: {', '.join(known) or 'none'}"


def written(key: Key) -> str:
    """A key as TOML writes it; a word that only looks like another shows what it is made of."""
    return clipped(".".join(word if _is_bare(word) else json.dumps(word) for word in key))


def shown(value: Any) -> str:
    """A user's value in a message."""
    return clipped(repr(value))


def clipped(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _letters(word: str) -> str:
    return "".join(letter for letter in word.lower() if letter.isalnum())


def _is_bare(word: str) -> bool:
    return word.isascii() and word.replace("_", "").replace("-", "").isalnum()


def _is_other_kind(given: Any, read: Any) -> bool:
    """Whether a literal such as 1 was given as `true` or 1.0, which Python takes for equal."""
    return type(read) is int and type(given) is not int


def _without(cls: type[T], values: Mapping[str, Any], where: str, wrong: set[str]) -> T | None:
    try:
        return filled(cls, {word: value for word, value in values.items() if word not in wrong}, where)
    except Problems:
        return None


@cache
def schema_of(cls: type) -> type[BaseModel]:
    hints = get_type_hints(cls, include_extras=True)
    own: dict[str, Any] = {}
    for f in (f for f in fields(cls) if f.init):
        default = f.default if f.default_factory is MISSING else f.default_factory()
        own[f.name] = (hints[f.name], ... if default is MISSING else default)
    # guard: bare-word-no-number, numbers-finite
    config = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=False)
    schema: type[BaseModel] = create_model(cls.__name__, __config__=config, **own)
    return schema


def _problem(detail: Any, where: Key, values: Mapping[str, Any]) -> Problem:
    what = detail["msg"].replace("Input should be", "must be")
    return Problem((*where, *_given(detail["loc"], values)), f"{what}, not {shown(detail['input'])}")


def _given(place: tuple[str | int, ...], values: Any) -> Key:
    """The words of a place that are keys of the user's; the others are pydantic's, such as the branch of a union."""
    first, *deeper = place
    words = [str(first)]
    inner = values.get(first)
    for word in deeper:
        if not isinstance(inner, Mapping) or word not in inner:
            break
        words.append(str(word))
        inner = inner[word]
    return tuple(words)
