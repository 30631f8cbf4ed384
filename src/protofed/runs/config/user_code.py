"""A digest of the user's own code, so that a result of code that was edited since is never taken for one of the new.

A module that is a file counts as a whole, with all modules of the user's own that it imports. What was defined in the
main script or in a notebook counts by itself, with what it refers to there: other cells and lines may change.
"""

import ast
import hashlib
import site
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from importlib.machinery import PathFinder
from importlib.util import resolve_name
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import protofed
from protofed.errors import BadInput
from protofed.tasks.models import Network, NetworkOfClient

Plain = None | bool | int | float | complex | str | bytes

_FIRST_SEEN: dict[str, str] = {}
"""The digest of each file when it was first looked at. Python does not read a module again."""


def code_digest(objects: Iterable[Any]) -> str:
    """A digest of the source of these classes and functions. Empty if they are all protofed's."""
    seen: dict[str, str] = {}
    for one in objects:
        _add(one, seen)
    return _hash("\n".join(f"{name} {digest}" for name, digest in sorted(seen.items()))) if seen else ""


def model_code(model: Any) -> list[Any]:
    """What builds the networks of a task, if it is the user's own."""
    match model:
        case Network():
            return [model.build] if model.build else []
        case NetworkOfClient(networks):
            return [one.build for one in networks.values() if one.build]
    return [model]


def _add(one: Any, seen: dict[str, str]) -> None:
    """Adds a class or function."""
    while isinstance(one, partial | MethodType):
        if isinstance(one, partial):
            _note(seen, f"arguments of {_name(one.func)}", repr([a for a in one.args if _is_plain(a)]))
        one = one.func if isinstance(one, partial) else one.__func__
    if not isinstance(one, type | FunctionType):
        one = type(one)
    module = sys.modules.get(one.__module__)
    if _is_ours(one.__module__) or one.__module__ == "builtins":
        return
    if module is not None and one.__module__ != "__main__" and getattr(module, "__file__", None):
        _add_module(module, seen)
    elif f"{one.__module__}:{one.__qualname__}" not in seen:
        _add_object(one, seen)


def _add_module(module: ModuleType, seen: dict[str, str]) -> None:
    file, name = Path(str(module.__file__)), module.__name__  # the place of a file does not count: code may move
    if name in seen:
        return
    content = file.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    seen[name] = digest
    if _FIRST_SEEN.setdefault(str(file), digest) != digest:  # guard: edited-module-needs-new-process
        raise BadInput(
            f"{file} has changed since Python loaded it, and what would run is the old code: start a new process, or "
            "restart the kernel of the notebook"
        )
    if file.suffix == ".py":
        for other in _imported(module, content):
            if _is_own(other, module):
                _add_module(other, seen)


_PARSER = threading.Lock()


def _parsed(content: bytes) -> ast.Module:
    with (
        _PARSER
    ):  # Python 3.11 counts the depth of all threads together, and raises SystemError where two parse at once
        return ast.parse(content)


def _imported(module: ModuleType, content: bytes) -> Iterator[ModuleType]:
    """The modules that a file imports, also inside functions, as far as they are loaded or lie beside it."""
    names: set[str] = set()
    for node in ast.walk(_parsed(content)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = module.__spec__.parent if module.__spec__ else ""
            base = resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    wholes = {".".join(one.split(".")[: k + 1]) for one in names for k in range(one.count(".") + 1)}
    for name in sorted(wholes):
        found = sys.modules.get(name) or _not_loaded(name, module)
        if found is not None:
            yield found


def _not_loaded(name: str, beside: ModuleType) -> ModuleType | None:
    """A module that is only imported when a function is called; it is looked at, not run."""
    if "." in name:
        return None
    spec = PathFinder.find_spec(name, [str(Path(str(beside.__file__)).parent), *sys.path])
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return None
    made = ModuleType(name)
    made.__file__, made.__spec__ = spec.origin, spec
    return made


def _is_own(module: ModuleType, importer: ModuleType) -> bool:
    """Whether a module is the user's: neither Python's nor one that was installed, unless it is of the same package."""
    file = getattr(module, "__file__", None)
    if not file or _is_ours(module.__name__) or not Path(file).is_file():
        return False
    if module.__name__.partition(".")[0] == importer.__name__.partition(".")[0]:
        return True
    return not any(Path(file).is_relative_to(folder) for folder in _INSTALLED)


_INSTALLED = {
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *map(Path, [*site.getsitepackages(), site.getusersitepackages()]),
    Path(str(protofed.__file__)).parent,
}


def _is_ours(name: str) -> bool:
    return name == "protofed" or name.startswith("protofed.")


# ---- what has no file of its own: the main script, cells of a notebook


def _add_object(one: type | FunctionType, seen: dict[str, str]) -> None:
    key = f"{one.__module__}:{one.__qualname__}"
    seen[key] = ""
    if isinstance(one, FunctionType):
        seen[key] = _hash(_function(one, seen))
        return
    facts = []
    for name, value in sorted(vars(one).items()):
        inner = getattr(value, "__func__", getattr(value, "fget", value))
        if isinstance(inner, FunctionType):
            facts.append(f"{name} {_function(inner, seen)}")
        elif _is_plain(value) and name not in ("__doc__", "__firstlineno__"):
            facts.append(f"{name} {value!r}")
    seen[key] = _hash("\n".join(facts))
    for base in one.__bases__:
        _add(base, seen)


def _function(function: FunctionType, seen: dict[str, str]) -> str:
    """What a function does, as text; what it refers to is added."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    for name in sorted(_names(function.__code__)):
        if name in function.__globals__:
            _refer(name, function.__globals__[name], seen)
    for value in cells:
        if isinstance(value, type | FunctionType):
            _add(value, seen)
    given = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *cells]
    return f"{_code(function.__code__)} {[value for value in given if _is_plain(value)]!r}"


def _refer(name: str, value: Any, seen: dict[str, str]) -> None:
    """Adds a global that a function names."""
    if isinstance(value, ModuleType):
        if _is_own(value, sys.modules["__main__"]):
            _add_module(value, seen)
    elif isinstance(value, type | FunctionType):
        module = sys.modules.get(value.__module__)
        if module is None or value.__module__ == "__main__" or _is_own(module, sys.modules["__main__"]):
            _add(value, seen)
    elif _is_plain(value):
        _note(seen, f"constant {name}", repr(value))


def _code(code: CodeType) -> str:
    """The instructions and constants of a piece of code, without its place."""
    constants = [_code(one) if isinstance(one, CodeType) else repr(one) for one in code.co_consts]
    return repr((code.co_code.hex(), constants, code.co_names, code.co_varnames))


def _names(code: CodeType) -> set[str]:
    inner = (_names(one) for one in code.co_consts if isinstance(one, CodeType))
    return {*code.co_names}.union(*inner)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _is_plain(value: Any) -> bool:
    """Whether a value is its repr."""
    if isinstance(value, tuple | list | frozenset):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(_is_plain(key) and _is_plain(inner) for key, inner in value.items())
    return isinstance(value, Plain)


def _note(seen: dict[str, str], key: str, text: str) -> None:
    seen[key] = _hash(text)


def _name(one: Any) -> str:
    return f"{getattr(one, '__module__', '')}:{getattr(one, '__qualname__', '')}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
