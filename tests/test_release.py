"""What a release needs: one version everywhere, a citation that tools can read, and a package with every module."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from shutil import copy, copytree, ignore_patterns
from typing import Any

import pytest

from protofed.version import __version__

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
CFF_REFERENCE_TYPES = {"article", "conference-paper"}
"""Those of the Citation File Format 1.2.0 that are in use here."""


def citation() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    return dict(yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8")))


def test_the_newest_version_in_the_changelog_is_this_one() -> None:
    headings = re.findall(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == __version__
    assert headings == sorted(headings, key=lambda version: [int(part) for part in version.split(".")], reverse=True)


def test_the_citation_is_of_this_version_and_licence() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    cited = citation()
    assert cited["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= cited.keys(), "the format requires them"
    assert str(cited["version"]) == __version__
    assert cited["license"] == project["license"]
    assert cited["authors"] == project["authors"]


def test_the_citation_names_the_paper_of_each_of_the_four_methods() -> None:
    notes = {}
    for reference in citation()["references"]:
        assert reference["type"] in CFF_REFERENCE_TYPES
        assert all(author.keys() >= {"family-names", "given-names"} for author in reference["authors"])
        notes[reference["notes"].split("`")[1]] = reference
    assert notes.keys() == {"fpl", "fedseproto", "fedpc", "pfedcspc"}
    for method, reference in notes.items():
        folder, module = (
            SOURCE / "protofed/methods" / method / "__init__.py",
            SOURCE / "protofed/methods" / f"{method}.py",
        )
        docstring = " ".join((module if module.exists() else folder).read_text(encoding="utf-8")[:1000].split())
        assert reference["title"] in docstring
        assert ", ".join(author["family-names"] for author in reference["authors"]) in docstring
        assert str(reference["year"]) in docstring


def modules() -> set[str]:
    return {str(path.relative_to(SOURCE)) for path in SOURCE.glob("protofed/**/*.py")}


def test_every_folder_of_modules_is_a_package() -> None:
    """setuptools leaves out a folder without __init__.py, and an editable installation hides that."""
    folders = {str(Path(module).parent) for module in modules()}
    assert {folder for folder in folders if f"{folder}/__init__.py" not in modules()} == set()


@pytest.mark.slow
def test_a_wheel_has_every_module_and_the_command(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", "77")
    source = tmp_path / "checkout"  # a build writes beside its sources
    copytree(SOURCE, source / "src", ignore=ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        copy(ROOT / name, source)
    words = ["wheel", ".", "--no-deps", "--no-build-isolation", "--quiet", "-w", tmp_path]
    subprocess.run([sys.executable, "-m", "pip", *words], cwd=source, check=True, timeout=600)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"protofed-{__version__}-")
    with zipfile.ZipFile(wheel) as content:
        names = set(content.namelist())
        commands = content.read(f"protofed-{__version__}.dist-info/entry_points.txt").decode()
    assert modules() <= names
    assert "protofed/py.typed" in names
    assert "protofed = protofed.cli.start:main" in commands
    assert not [name for name in names if not name.startswith(("protofed/", "protofed-"))]
