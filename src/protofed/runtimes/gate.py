"""The gate that every upload passes before any method sees it."""

from typing import Any, TypeVar

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
    expected = tree.named_leaves(like)
    try:
        given = tree.named_leaves(upload)
    except (TypeError, ValueError) as error:
        return Failure(client, Reason.KEY_UNEXPECTED, str(error))
    for path in expected:
        if path not in given:
            return Failure(client, Reason.KEY_MISSING, f"{path} is missing")
    for path in given:
        if path not in expected:
            return Failure(client, Reason.KEY_UNEXPECTED, f"{path} was not asked for")
    for (path, leaf), name in zip(expected.items(), _field_names(like), strict=True):
        found = _mismatch(given[path], leaf) or _bad_values(given[path], name, num_classes)
        if found:
            reason, detail = found
            return Failure(client, reason, f"{path}: {detail}")
    return tree.with_leaves(like, [given[path] for path in expected])


def non_finite(client: ClientId, memory: Tree) -> Failure | None:
    """Why what a client would keep is of no use, or None."""
    for path, leaf in tree.named_leaves(memory).items():
        if leaf.is_floating_point() and not torch.isfinite(leaf).all():
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


def _field_names(like: Tree) -> list[str | None]:
    """The record's field that each leaf is; None for entries of a dict, whose names belong to the networks."""
    paths, _ = pytree.tree_flatten_with_path(like)
    last = [path[-1] if path else None for path, _ in paths]
    return [key.name if isinstance(key, pytree.GetAttrKey) else None for key in last]
