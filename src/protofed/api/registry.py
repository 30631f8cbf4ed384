"""Registries: classes by name. Looking one up imports its module. Lists are read from the files, so that listing all
imports nothing."""

import ast
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

if TYPE_CHECKING:
    from protofed.api.method import Method

    MethodClass = type[Method[Any, Any, Any, Any]]

T = TypeVar("T")

Tag = Literal["core", "global", "personal", "prototype", "heterogeneous", "server-side", "wrapper", "reconstruction"]
"""Kinds of methods: the four systems that protofed is built on; one model for all; one for each client; prototypes
travel; clients may have different networks; the server trains or corrects; it goes around another method; and: the
paper leaves so much open that this is a guess."""

GROUPS = {
    "core": "the four systems",
    "global": "one model for all",
    "prototype": "one model for all, with prototypes",
    "wrapper": "around another method",
    "personal": "a model for each client",
}
"""The headings under which methods are listed, by tag and in this order."""

YEAR = re.compile(r"(?<![:.\d])(?:19|20)\d\d(?!\.?\d)")


@dataclass(frozen=True)
class Source:
    """A class as its file shows it."""

    module: str
    name: str
    docstring: str
    module_docstring: str
    tags: tuple[Tag, ...]

    @property
    def summary(self) -> str:
        """The first paragraph of its docstring, or of its module's, in one line."""
        return " ".join((self.docstring or self.module_docstring).split("\n\n")[0].split())

    @property
    def group(self) -> str:
        """The heading under which a method is listed."""
        tags = (tag for tag in ("core", "wrapper", "personal", "prototype") if tag in self.tags)
        return GROUPS[next(tags, "global")]

    @property
    def year(self) -> int:
        """The first year in the module's docstring, which is that of the paper; 0 if there is none."""
        reference, *_ = self.module_docstring.partition("Sends:")
        years = YEAR.findall(reference)
        return int(years[0]) if years else 0


class Registry(Mapping[str, type[T]]):
    """Classes of a package by name. `places` has their modules, below the package, and their names:
    `custom.settings:Custom`."""

    def __init__(self, package: str, folder: Path, places: Mapping[str, str]) -> None:
        self._package, self._folder = package, folder
        self._places = {name: place.partition(":")[::2] for name, place in places.items()}

    def __getitem__(self, name: str) -> type[T]:
        # Only names that the registry holds are imported: `name` may come from a file.
        source = self.source(name)
        return cast(type[T], getattr(import_module(source.module), source.name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def source(self, name: str) -> Source:
        """What its file says of a class. Raises KeyError if there is no such class."""
        module, class_name = self._places[name]
        return {one.name: one for one in self._classes(module)}[class_name]

    def names_in(self, module: str) -> list[str]:
        """The names under which classes of this module may be registered."""
        return [name for name, (own, _) in self._places.items() if module == f"{self._package}.{own}"]

    def _classes(self, module: str) -> tuple[Source, ...]:
        path = self._folder.joinpath(*module.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        return _classes_in(path, f"{self._package}.{module}")


class MethodRegistry(Registry["Method[Any, Any, Any, Any]"]):
    """The methods of a package. A method is the class in a module, or in the `__init__.py` of a package, that has
    `tags`. It is called like the module.

    The order is by group, then by the year of the paper, then by name.
    """

    def __init__(self, package: str, folder: Path) -> None:
        names = sorted(module.name for module in iter_modules([str(folder)]) if not module.name.startswith("_"))
        super().__init__(package, folder, {name: name for name in names})

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def source(self, name: str) -> Source:
        module, _ = self._places[name]
        methods = [one for one in self._classes(module) if one.tags]
        if len(methods) > 1:
            names = ", ".join(one.name for one in methods)
            raise TypeError(f"{methods[0].module} has more than one method ({names}): give each a module of its own")
        if not methods:  # a module of helpers
            raise KeyError(name)
        return methods[0]

    @cached_property
    def _sources(self) -> dict[str, Source]:
        found = {}
        for name in self._places:
            with suppress(KeyError):
                found[name] = self.source(name)
        headings = list(GROUPS.values())
        return dict(sorted(found.items(), key=lambda item: (headings.index(item[1].group), item[1].year, item[0])))

    def groups(self) -> dict[str, list[str]]:
        """The names under each heading."""
        return {heading: [n for n, one in self._sources.items() if one.group == heading] for heading in GROUPS.values()}


@cache
def _classes_in(path: Path, module: str) -> tuple[Source, ...]:
    """The classes at the top level of a file."""
    code = ast.parse(path.read_text(encoding="utf-8"), str(path))
    docstring = ast.get_docstring(code) or ""
    classes = (node for node in code.body if isinstance(node, ast.ClassDef))
    return tuple(Source(module, one.name, ast.get_docstring(one) or "", docstring, _tags(one)) for one in classes)


def _tags(code: ast.ClassDef) -> tuple[Tag, ...]:
    """The value of `tags = (...)` in the body of a class; empty if it has none."""
    for node in code.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "tags":
            return tuple(ast.literal_eval(node.value))
    return ()
