"""What a method or task is and which settings it has, read from its own docstrings."""

import ast
import inspect
import re
import sys
import textwrap
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Setting:
    name: str
    kind: str
    default: Any
    meaning: str


def about(cls: type) -> str:
    """The class's own docstring, or its module's, one line per paragraph or item."""
    own = cls.__dict__.get("__doc__") or ""
    is_signature = own.startswith(f"{cls.__name__}(")  # what dataclass writes where there is no docstring
    text = inspect.cleandoc(own if own and not is_signature else sys.modules[cls.__module__].__doc__ or "")
    return re.sub(r"(?<!\n)\n(?!\n|\d+\. )\s*", " ", text)


def settings_of(cls: type) -> list[Setting]:
    """The fields of a dataclass with the strings that stand below them."""
    hints = get_type_hints(cls, include_extras=True)
    meanings = _strings_below_fields(cls)
    return [Setting(f.name, _kind(hints[f.name]), _default(f), meanings.get(f.name, "")) for f in fields(cls)]


def _strings_below_fields(cls: type) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            text = below.value
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                found[field.target.id] = " ".join(text.value.split())
    return found


def _default(field: "Field[Any]") -> Any:
    """The default as JSON can hold it: a method or optimiser as it is written."""
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return repr(default) if is_dataclass(default) else default


def _kind(hint: Any) -> str:
    """`float > 0`, `"mean" or "sum"`, `true or false`."""
    if get_origin(hint) is Annotated:
        base, *limits = get_args(hint)
        return " ".join([_kind(base), *(_limit(limit) for limit in limits)])
    if get_origin(hint) is Literal:
        return " or ".join(f'"{word}"' for word in get_args(hint))
    return {bool: "true or false", int: "whole number", float: "number"}.get(hint, getattr(hint, "__name__", str(hint)))


def _limit(limit: Any) -> str:
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    bounds = {name: getattr(limit, name, None) for name in signs}
    return ", ".join(f"{signs[name]} {value:g}" for name, value in bounds.items() if value is not None)
