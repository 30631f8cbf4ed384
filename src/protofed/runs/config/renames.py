"""Keys and values of configuration files that version 0.2 renamed. Old ones get an error that names the new one."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from protofed.errors import BadInput
from protofed.runs.config.schema import Problem
from protofed.runs.config.toml import Table
from protofed.runs.config.toml_locations import Key


@dataclass(frozen=True)
class Renamed:
    key: Key
    new: str
    """The new last word of the key, or the new value."""
    value: str | None = None
    """The old value; None if the key itself was renamed."""

    @property
    def what(self) -> str:
        if self.value is None:
            return f"was renamed in version 0.2: write {'.'.join((*self.key[:-1], self.new))}"
        return f'"{self.value}" was renamed in version 0.2: write {self.key[-1]} = "{self.new}"'


RENAMED = (
    Renamed(("training", "on_divergence"), value="halve", new="retry_half_lr"),
    Renamed(("task", "name"), value="own", new="custom"),
    Renamed(("task", "local_tests"), value="alike", new="proportional"),
    Renamed(("method", "intra_weighting"), new="weighting"),
)
"""All renames. A new one is added here and nowhere else."""


def renamed(tree: Table) -> Iterator[Problem]:
    """A problem for every old key and value in the tree."""
    for rename in RENAMED:
        is_there, value = _lookup(tree, rename.key)
        if is_there and rename.value in (None, value):
            yield Problem(rename.key, rename.what)


def refuse_run_of_old_version(config: Table, environment: Table, folder: str) -> None:
    """Refuses a run folder of version 0.1. Its environment.json does not record the runtime. If that file is gone, old
    settings tell."""
    if "runtime" not in environment if environment else any(renamed(config)):
        raise BadInput(
            f"{folder} was made by protofed 0.1, whose runs this version can neither continue nor show: "
            "use protofed 0.1 for it, or start the run again in another folder"
        )


def _lookup(tree: Any, key: Key) -> tuple[bool, Any]:
    for word in key:
        if not isinstance(tree, dict) or word not in tree:
            return False, None
        tree = tree[word]
    return True, tree
