"""Which tensors an object can reach, whoever holds them."""

import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

LEAVES = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, types.BuiltinFunctionType)


def reachable(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor that can be reached by attributes, items, closures, defaults and bound methods, with the way to it.
    Modules and classes are not entered: they are the same for everybody."""
    seen: dict[int, Any] = {}
    waiting = [(path, value)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, LEAVES) or id(value) in seen:
            continue
        seen[id(value)] = value  # kept, so that no other object takes its id
        if isinstance(value, Tensor):
            yield path, value
            if value._base is not None:
                waiting.append((f"{path}._base", value._base))
            continue
        waiting += list(_children(value, path))


def _children(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, child in list(value.items()):
            yield f"{path}[{key!r}]", child
    elif isinstance(value, list | tuple | set | frozenset):
        for i, child in enumerate(value):
            yield f"{path}[{i}]", child
    elif isinstance(value, functools.partial):
        yield f"{path}.func", value.func
        yield f"{path}.args", value.args
        yield f"{path}.keywords", value.keywords
    elif isinstance(value, types.MethodType):
        yield f"{path}.__self__", value.__self__
        yield f"{path}.__func__", value.__func__
    if isinstance(value, types.FunctionType):
        yield f"{path}.__defaults__", value.__defaults__
        yield f"{path}.__kwdefaults__", value.__kwdefaults__
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield f"{path}.{name}", cell.cell_contents
            except ValueError:  # a name that was never bound
                continue
    for name, child in getattr(value, "__dict__", {}).items():
        yield f"{path}.{name}", child
    for name in getattr(type(value), "__slots__", ()):
        if hasattr(value, name):
            yield f"{path}.{name}", getattr(value, name)
