"""TOML: reads files and overrides, knows the place of every key, and writes settings."""

import json
import math
import stat
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from protofed.errors import BadInput
from protofed.runs.config.schema import Problem, clipped, shown, written
from protofed.runs.config.toml_locations import Key, Lines, nesting

Table = Mapping[str, Any]
Place = Callable[[Key], str]
"""The place of a key for a message, `file:line`."""

MAX_BYTES = 500_000
"""Size of a file. A typical one has some hundred bytes."""
MAX_DEPTH = 32
"""Levels of nested tables and arrays."""


def document(path: Path) -> tuple[dict[str, Any], Place]:
    """The table in a TOML file, and the place of its keys."""
    text = _text(path)
    table = loaded(text, str(path))
    return table, _placed(str(path), Lines(text, table))


def _placed(source: str, lines: Lines) -> Place:

    def place(key: Key) -> str:
        line = lines.of(key)
        return source if line is None else f"{source}:{line}"

    return place


def _text(path: Path) -> str:
    try:
        facts = path.stat()
        # guard: configuration-ordinary-file
        if not stat.S_ISREG(facts.st_mode):  # reading a pipe would block; /dev/zero never ends
            raise BadInput(f"{path}: cannot be read: it is not a file")
        if facts.st_size <= MAX_BYTES:
            with path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
        if facts.st_size > MAX_BYTES or len(content) > MAX_BYTES:  # guard: configuration-has-largest-size
            raise BadInput(f"{path}: is larger than {MAX_BYTES} bytes, which no configuration is")
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        raise BadInput(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from error


def loaded(text: str, source: str) -> dict[str, Any]:
    """The table in a text. Refuses deep nesting and integers of more than 64 bits."""
    too_deep = f"{source}: nested too deeply: more than {MAX_DEPTH} tables or arrays inside one another"
    if nesting(text) > MAX_DEPTH:  # guard: nesting-bounded
        raise BadInput(too_deep)  # guard: nesting-bounded
    try:
        table = tomllib.loads(text, parse_float=_float)
    except ValueError as error:
        raise BadInput(f"{source}: not valid TOML: {error}") from error
    pending: list[tuple[Key, Any, int]] = [((), table, 0)]
    while pending:
        key, value, depth = pending.pop()
        if isinstance(value, dict | list) and depth > MAX_DEPTH:
            raise BadInput(too_deep)
        if isinstance(value, dict):
            pending += [((*key, word), item, depth + 1) for word, item in value.items()]
        elif isinstance(value, list):
            pending += [(key, item, depth + 1) for item in value]
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            place = _placed(source, Lines(text, table))
            raise BadInput(f"{place(key)}: {written(key)}: a whole number must fit into 64 bits")
    return table


def _float(text: str) -> float:
    """A float. Refuses numbers that would overflow to infinity or underflow to 0."""
    number = float(text)
    if math.isinf(number) and "inf" not in text:
        raise ValueError(f"{clipped(text)} is too large for a number")
    if number == 0 and text.lower().partition("e")[0].strip("+-0._"):
        raise ValueError(f"{clipped(text)} is too close to 0 for a number")
    return number


# ---- overrides


def overridden(tree: dict[str, Any], overrides: Iterable[str]) -> tuple[set[Key], list[Problem]]:
    """Sets the overrides in the tree. Returns their keys, and a problem for each key that is set twice."""
    given: dict[Key, Any] = {}
    problems = []
    for text in overrides:
        key, value = _override(text)
        for other, before in given.items():
            if key == other and repr(before) != repr(value):  # guard: setting-set-once
                what = f"is set twice, to {shown(before)} and to {shown(value)}: set it once"
                problems.append(Problem(key, what))
            elif key != other and overlap(key, other):
                problems.append(Problem(key, f"is set twice, also by {written(other)}: set it once"))
        given[key] = value
        _put(tree, key, value, text)
    return {*given}, problems


def _override(text: str) -> tuple[Key, Any]:
    key, equals, value = text.partition("=")
    words = tuple(key.strip().split("."))
    if not equals or not all(words) or not value.strip():
        raise BadInput(f'--set {clipped(text)}: write it as section.key=value, an empty text as ""')
    if len(words) > MAX_DEPTH:
        raise BadInput(f"--set {clipped(text)}: nested too deeply")
    return words, _value(value.strip(), text)


def _put(tree: dict[str, Any], key: Key, value: Any, text: str) -> None:
    for word in key[:-1]:
        tree = tree.setdefault(word, {})
        if not isinstance(tree, dict):
            raise BadInput(f"--set {clipped(text)}: {word!r} is a value, not a section")
    tree[key[-1]] = value


def _value(text: str, source: str) -> Any:
    """The value as TOML; a bare word is a string."""
    try:
        # An inline table ends on its line, so a comment or a second key after the value is an error.
        tables = loaded(f"set = {{value = {text}}}", f"--set {clipped(source)}")
        if tables.keys() == {"set"} and tables["set"].keys() == {"value"}:
            return tables["set"]["value"]
    except BadInput as error:
        if text[0] in "\"'[{" or not isinstance(error.__cause__, tomllib.TOMLDecodeError):
            raise
    return text


def overlap(one: Key, other: Key) -> bool:
    """Whether the keys are equal, or one is a table that holds the other."""
    return all(a == b for a, b in zip(one, other, strict=False))


# ---- written back


def section_text(name: str, table: Table) -> str:
    given = {key: value for key, value in table.items() if value is not None}
    plain = [f"{_toml_key(key)} = {_toml_value(v)}" for key, v in given.items() if not isinstance(v, Mapping)]
    nested = [section_text(f"{name}.{_toml_key(key)}", v) for key, v in table.items() if isinstance(v, Mapping)]
    return "\n".join([f"[{name}]", *plain, "", *nested])


def _toml_key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else _quoted(key)


def _quoted(text: str) -> str:
    """A TOML string is a JSON string, except for surrogate pairs and the character DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return _quoted(value)
        case int() | float():
            return repr(value)
        case list() | tuple():
            return f"[{', '.join(_toml_value(item) for item in value)}]"
    raise TypeError(f"{value!r} cannot be written as TOML")
