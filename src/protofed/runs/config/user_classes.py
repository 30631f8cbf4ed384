"""Methods and tasks of the user's own, named as `module:Class` in an experiment file.

Naming a class imports its module, which runs its code. So only a file or --set that the user gives may do it: never a
run folder, and never anything that comes over the network.
"""

import importlib
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from inspect import isabstract
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from protofed.api.method import Method
from protofed.errors import BadInput
from protofed.nn.networks import Parts
from protofed.runs.config.schema import Problem, field_names, schema_of, shown
from protofed.runs.config.toml import Table
from protofed.runs.config.toml_locations import Key

NAME = re.compile(r"(?P<module>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):(?P<cls>[A-Za-z_]\w*)", re.ASCII)
RUN_FOLDER_FILES = ("environment.json", "checkpoint")


@dataclass(frozen=True)
class Importer:
    """Imports the classes that a configuration names."""

    folder: Path | None = None
    """Modules are also looked for here. It comes after Python's own path, so that no file here hides a library."""
    refusal: str = "only an experiment file may name a class by its module"
    """Why nothing may be imported; empty if it may."""

    def class_of(self, name: str, kind: str) -> type:
        """The class called `module:Class`. Raises BadInput."""
        module, cls = self._named(name)
        if not isinstance(cls, type):
            raise BadInput(f"{_place(module)} has no class {name.partition(':')[2]}")
        _check_class(cls, kind, _place(module))
        return cls

    def network(self, name: str) -> Callable[..., Parts]:
        """The function called `module:function`, which builds a network. Raises BadInput."""
        module, function = self._named(name)
        if not isinstance(function, FunctionType):
            raise BadInput(f"{_place(module)} has no function {name.partition(':')[2]}")
        return function

    def _named(self, name: str) -> tuple[ModuleType, Any]:
        """A module, and what is called so in it; None if nothing is."""
        match = NAME.fullmatch(name)
        if match is None:
            raise BadInput(f"{shown(name)} is not module:Class, such as my_package.my_module:MyMethod")
        if self.refusal:  # guard: table-imports-nothing
            raise BadInput(f"{shown(name)} is not imported: {self.refusal}")
        module = self._module(match["module"])
        return module, getattr(module, match["cls"], None)

    def _module(self, name: str) -> ModuleType:
        with self._on_path():
            self._refuse_namesake(name.partition(".")[0])
            try:
                return importlib.import_module(name)
            except ModuleNotFoundError as error:
                if error.name and f"{name}.".startswith(f"{error.name}."):
                    raise BadInput(self._not_found(error.name)) from None
                raise BadInput(_import_failure(name, error)) from error
            except (Exception, SystemExit) as error:
                raise BadInput(_import_failure(name, error)) from error

    @contextmanager
    def _on_path(self) -> Iterator[None]:
        importlib.invalidate_caches()
        folder = str(self.folder.absolute()) if self.folder else None
        if folder is None or folder in sys.path:
            yield
            return
        sys.path.append(folder)
        try:
            yield
        finally:
            sys.path.remove(folder)

    def _refuse_namesake(self, top: str) -> None:
        """Refuses a name under which Python has already loaded another file: the import would return that one."""
        loaded = getattr(sys.modules.get(top), "__file__", None)
        if loaded is None:
            return
        specs = (finder.find_spec(top, None) for finder in sys.meta_path)
        origin = next((spec.origin for spec in specs if spec), None)
        if origin is None:
            raise BadInput(self._not_found(top))
        if origin != loaded:
            raise BadInput(f"the module {top!r} is already loaded from {loaded}, so {origin} cannot be: rename it")

    def _not_found(self, name: str) -> str:
        beside = f" or in {self.folder}" if self.folder else ""
        return f"there is no module {name!r} on Python's path{beside}"


def importer_for(path: Path) -> Importer:
    """The importer for an experiment file: it may import, unless the file is in a run folder."""
    if any((path.parent / name).exists() for name in RUN_FOLDER_FILES):  # guard: run-folder-imports-nothing
        return Importer(refusal=f"{path.parent} is a run folder. If you trust {path.name}, copy it next to the module")
    return Importer(path.parent, refusal="")


