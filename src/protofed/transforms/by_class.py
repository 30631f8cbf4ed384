"""What an upload says of each class, found by roles, and how classes are taken out of it."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from protofed import tree
from protofed.api.roles import PerClass, Prototype, counted_by, roles
from protofed.tree import Tree


@dataclass(frozen=True)
class ClassRows:
    """The leaves of one record that say something of each class, by their paths in the upload."""

    count: str
    """How much is behind each row."""
    prototypes: tuple[str, ...]
    others: tuple[str, ...]
    is_shared: bool
    """Whether the server makes something of them for other clients."""

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.count, *self.prototypes, *self.others)


def class_rows(upload: Tree) -> list[ClassRows]:
    """All that an upload says of classes, record by record."""
    leaves, found = tree.named_leaves(upload), dict[str, dict[str, PerClass]]()
    for path, role in roles(upload).items():
        if isinstance(role, PerClass):
            count = counted_by(path, role)
            found.setdefault(count if count in leaves else path, {})[path] = role
    return [
        ClassRows(
            count,
            tuple(path for path, role in named.items() if isinstance(role, Prototype)),
            tuple(path for path, role in named.items() if not isinstance(role, Prototype)),
            any(role.is_shared for role in named.values()),
        )
        for count, named in found.items()
    ]


def owned(upload: Mapping[str, Tensor], rows: ClassRows, num_classes: int) -> Tensor:
    """The classes that an upload has, (C,)."""
    return of_classes(upload[rows.count] != 0, num_classes).any(-1)


def of_classes(leaf: Tensor, num_classes: int) -> Tensor:
    """The rows of a leaf by class, (C, ...): some have several rows for each class, one after another."""
    if leaf.dim() == 0 or len(leaf) % num_classes:
        raise ValueError(f"numbers of {num_classes} classes cannot have the shape {tuple(leaf.shape)}")
    return leaf.reshape(num_classes, -1)


def with_paths(upload: Tree, new: Mapping[str, Tensor]) -> Tree:
    """The upload with other leaves at some paths."""
    return tree.with_leaves(upload, list({**tree.named_leaves(upload), **new}.values()))


def without_classes(upload: Tree, rows: ClassRows, dropped: Tensor) -> Tree:
    """The upload as if its client had no example of the dropped classes (C,)."""
    if not dropped.any():
        return upload
    leaves, kept = tree.named_leaves(upload), dict[str, Tensor]()
    for path in rows.paths:
        leaf = leaves[path]
        kept[path] = of_classes(leaf, len(dropped)).masked_fill(dropped.to(leaf.device)[:, None], 0).reshape(leaf.shape)
    return with_paths(upload, kept)


def too_few(labels: Tensor, num_classes: int, minimum: int) -> Tensor:
    """The classes of which there are fewer examples than the minimum, (C,)."""
    return torch.bincount(labels.flatten(), minlength=num_classes) < minimum


def withheld(upload: Tree, dropped: Tensor) -> Tree:
    """The upload without what it says of the dropped classes (C,), whatever record says it."""
    for rows in class_rows(upload):
        upload = without_classes(upload, rows, dropped)
    return upload
