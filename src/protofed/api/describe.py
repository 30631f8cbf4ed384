"""What a method or task is and which settings it has, read from its class and its module's docstring."""

import ast
import collections.abc
import inspect
import re
import sys
import textwrap
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from protofed.api.method import Method

NUMBERED = re.compile(r"^(\d+)\. ", re.MULTILINE)
_TABLES = (dict, collections.abc.Mapping)
SENDS_KEEPS_SERVER = re.compile(r"Sends: (?P<sends>.+) Keeps: (?P<keeps>.+) Server: (?P<server>.+)")


@dataclass(frozen=True)
class Setting:
    name: str
    kind: str
    default: Any
    """None if there is none."""
    meaning: str
    is_required: bool = False


@dataclass(frozen=True)
class MethodText:
    """The parts of the docstring of a method's module."""

    title: str
    summary: str
    reference: str
    sends: str
    keeps: str
    server: str
    departures: tuple[str, ...]


def text_of(method: type[Method[Any, Any, Any, Any]]) -> MethodText:
    """The module's docstring in parts: title and summary, reference, what is sent and kept, departures."""
    module = method.__module__
    first, *paragraphs = inspect.cleandoc(sys.modules[module].__doc__ or "").split("\n\n")
    title, colon, summary = _one_line(first).partition(": ")
    if not colon:
        raise ValueError(f"{module}: the docstring must begin with 'Title: what the method does.'")
    exchange = next((k for k, text in enumerate(paragraphs) if text.startswith("Sends: ")), None)
    parts = None if exchange is None else SENDS_KEEPS_SERVER.fullmatch(_one_line(paragraphs[exchange]))
    if parts is None:
        raise ValueError(f"{module}: the docstring needs a paragraph 'Sends: … Keeps: … Server: …'")
    reference = " ".join(map(_one_line, paragraphs[:exchange]))
    departures = next((text for text in paragraphs if text.startswith("Departures:")), "")
    numbers, items = NUMBERED.findall(departures), NUMBERED.split(departures)[2::2]
    if numbers != [str(k + 1) for k in range(len(items))] or not (items or departures == "Departures: none."):
        raise ValueError(f"{module}: the docstring needs 'Departures: none.' or a numbered list of them")
    return MethodText(title, summary, reference, **parts.groupdict(), departures=tuple(map(_one_line, items)))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def about(cls: type) -> str:
    """The class's own docstring, or its module's, one line per paragraph or item."""
    docstring = cls.__dict__.get("__doc__") or ""
    is_signature = docstring.startswith(f"{cls.__name__}(")  # `dataclass` writes one where there is no docstring
    text = inspect.cleandoc(docstring if docstring and not is_signature else sys.modules[cls.__module__].__doc__ or "")
    return re.sub(r"(?<!\n)\n(?!\n|\d+\. )\s*", " ", text)


def settings_of(cls: type) -> list[Setting]:
    """The fields of a dataclass, each with the string below it; those of its family last."""
    hints = get_type_hints(cls, include_extras=True)
    classes = [one for one in reversed(cls.__mro__) if is_dataclass(one)]
    meanings = {name: text for one in classes for name, text in _strings_below_fields(one).items()}
    ordered = sorted(fields(cls), key=lambda field: field.kw_only is True)
    return [
        Setting(f.name, _kind(hints[f.name]), _default(f), meanings.get(f.name, ""), is_required=_is_required(f))
        for f in ordered
    ]


def _is_required(field: "Field[Any]") -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _strings_below_fields(cls: type) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    meanings: dict[str, str] = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            text = below.value
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                meanings[field.target.id] = _one_line(text.value)
    return meanings


def _default(field: "Field[Any]") -> Any:
    """The default as JSON can hold it: a method or an optimiser as its repr, without settings if all are defaults."""
    if _is_required(field):
        return None
    default = field.default if field.default_factory is MISSING else field.default_factory()
    if not is_dataclass(default):
        return default
    cls: Any = type(default)
    return f"{cls.__name__}()" if default == cls() else repr(default)


def _kind(hint: Any) -> str:
    """`float > 0`, `"mean" or "sum"`, `true or false`."""
    if get_origin(hint) is Annotated:
        base, *limits = get_args(hint)
        return " ".join([_kind(base), *(_limit(limit) for limit in limits)])
    if get_origin(hint) is Literal:
        return " or ".join(f'"{word}"' for word in get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_kind, get_args(hint))))
    if hint is NoneType:
        return "nothing"
    cls = get_origin(hint) or hint
    if cls in _TABLES:
        return "a table"
    if isinstance(cls, type) and issubclass(cls, Method):
        return "a method"
    return {bool: "true or false", int: "whole number", float: "number"}.get(hint, getattr(hint, "__name__", str(hint)))


def _limit(limit: Any) -> str:
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    bounds = {name: getattr(limit, name, None) for name in signs}
    return ", ".join(f"{signs[name]} {value:g}" for name, value in bounds.items() if value is not None)
