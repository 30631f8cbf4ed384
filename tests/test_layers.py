"""The architecture as rules on imports, and the calls that no source file may hold."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from protofed.cli.app import app

SOURCE = Path(__file__).parent.parent / "src"

LAYERS = [
    {"tree"},
    {"nn", "data", "optim", "metrics"},
    {"api"},
    {"prototypes", "methods", "kernels", "datasets", "transforms", "privacy"},
    {"runtimes", "tasks"},
    {"engine"},
    {"evaluation"},
    {"testing"},
    {"runs", "models"},
    {"federation"},
    {"reports", "inspection"},
    {"cli"},
]
FREE = {"errors", "one_run", "printable", "seeds", "stop_signals", "version", "wire"}
"""What every layer may import."""

FILES = sorted(SOURCE.rglob("*.py"))
assert FILES, SOURCE


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported(code: ast.AST) -> Iterator[str]:
    """Full names of all that is imported, also inside functions."""
    for node in ast.walk(code):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_of(path: Path) -> str:
    """The word after `protofed`: a module or a package; '' for the package itself."""
    words = path.relative_to(SOURCE / "protofed").with_suffix("").parts
    return "" if words == ("__init__",) else words[0]


def own_imports(path: Path) -> set[str]:
    names = (name.split(".") for name in imported(parsed(path)))
    return {words[1] for words in names if words[0] == "protofed" and len(words) > 1}


def level(module: str) -> int:
    found = [i for i, layer in enumerate(LAYERS) if module in layer]
    assert found, f"protofed.{module} is in no layer: say in LAYERS where it belongs"
    return found[0]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_module_imports_from_its_own_and_earlier_layers_only(path: Path) -> None:
    module = module_of(path)
    others = own_imports(path) - FREE - {module}
    if module in ("version", "errors", "printable", "seeds"):
        assert not others, f"{path.name} is for everyone, and so may need nobody"
    elif not module:  # the package itself offers what users need, but not the command line
        assert "cli" not in others
    elif module == "wire":
        assert others <= {"tree"}
    else:
        late = {other for other in others if level(other) > level(module)}
        assert not late, f"{path} imports from later layers: {sorted(late)}"


def test_the_rule_sees_the_imports_there_are() -> None:
    assert own_imports(SOURCE / "protofed/api/contexts.py") >= {"data", "nn", "optim", "tree", "seeds"}
    assert own_imports(SOURCE / "protofed/wire.py") == {"tree"}


def test_methods_never_import_a_runtime() -> None:
    files = [path for path in FILES if module_of(path) == "methods"]
    assert files
    assert not any("runtimes" in own_imports(path) for path in files)


BANNED_MODULES = {
    *("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"),
    *("tarfile", "zipfile", "zipimport"),  # users unpack archives themselves: one that is not opened cannot escape
    "multiprocessing",  # its pipes and queues carry pickles
    "ray",  # so do its tasks
}
BANNED_BUILTINS = {"eval", "exec", "compile", "__import__"}
BANNED_CALLS = {
    *("torch.load", "torch.save", "torch.jit.load", "torch.hub.load", "torch.multiprocessing", "pandas.read_pickle"),
    *("concurrent.futures.ProcessPoolExecutor", "concurrent.futures.process.ProcessPoolExecutor"),
    *("os.system", "os.popen", "shutil.unpack_archive", "tempfile.mktemp"),
}
SAFE_SWITCHES = {"shell": "False", "allow_pickle": "False", "trust_remote_code": "False"}
ALLOWED = {
    "__init__.py": (
        {"import_module(module), which data may name"},
        "only modules that the package itself lists",
    ),
    "api/registry.py": (
        {"import_module(source.module), which data may name"},
        "only modules that a registry lists, or that were found in the package's own folder",
    ),
    "runs/config/user_classes.py": (
        {"importlib.import_module(name), which data may name"},
        "only names in an experiment file or --set that the user gives, never in a run folder",
    ),
    "runtimes/workers.py": (
        {"import multiprocessing"},
        "waits for the pipes of its own forks",
    ),
    "runtimes/worker_process.py": (
        {"import multiprocessing"},
        "a pipe between a process and its own fork, open to nobody else",
    ),
    "runs/sweep.py": (
        {"import multiprocessing"},
        "the type of an event",
    ),
    "runs/run_process.py": (
        {"import multiprocessing", "concurrent.futures.ProcessPoolExecutor"},
        "a pipe between a process and those that it started itself, open to nobody else",
    ),
    "runs/sweep_log.py": (
        {"import multiprocessing"},
        "a queue between a process and those that it started itself, open to nobody else",
    ),
    "runs/ray_sweep.py": (
        {"import ray"},
        "only with --ray, which names a cluster that the user trusts; what it gives back is checked before it is used",
    ),
}
"""The exceptions, by file, and the reason for each."""


def faults(code: ast.Module) -> Iterator[str]:
    """What could run code that comes with data, or a shell, or write beyond a folder."""
    aliases = {}
    for node in ast.walk(code):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            aliases |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for name in imported(code):
        if name.split(".")[0] in BANNED_MODULES:
            yield f"import {name.split('.')[0]}"
        if name in BANNED_CALLS:
            yield name
    for node in ast.walk(code):
        if isinstance(node, ast.Attribute | ast.Name):
            words = ast.unparse(node).split(".")
            full = ".".join([aliases.get(words[0], words[0]), *words[1:]])
            if full in BANNED_CALLS or full in BANNED_BUILTINS:
                yield full
        if isinstance(node, ast.keyword) and ast.unparse(node.value) != SAFE_SWITCHES.get(
            str(node.arg), ast.unparse(node.value)
        ):
            yield ast.unparse(node)
        is_import = isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "import_module"
        if is_import and not (node.args and isinstance(node.args[0], ast.Constant)):
            yield f"{ast.unparse(node)}, which data may name"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_nothing_can_run_what_comes_as_data(path: Path) -> None:
    """Row S7; that no archive is opened is row D3's."""
    allowed, _ = ALLOWED.get(path.relative_to(SOURCE / "protofed").as_posix(), (set[str](), ""))
    assert set(faults(parsed(path))) == allowed


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import joblib.hashing",
        "def f():\n    import yaml",
        "import torch\ntorch.load('x')",
        "import torch as t\nt.load('x')",
        "from torch import load\nload('x')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "eval('1')",
        "run = exec",
        "import subprocess\nsubprocess.run('x', shell=True)",
        "import os\nos.system('x')",
        "import marshal, cloudpickle",
        "import dill, shelve",
        "import torch\ntorch.save({}, 'x')",
        "from torch import save as keep\nkeep({}, 'x')",
        "import torch\ntorch.jit.load('x')",
        "import numpy as np\nnp.load('x', allow_pickle=switch)",
        "import tarfile",
        "from zipfile import ZipFile",
        "import shutil\nshutil.unpack_archive('x')",
        "from shutil import unpack_archive",
        "import tempfile\ntempfile.mktemp()",
        "import multiprocessing.connection",
        "from concurrent.futures import ProcessPoolExecutor\nProcessPoolExecutor()",
        "__import__(name)",
        "import importlib\nimportlib.import_module(name)",
        "from importlib import import_module\nimport_module(f'{x}')",
        "load_dataset('x', trust_remote_code=True)",
    ],
)
def test_the_ban_sees_what_it_bans(code: str) -> None:
    assert list(faults(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "from safetensors.torch import load\nload(b'')",
        "model.eval()",
        "import re\nre.compile('x')",
        "import numpy as np\nnp.load('x', allow_pickle=False)",
        "import importlib\nimportlib.import_module('pyarrow')",
        "import tempfile\ntempfile.TemporaryDirectory()",
        "from concurrent.futures import ThreadPoolExecutor\nThreadPoolExecutor()",
        "from safetensors.torch import save\nsave({})",
        "f(timeout=True)",
    ],
)
def test_the_ban_lets_harmless_code_pass(code: str) -> None:
    assert not list(faults(ast.parse(code)))


