"""Trees to named arrays and back, for checkpoints and messages: safetensors, so that no data can hold code."""

import json
from typing import TypeVar

from safetensors.torch import load, save
from torch import Tensor

from protofed import tree

T = TypeVar("T")


class WireError(ValueError):
    """Bytes or arrays that are not the tree that was expected."""


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
    return from_arrays(decode_arrays(data), like)


def decode_arrays(data: bytes) -> dict[str, Tensor]:
    _refuse_duplicate_names(data)
    try:
        return {name: leaf.clone() for name, leaf in load(data).items()}  # the file's layout does not align tensors
    except Exception as error:  # safetensors raises several kinds, and all mean the same here
        raise WireError(f"not a safetensors file: {error}") from error


def _refuse_duplicate_names(data: bytes) -> None:
    """safetensors takes the last of several arrays of one name; a file that has such was made to deceive."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        names = dict(pairs)
        if len(names) != len(pairs):
            raise WireError("not a safetensors file of ours: a name appears twice")
        return names

    size = int.from_bytes(data[:8], "little")
    try:
        json.loads(data[8 : 8 + size], object_pairs_hook=unique)
    except WireError:
        raise
    except (ValueError, RecursionError) as error:
        raise WireError(f"not a safetensors file: {error}") from error
