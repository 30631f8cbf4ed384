"""What a description says, as objects: the same at the server and at every site. Nothing in it is imported or run: a
method is one of METHODS."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

import protofed.methods
from protofed.api.method import Method
from protofed.engine.secure_settings import SecureSettings
from protofed.engine.training import Training
from protofed.errors import BadInput
from protofed.federation.messages import PROTOCOL, Versions
from protofed.methods import METHODS
from protofed.privacy.settings import PrivacySettings
from protofed.runs.config.config import Config
from protofed.runs.config.messages import without_place
from protofed.runs.config.schema import Problems
from protofed.runs.config.sections import REGISTRIES, EvaluationSettings, built
from protofed.runs.config.toml import loaded, section_text
from protofed.transforms.chain import UploadSettings
from protofed.version import __version__

AGREED = ("task", "method", "training", "uploads", "evaluation", "secure", "privacy")
"""The sections that both ends must have alike."""


@dataclass(frozen=True)
class Plan:
    task: Mapping[str, Any]
    """As it is written down: name and settings."""
    method: Method[Any, Any, Any, Any]
    methods: tuple[str, ...]
    """The name of the method, and of those that it goes around."""
    training: Training
    uploads: UploadSettings
    evaluation: EvaluationSettings
    secure: SecureSettings
    privacy: PrivacySettings

    @property
    def is_own_data(self) -> bool:
        """Whether sites read their own files."""
        return self.task.get("name") == "custom" and "path" in self.task


def config_text(config: Config) -> str:
    """The sections that both ends must have alike, as TOML."""
    table = config.resolved()
    return "\n".join(section_text(name, table[name]) for name in AGREED)


def plan_of(text: str) -> Plan:
    """Raises BadInput with all that is wrong."""
    table = loaded(text, "the experiment")
    if set(table) != {*AGREED} or not all(isinstance(section, dict) for section in table.values()):
        raise BadInput(f"the experiment must have the sections {', '.join(AGREED)}, and no others")
    values, problems = {}, []
    for name in AGREED[1:]:
        try:
            values[name] = built(table, name, REGISTRIES)
        except Problems as error:
            problems += [without_place(problem) for problem in error.all]
    if problems:
        raise BadInput("\n".join(problems))
    return Plan(task=table["task"], methods=tuple(_names(table["method"])), **values)


def _names(table: Mapping[str, Any]) -> Iterator[str]:
    yield table["name"]
    if isinstance(base := table.get("base"), Mapping):
        yield from _names(base)


def versions() -> Versions:
    """Of this end."""
    return Versions(PROTOCOL, __version__, torch.__version__.partition("+")[0])


@cache
def method_digests() -> Mapping[str, str]:
    """The SHA-256 of the code of each installed method: its module, or all modules of its package, and those that
    methods share."""
    root = Path(protofed.methods.__file__).parent
    shared = [root / "families.py", *sorted((root / "_shared").rglob("*.py"))]
    return {name: _digest([*_files(root, name), *shared], root) for name in METHODS}


def digest_of_methods(names: tuple[str, ...]) -> str:
    """Of the code of a method and of those that it goes around."""
    known = method_digests()
    return hashlib.sha256(" ".join(known.get(name, "") for name in names).encode()).hexdigest()


def _files(root: Path, name: str) -> list[Path]:
    return sorted((root / name).rglob("*.py")) if (root / name).is_dir() else [root / f"{name}.py"]


def _digest(paths: list[Path], root: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
