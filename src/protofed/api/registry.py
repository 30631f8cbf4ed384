"""The registry of methods. It finds them in a package: a method is one module, and is called like it."""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from importlib import import_module
from inspect import isabstract
from itertools import chain
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from protofed.api.method import Method

MethodClass = type[Method[Any, Any, Any, Any]]

GROUPS = {
    "core": "the four systems",
    "global": "one model for all",
    "prototype": "one model for all, with prototypes",
    "wrapper": "around another method",
    "personal": "a model for each client",
}
"""The headings under which methods are listed, by tag and in this order."""

YEAR = re.compile(r"(?<![:.\d])(?:19|20)\d\d(?!\.?\d)")


class MethodRegistry(Mapping[str, MethodClass]):
    """The methods of a package by name. Looking one up imports its module alone, going through all imports all.

    The order is by group, then by the year of the paper, then by name.
    """

    def __init__(self, package: str, path: Iterable[str]) -> None:
        self._package = package
        self._modules = frozenset(module.name for module in iter_modules(path) if not module.name.startswith("_"))

    def __getitem__(self, name: str) -> MethodClass:
        # Only names that were seen in the package's folder are imported: `name` may come from a file.
        method = _method_in(import_module(f"{self._package}.{name}")) if name in self._modules else None
        if method is None:
            raise KeyError(name)
        return method

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @cached_property
    def _names(self) -> list[str]:
        methods = {name: self[name] for name in sorted(self._modules) if name in self}
        headings = list(GROUPS.values())

        def place(name: str) -> tuple[int, int, str]:
            return headings.index(group_of(methods[name])), _year_of(methods[name]), name

        return sorted(methods, key=place)

    def groups(self) -> dict[str, list[str]]:
        """The names under each heading."""
        return {heading: [name for name in self if group_of(self[name]) == heading] for heading in GROUPS.values()}

    def class_named(self, class_name: str) -> MethodClass | None:
        """The method whose class has this name, `FedPerPlus`. The module that is called so is tried first."""
        likely = [name for name in self._modules if name.replace("_", "") == class_name.lower()]
        classes = (self[name] for name in chain(likely, self) if name in self)
        return next((method for method in classes if method.__name__ == class_name), None)


def group_of(method: MethodClass) -> str:
    """The heading under which a method is listed."""
    tags = (tag for tag in ("core", "wrapper", "personal", "prototype") if tag in method.tags)
    return GROUPS[next(tags, "global")]


def _method_in(module: ModuleType) -> MethodClass | None:
    """The dataclass of a module that is a method. Modules of helpers have none."""
    methods = [value for value in vars(module).values() if _is_method_of(value, module)]
    if len(methods) > 1:
        names = ", ".join(method.__name__ for method in methods)
        raise TypeError(f"{module.__name__} has more than one method ({names}): give each a module of its own")
    return methods[0] if methods else None


def _is_method_of(value: Any, module: ModuleType) -> bool:
    """Whether it is a complete method that the module, or a module below it, defines. Families are no dataclasses."""
    if not (isinstance(value, type) and issubclass(value, Method) and "__dataclass_fields__" in vars(value)):
        return False
    return not isabstract(value) and f"{value.__module__}.".startswith(f"{module.__name__}.")


def _year_of(method: MethodClass) -> int:
    """The first year in the module's docstring, which is that of the paper; 0 if there is none."""
    reference, *_ = (sys.modules[method.__module__].__doc__ or "").partition("Sends:")
    years = YEAR.findall(reference)
    return int(years[0]) if years else 0
