"""What the numbers of a record are. A record's field says so by annotation, and what checks uploads goes by it:

    num_examples: Annotated[Tensor, Count()]

A role holds for everything below its field, unless a record further down says otherwise. Names of fields mean nothing.
"""

from dataclasses import dataclass, is_dataclass
from functools import cache
from typing import Annotated, get_args, get_origin, get_type_hints

from torch import Tensor

from protofed.tree import Tree


@dataclass(frozen=True)
class Count:
    """Whole numbers, not negative."""

    of_examples: bool = True
    """Whether they count the client's training examples: then no client can have more than it declared."""


@dataclass(frozen=True)
class Label:
    """Classes, 0 to C − 1."""


@dataclass(frozen=True)
class Weights:
    """A network's weights, by name."""


@dataclass(frozen=True)
class PerClass:
    """What is said of each class, (C, ...), or (C · S, ...) with S rows for each class: zero where it is absent."""

    counted_by: str = "count"
    """The field of the same record that says how much is behind each row."""
    is_shared: bool = True
    """Whether the server makes something of it for others; False where it only decides about the client itself."""


@dataclass(frozen=True)
class Prototype(PerClass):
    """A vector for each class, (C, D) or (C · S, D)."""


Role = Count | Label | Weights | PerClass


def counted_by(path: str, role: PerClass) -> str:
    """The path of the counts behind what is at a path."""
    return f"{path.rpartition('/')[0]}/{role.counted_by}".removeprefix("/")


def roles(value: Tree) -> dict[str, Role]:
    """The role of every leaf that has one, by its path as in `tree.named_leaves`."""
    found: dict[str, Role] = {}
    _collect(value, "", None, found)
    return found


def _collect(value: Tree, path: str, role: Role | None, found: dict[str, Role]) -> None:
    if isinstance(value, Tensor):
        if role is not None:
            found[path[:-1]] = role
    elif is_dataclass(value):
        own = _of_fields(value.__class__)
        for name in value.__dataclass_fields__:
            _collect(getattr(value, name), f"{path}{name}/", own.get(name, role), found)
    elif isinstance(value, dict):
        for key, child in value.items():
            _collect(child, f"{path}{key}/", role, found)
    elif isinstance(value, list | tuple):
        for i, child in enumerate(value):
            _collect(child, f"{path}{i}/", role, found)


@cache
def _of_fields(cls: type) -> dict[str, Role]:
    hints = get_type_hints(cls, include_extras=True)
    annotated = {name: get_args(hint)[1:] for name, hint in hints.items() if get_origin(hint) is Annotated}
    return {name: one for name, words in annotated.items() for one in words if isinstance(one, Role)}