def user_networks(tree: Table, importer: Importer) -> tuple[dict[str, Callable[..., Parts]], list[Problem]]:
    """The network that a configuration names as `module:function` for its task, and what is wrong with the name."""
    task = tree.get("task")
    name = task.get("model") if isinstance(task, Mapping) else None
    if not isinstance(name, str) or ":" not in name:
        return {}, []
    try:
        return {name: importer.network(name)}, []
    except BadInput as error:
        return {}, [Problem(("task", "model"), str(error))]


def user_classes(tree: Table, importer: Importer) -> tuple[dict[str, type], dict[str, type], list[Problem]]:
    """The methods and the tasks that a configuration names as `module:Class`, and what is wrong with those names."""
    by_kind: dict[str, dict[str, type]] = {"method": {}, "task": {}}
    problems = []
    for kind, classes in by_kind.items():
        for key, name in _names(tree.get(kind), (kind,)):
            try:
                classes[name] = importer.class_of(name, kind)
            except BadInput as error:
                problems.append(Problem(key, str(error)))
    return by_kind["method"], by_kind["task"], problems


def import_folders(instances: Iterable[Any]) -> list[str]:
    """The folders from which another process can import the classes of these settings and of their bases."""
    folders = []
    for instance in instances:
        cls = instance if isinstance(instance, FunctionType) else type(instance)
        folder = _import_folder(cls.__module__)
        if folder is not None:
            folders.append(str(folder))
        if hasattr(instance, "base"):
            folders += import_folders([instance.base])
    return list(dict.fromkeys(folders))


def loaded_from(folder: Path) -> dict[str, bytes]:
    """The source files of the modules that were imported from a folder, by their names below it."""
    modules = [name for name in list(sys.modules) if _import_folder(name) == folder]
    files = [Path(str(sys.modules[name].__file__)) for name in modules]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files if file.suffix == ".py"}


def _import_folder(name: str) -> Path | None:
    """The folder that a loaded module was found in, or that the package was that it belongs to."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if not file or name == "__main__" or not Path(file).is_file():  # torch has modules whose files do not exist
        return None
    return Path(file).absolute().parents[name.count(".") + (Path(file).name == "__init__.py")]


def _names(table: Any, key: Key) -> Iterator[tuple[Key, str]]:
    """The names with a colon in a section and in the `base` sections inside it."""
    while isinstance(table, Mapping):
        name = table.get("name")
        if isinstance(name, str) and ":" in name:
            yield (*key, "name"), name
        table, key = table.get("base"), (*key, "base")


def _check_class(cls: type, kind: str, place: str) -> None:
    """Refuses a class that cannot be filled from a section of settings."""
    name = cls.__name__
    if kind == "method" and not issubclass(cls, Method):
        raise BadInput(f"{name} in {place} is not a method: derive it from protofed.Method or one of its families")
    if kind == "task" and not callable(getattr(cls, "build", None)):
        raise BadInput(f"{name} in {place} is not a task: it needs a method build() that returns a protofed.Task")
    if not is_dataclass(cls) or not cls.__dataclass_params__.frozen or _has_undeclared_fields(cls):  # type: ignore[attr-defined]
        raise BadInput(f"{name} in {place} is not a frozen dataclass: put @dataclass(frozen=True) above it")
    if isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise BadInput(f"{name} in {place} lacks {missing}")
    if "name" in field_names(cls):
        raise BadInput(f"{name} in {place} has a setting called name, which names the class itself: rename it")
    try:
        schema_of(cls)
    except Exception as error:
        raise BadInput(f"the types of {name} in {place} cannot be read: {type(error).__name__}: {error}") from error


def _has_undeclared_fields(cls: type) -> bool:
    """Whether a subclass of a dataclass has annotations but no decorator of its own, so that they are no fields."""
    return "__dataclass_fields__" not in vars(cls) and bool(vars(cls).get("__annotations__"))


def _place(module: ModuleType) -> str:
    return f"the module {module.__name__} ({getattr(module, '__file__', None) or 'built in'})"


def _import_failure(name: str, error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{last.filename}, line {last.lineno}"
    if isinstance(error, SyntaxError) and error.filename:
        where = f"{error.filename}, line {error.lineno}"
    return f"the module {name!r} cannot be imported: {type(error).__name__}: {error} ({where})"
