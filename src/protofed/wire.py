"""Trees to named arrays and back, for checkpoints and messages: safetensors, so that no data can hold code."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from protofed import tree

T = TypeVar("T")

ENTRY_ROOM = 512
"""Bytes for the type, shape and place of an array in a header, where they take about 100."""


KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What a header calls the types of tensors."""


class WireError(ValueError):
    """Bytes or arrays that are not the tree that was expected."""


@dataclass(frozen=True)
class Unfit:
    """Stands for a leaf that cannot be sent or kept."""

    why: str


def unfit(leaf: Any) -> str:
    """Why a leaf cannot be sent or kept; empty for an ordinary tensor that has all its values. Its type is asked for
    first: any other question to a subclass of Tensor runs code of whoever made it."""
    kind = type(leaf)
    if kind is Unfit:
        why: str = leaf.why
        return why
    if kind is not Tensor and kind is not nn.Parameter:  # guard: no-tensor-subclasses
        return f"is {kind.__name__}, not a tensor"
    if leaf.is_nested or leaf.layout != torch.strided or leaf.is_meta or leaf.is_neg():  # guard: dense-tensors-only
        return "is not a dense tensor"
    if leaf.dtype not in KINDS:  # guard: types-that-can-be-saved
        return f"is {leaf.dtype}, which cannot be sent or kept"
    try:
        size = leaf.untyped_storage().nbytes()
    except Exception:  # it escaped from a transformation of torch.func
        return "has no values of its own"
    if size < (leaf.storage_offset() + _extent(leaf)) * leaf.element_size():  # guard: values-in-storage
        return "has lost the memory of its values"
    return ""


def _extent(leaf: Tensor) -> int:
    """From a tensor's first value in memory to behind its last."""
    if leaf.is_contiguous():  # most are, and every upload passes here
        return leaf.numel()
    return 1 + sum((n - 1) * stride for n, stride in zip(leaf.shape, leaf.stride(), strict=True))


def taken(value: tree.Tree) -> tree.Tree:
    """The tree with copies of its tensors, which its maker cannot change any more; `Unfit` for other leaves."""
    return marked(value, lambda leaf: (leaf.detach() if leaf.requires_grad else leaf).clone())


def marked(value: tree.Tree, copy: Callable[[Tensor], Tensor] = lambda leaf: leaf) -> tree.Tree:
    """The tree with `Unfit` for leaves that cannot be sent."""

    def leaf_or_mark(leaf: Any) -> Any:
        why = unfit(leaf)
        return Unfit(why) if why else copy(leaf)

    return tree.map(leaf_or_mark, value)


def to_arrays(value: tree.Tree) -> dict[str, Tensor]:
    """The leaves by path, such as `prototypes/mean`."""
    arrays = tree.named_leaves(value)
    for path, leaf in arrays.items():
        if not isinstance(leaf, Tensor):
            raise WireError(f"{path} is {type(leaf).__name__}: a record that is sent or kept holds tensors only")
    return arrays


def num_bytes(value: tree.Tree) -> int:
    """The bytes of a tree's tensors at their own precision, without the names and shapes that travel with them."""
    leaves = tree.leaves(value)
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        to_arrays(value)  # says which is none
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves)


def from_arrays(arrays: dict[str, Tensor], like: T) -> T:
    """The tree with the structure of `like` and these leaves; shapes may differ, names may not."""
    names = tree.named_leaves(like)
    if names.keys() != arrays.keys():
        missing, extra = sorted(names.keys() - arrays.keys()), sorted(arrays.keys() - names.keys())
        raise WireError(f"not the expected tree: missing {missing or 'nothing'}, unexpected {extra or 'nothing'}")
    return tree.with_leaves(like, [arrays[name] for name in names])


def encode(value: tree.Tree) -> bytes:
    return save({path: leaf.detach().cpu().contiguous().clone() for path, leaf in to_arrays(value).items()})


def decode(data: bytes, like: T) -> T:
    size, most = _header_size(data), _header_room(like)
    # guard: header-file-bounded
    if size > most:  # before a million names are read that nobody expects
        raise WireError(f"not the expected tree: its header says {size} bytes, and at most {most} are needed")
    return from_arrays(decode_arrays(data), like)


def decode_arrays(data: bytes) -> dict[str, Tensor]:
    header(data)
    try:
        return {name: leaf.clone() for name, leaf in load(data).items()}  # the file's layout does not align tensors
    except Exception as error:  # safetensors raises several kinds, and all mean the same here
        raise WireError(f"not a safetensors file: {error}") from error


def header(data: bytes) -> dict[str, Any]:
    """What a file says of its arrays, by name. safetensors takes the last of several arrays of one name; a file that
    has such was made to deceive."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = dict(pairs)
        if len(names) != len(pairs):  # guard: no-name-twice-file
            raise WireError("not a safetensors file of ours: a name appears twice")
        return names

    try:
        found = json.loads(data[8 : 8 + _header_size(data)], object_pairs_hook=unique)
    except WireError:
        raise
    except (ValueError, RecursionError) as error:
        raise WireError(f"not a safetensors file: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(own, dict) for own in found.values()):
        raise WireError("not a safetensors file: its header is not a table of arrays")
    return found


def _header_size(data: bytes) -> int:
    return int.from_bytes(data[:8], "little")


def _header_room(like: tree.Tree) -> int:
    """More bytes than the header of a file takes whose arrays have the names of this tree."""
    return sum(len(json.dumps(name)) + ENTRY_ROOM for name in ("__metadata__", *tree.named_leaves(like)))
