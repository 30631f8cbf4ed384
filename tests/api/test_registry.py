"""Methods are found in their folder, imported when asked for, and listed as their files say."""

import subprocess
import sys
from pathlib import Path

import pytest

import protofed
from protofed.api.describe import about
from protofed.api.registry import GROUPS, MethodRegistry, Registry
from protofed.methods import METHODS, bases_of
from protofed.tasks import TASKS

ROOT = Path(__file__).parent.parent.parent

MODULE = '''"""{title}.

Somebody: Something, {venue}.

Sends: weights.
"""

from dataclasses import dataclass

from protofed.methods.fedavg import FedAvg


@dataclass(frozen=True)
class {name}(FedAvg):
    tags = {tags}


class Helper:
    pass
'''


def package(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, modules: dict[str, str]) -> MethodRegistry:
    """A package of methods in a folder outside protofed."""
    (folder / name).mkdir()
    for module, code in modules.items():
        path = folder / name / module
        path.parent.mkdir(exist_ok=True)
        path.write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    return MethodRegistry(name, folder / name)


def output_of(code: str) -> str:
    environment = {"PYTHONPATH": str(ROOT / "src"), "PATH": ""}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    ).stdout


def test_a_file_in_the_folder_is_all_that_a_method_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {
        "__init__.py": "",
        "new_one.py": MODULE.format(title="New", venue="ICML 2020", name="NewOne", tags=("global",)),
        "helpers.py": "class Helper:\n    pass\n",
        "_hidden.py": MODULE.format(title="Hidden", venue="ICML 2020", name="Hidden", tags=("global",)),
    }
    registry = package(tmp_path, monkeypatch, "some_methods", modules)
    assert list(registry) == ["new_one"]
    assert registry["new_one"].__name__ == "NewOne"
    assert "helpers" not in registry
    with pytest.raises(KeyError):
        registry["helpers"]


def test_a_method_may_be_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {
        "__init__.py": "",
        "large/__init__.py": MODULE.format(title="Large", venue="ICML 2020", name="Large", tags=("global",)),
        "large/losses.py": "",
    }
    registry = package(tmp_path, monkeypatch, "packaged_methods", modules)
    assert list(registry) == ["large"]
    assert registry["large"].__name__ == "Large"


def test_what_a_module_imports_from_another_is_not_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {
        "__init__.py": "",
        "a.py": MODULE.format(title="A", venue="ICML 2020", name="A", tags=("global",)),
        "ab.py": "from borrowed_methods.a import A\n",
    }
    assert list(package(tmp_path, monkeypatch, "borrowed_methods", modules)) == ["a"]


def test_two_methods_in_one_module_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = MODULE.format(title="A", venue="ICML 2020", name="A", tags=("global",))
    code += "\n\n@dataclass(frozen=True)\nclass B(A):\n    tags = ('global',)\n"
    registry = package(tmp_path, monkeypatch, "double_methods", {"__init__.py": "", "a.py": code})
    with pytest.raises(TypeError, match=r"double_methods\.a has more than one method \(A, B\)"):
        list(registry)


def test_methods_are_listed_by_group_then_year_then_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {
        "a": ("personal", "ICML 2015"),
        "b": ("global", "AISTATS 2017"),
        "c": ("global", "arXiv:1912.00818, 2016"),
        "d": ("core", "ECAI 2024"),
        "e": ("global", "a venue"),
        "f": ("global", "Journal 143, 2017"),
    }
    modules = {
        f"{name}.py": MODULE.format(title=name, venue=venue, name=name.upper(), tags=(tag,))
        for name, (tag, venue) in facts.items()
    }
    registry = package(tmp_path, monkeypatch, "ordered_methods", {"__init__.py": "", **modules})
    assert list(registry) == ["d", "e", "c", "b", "f", "a"]
    assert registry.groups()["one model for all"] == ["e", "c", "b", "f"]


def test_every_method_is_in_one_group_and_those_of_a_group_stand_together() -> None:
    assert [name for names in METHODS.groups().values() for name in names] == list(METHODS)
    assert all(METHODS.groups().values())
    assert METHODS.groups()[GROUPS["core"]] == ["fpl", "fedseproto", "pfedcspc", "fedpc"]
    assert METHODS.source("fedproto").group == "a model for each client"
    assert METHODS.source("ccvr").group == "around another method"


def test_every_file_of_the_folder_that_describes_a_method_is_one() -> None:
    folder = ROOT / "src" / "protofed" / "methods"
    files = {path.stem: path for path in folder.glob("*.py")}
    files |= {path.parent.name: path for path in folder.glob("*/__init__.py")}
    described = {name for name, path in files.items() if "\nSends: " in path.read_text(encoding="utf-8")}
    assert described == set(METHODS)


@pytest.mark.parametrize("registry", [METHODS, TASKS], ids=["methods", "tasks"])
def test_what_is_read_from_a_file_is_what_the_class_says(registry: Registry[object]) -> None:
    for name, cls in registry.items():
        source = registry.source(name)
        assert (source.module, source.name) == (cls.__module__, cls.__name__)
        assert source.summary == about(cls).split("\n\n")[0]
        assert source.tags == getattr(cls, "tags", ())


def test_every_method_says_what_kind_it_is() -> None:
    assert [name for name, method in METHODS.items() if not {"global", "personal"} & set(method.tags)] == []


def test_only_wrappers_have_bases() -> None:
    assert {name for name, method in METHODS.items() if bases_of(method)} == {
        name for name, method in METHODS.items() if "wrapper" in method.tags
    }


def test_the_package_offers_every_method_and_no_more() -> None:
    classes = {method.__name__ for method in METHODS.values()}
    assert classes <= set(protofed.__all__)
    assert classes <= set(dir(protofed))
    assert {name: getattr(protofed, method.__name__) for name, method in METHODS.items()} == dict(METHODS)
    assert all(hasattr(protofed, name) for name in protofed.__all__)
    with pytest.raises(AttributeError, match="no attribute 'FedAvgg'"):
        protofed.FedAvgg  # type: ignore[attr-defined]  # noqa: B018


def test_a_method_is_imported_when_it_is_asked_for() -> None:
    code = """
import sys, protofed
def methods(): return sorted(n.rpartition(".")[2] for n in sys.modules if n.startswith("protofed.methods.fe"))
print(methods(), protofed.FedAvg.__name__, methods(), protofed.METHODS["fedprox"].__name__, "moon" in methods())
"""
    assert output_of(code).strip() == "[] FedAvg ['fedavg'] FedProx False"


@pytest.mark.slow
def test_type_checkers_see_the_methods_and_report_names_that_do_not_exist(tmp_path: Path) -> None:
    user = tmp_path / "user.py"
    user.write_text(
        "import protofed\nfrom protofed import METHODS, FedAvg\n\n\n"
        "class Mine(FedAvg):\n    pass\n\n\n"
        "method: protofed.Method[object, object, object, object] = METHODS['fpl']()\n"
        "protofed.FPL(temperature='warm')\nprotofed.FedAvgg\n",
        encoding="utf-8",
    )
    mypy = [sys.executable, "-m", "mypy", "--strict", f"--cache-dir={tmp_path / 'cache'}", str(user)]
    environment = {"MYPYPATH": str(ROOT / "src"), "PATH": ""}
    found = subprocess.run(mypy, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    lines = [line.split(": error: ")[0] for line in found.stdout.splitlines() if line.startswith("user.py:")]
    assert lines == ["user.py:10", "user.py:11"], found.stdout