def loaded_by(code: str) -> set[str]:
    """The modules that are loaded when a process ends that ran this code."""
    names = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr))"
    command = [sys.executable, "-c", f"{names}\n{code}"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(ended.stderr.splitlines()[-1].split())


def test_importing_protofed_loads_nothing_slow() -> None:
    loaded = loaded_by("import protofed; from protofed.methods import METHODS; list(METHODS)")
    assert "protofed.api.registry" in loaded
    assert not loaded & {"torch", "numpy", "pydantic"}


def test_a_run_loads_no_slow_library_that_few_runs_need() -> None:
    code = "import protofed; protofed.run('fedavg', 'minidigits', rounds=1, epochs=1, runtime='sequential')"
    loaded = loaded_by(code)
    assert "torch" in loaded
    assert not loaded & {"sklearn", "scipy.stats", "pandas", "matplotlib", "typer", "protofed.methods.fpl"}


COMMANDS = (
    *("run", "show", "serve", "compare", "report", "watch", "list", "analyse", "export", "predict", "evaluate", "demo"),
    *("methods", "tasks", "data", "federation", "site"),
)
GROUPS = ("data", "federation", "site")
QUICK = [
    *(["--help"], ["--version"], ["methods"], ["methods", "--tag", "core", "--json"], ["tasks"], ["tasks", "--json"]),
    *([name, "--help"] for name in COMMANDS),
    ["data", "inspect", "--help"],
    *(["federation", name, "--help"] for name in ("init", "enrol", "renew", "status")),
    *(["site", name, "--help"] for name in ("key", "check", "run")),
]


@pytest.mark.parametrize("words", QUICK, ids=" ".join)
def test_help_and_lists_do_not_wait_for_torch(words: list[str]) -> None:
    loaded = loaded_by(f"import sys; sys.argv[1:] = {words}; from protofed.cli.app import main; main()")
    assert "protofed.cli.app" in loaded
    assert not loaded & {"torch", "numpy"}


def test_every_command_is_among_those() -> None:
    shown = {words[0] for words in QUICK if words[-1] == "--help"} - {"--help"}
    commands = [command for command in app.registered_commands if command.callback]
    assert shown == {*(one.name or one.callback.__name__ for one in commands if one.callback), *GROUPS}


SHARED_BY_METHODS = {"families", "_shared"}


def test_no_method_imports_another_method() -> None:
    """The one exception: a wrapper goes around FedAvg unless told otherwise."""
    root = SOURCE / "protofed/methods"
    for path in (p for p in root.rglob("*.py") if p != root / "__init__.py"):
        module = path.relative_to(root).with_suffix("").parts[0]
        names = (name.split(".") for name in imported(parsed(path)))
        others = {words[2] for words in names if words[:2] == ["protofed", "methods"]} - SHARED_BY_METHODS - {module}
        allowed = {"fedavg"} if '"wrapper"' in path.read_text(encoding="utf-8") else set()
        assert others <= allowed, f"{path.name} imports {sorted(others - allowed)}: move what both need to _shared"
