"""The gate that every upload passes before any method sees it."""

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from protofed import tree
from protofed.method import ClientId
from protofed.runtimes.jobs import Failure, Reason
from protofed.tree import Tree

T = TypeVar("T")

COUNTS = {"count", "num_examples"}
LABELS = {"label"}


def admitted(client: ClientId, upload: Tree, like: T, num_classes: int) -> T | Failure:
    """The upload in the structure of `like`, or why it cannot be aggregated."""
    return Gate(like, num_classes).admitted(client, upload)


class Gate(Generic[T]):
    """Lets uploads in that are like one that is given."""

    def __init__(self, like: T, num_classes: int) -> None:
        self._like = like
        self._num_classes = num_classes
        self._expected = tree.named_leaves(like)
        self._names = dict(zip(self._expected, _field_names(like), strict=True))

    def admitted(self, client: ClientId, upload: Tree) -> T | Failure:
        """The upload in the structure of `like`, or why it cannot be aggregated."""
        try:
            given = tree.named_leaves(upload)
        except (TypeError, ValueError) as error:
            return Failure(client, Reason.KEY_UNEXPECTED, str(error))
        for path in self._expected:
            if path not in given:
                return Failure(client, Reason.KEY_MISSING, f"{path} is missing")
        for path in given:
            if path not in self._expected:
                return Failure(client, Reason.KEY_UNEXPECTED, f"{path} was not asked for")
        for path, leaf in self._expected.items():
            found = _mismatch(given[path], leaf)
            if found:
                return Failure(client, found[0], f"{path}: {found[1]}")
        for path in _doubtful(given, self._names):
            found = _bad_values(given[path], self._names[path], self._num_classes)
            if found:
                return Failure(client, found[0], f"{path}: {found[1]}")
        return tree.with_leaves(self._like, [given[path] for path in self._expected])


def non_finite(client: ClientId, memory: Tree) -> Failure | None:
    """Why what a client would keep is of no use, or None."""
    given = tree.named_leaves(memory)
    for path in _doubtful(given, {}):
        if given[path].is_floating_point() and not torch.isfinite(given[path]).all():
            return Failure(client, Reason.NON_FINITE, f"its memory, {path}, holds values that are not finite")
    return None


def _mismatch(leaf: Any, like: Tensor) -> tuple[Reason, str] | None:
    if not isinstance(leaf, Tensor):
        return Reason.DTYPE_MISMATCH, f"is {type(leaf).__name__}, not a tensor"
    if leaf.layout != torch.strided or leaf.is_meta:
        return Reason.DTYPE_MISMATCH, "is not a dense tensor"
    if leaf.dtype != like.dtype:
        return Reason.DTYPE_MISMATCH, f"is {leaf.dtype}, not {like.dtype}"
    if leaf.shape != like.shape:
        return Reason.SHAPE_MISMATCH, f"has shape {tuple(leaf.shape)}, not {tuple(like.shape)}"
    return None


def _bad_values(leaf: Tensor, name: str | None, num_classes: int) -> tuple[Reason, str] | None:
    if leaf.is_floating_point() and not torch.isfinite(leaf).all():
        return Reason.NON_FINITE, f"holds {int((~torch.isfinite(leaf)).sum())} values that are not finite"
    if name in COUNTS and (leaf < 0).any():
        return Reason.NEGATIVE_COUNT, f"holds {leaf.min().item():g}"
    if name in COUNTS and leaf.is_floating_point() and (leaf != leaf.round()).any():
        return Reason.NON_INTEGER_COUNT, "holds a count that is not a whole number"
    if name in LABELS and ((leaf < 0) | (leaf >= num_classes)).any():
        return Reason.UNKNOWN_CLASS, f"holds a class outside 0..{num_classes - 1}"
    return None


def _doubtful(leaves: Mapping[str, Tensor], names: Mapping[str, str | None]) -> list[str]:
    """Leaves that need a closer look: all that are counted or named, and all if any value is not finite. The largest
    size of a value tells that for all leaves at once; asking each would make a GPU wait for each."""
    floats = [leaf for leaf in leaves.values() if leaf.is_floating_point() and leaf.numel()]
    if floats and not torch.stack([n.double() for n in torch._foreach_norm(floats, torch.inf)]).isfinite().all():
        return list(leaves)
    return [path for path in leaves if names.get(path) in COUNTS | LABELS]


def _field_names(like: Tree) -> list[str | None]:
    """The record's field that each leaf is; None for entries of a dict, whose names belong to the networks."""
    paths, _ = pytree.tree_flatten_with_path(like)
    last = [path[-1] if path else None for path, _ in paths]
    return [key.name if isinstance(key, pytree.GetAttrKey) else None for key in last]
