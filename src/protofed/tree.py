"""Records: immutable trees of tensors, and the arithmetic that federated learning does on them."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import cache
from typing import Any, TypeVar, dataclass_transform, get_type_hints

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from protofed.errors import RoundAbandoned

Params = dict[str, Tensor]
"""Named tensors of a network: its parameters and its buffers."""

Tree = Any
"""A tensor, a record, or a dict, list or tuple of trees."""

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """A frozen dataclass that is also a tree of tensors: immutable, mappable, sendable."""
    frozen = dataclass(frozen=True)(cls)
    torch.export.register_dataclass(frozen)
    return frozen


@dataclass(frozen=True)
class Ragged:
    """Says of a record's field, as in `Annotated[Tensor, Ragged(fill=-1)]`, that its number of rows may change from
    call to call. A runtime may add rows of `fill` at the end, so what reads the field must ignore such rows."""

    fill: float


@record
class Nothing:
    """The record of a client that keeps nothing."""


def map(function: Callable[..., Tensor], tree: T, *others: T) -> T:  # noqa: A001
    """The tree of `function(leaf, *other_leaves)`."""
    mapped: T = pytree.tree_map(function, tree, *others) if others else _mapped(function, tree)
    return mapped


def leaves(tree: Tree) -> list[Tensor]:
    collected: list[Tensor] = []
    _collect(tree, collected)
    return collected


def named_leaves(tree: Tree) -> dict[str, Tensor]:
    """Leaf by path, such as `params/features.0.weight`, in the order of the tree."""
    named: dict[str, Tensor] = {}
    _name(tree, "", named)
    return named


def with_leaves(like: T, new: Sequence[Tensor]) -> T:
    """The tree with the structure of `like` and these leaves."""
    waiting = deque(new)
    try:
        rebuilt: T = _mapped(lambda _: waiting.popleft(), like)
    except IndexError:
        raise ValueError(f"{len(new)} leaves are too few for the tree") from None
    if waiting:
        raise ValueError(f"{len(new)} leaves are {len(waiting)} too many for the tree")
    return rebuilt


def map_ragged(function: Callable[[Tensor, Ragged], Tensor], tree: T) -> T:
    """The tree with `function(leaf, ragged)` for every leaf in a field that is `Ragged`, and all others as they are."""
    mapped: T = _map_ragged(function, tree)
    return mapped


def norms(tensors: Iterable[Tensor], order: float = 2) -> Tensor:
    """The norm of each floating-point tensor that is not empty, in float64, computed in few kernels."""
    floats = [leaf for leaf in tensors if leaf.is_floating_point() and leaf.numel()]
    if not floats:
        return torch.zeros(0, dtype=torch.float64)
    sizes = _largest(floats) if order == torch.inf else torch._foreach_norm(floats, order)
    kinds = dict.fromkeys(size.dtype for size in sizes)
    if len(kinds) == 1:
        return torch.stack(list(sizes)).double()
    return torch.cat([torch.stack([size for size in sizes if size.dtype == kind]).double() for kind in kinds])


def _largest(floats: list[Tensor]) -> Sequence[Tensor]:
    """The largest size in each tensor. On a CPU, torch's own norm of this order is slow."""
    if floats[0].device.type == "cpu":
        return torch._foreach_max(torch._foreach_abs(floats))
    return torch._foreach_norm(floats, torch.inf)


def squared_distance(a: Params, b: Params) -> Tensor:
    """Σ ‖a_i − b_i‖² over the entries of `a`."""
    return torch.stack([(a[name] - b[name]).square().sum() for name in a]).sum()


def select(params: Params, names: Sequence[str]) -> Params:
    return {name: params[name] for name in names}


class Mean:
    """A weighted mean of trees, added one by one: memory does not grow with the number of trees.

    Leaves are matched by name. Sums are in float64, so that after rounding to float32 the order does not matter.
    """

    def __init__(self) -> None:
        self._like: Tree = None
        self._sums: dict[str, Tensor] = {}
        self._weight = 0.0

    def add(self, tree: Tree, weight: float = 1.0) -> None:
        named = named_leaves(tree)
        if self._like is None:
            self._like = map(lambda leaf: leaf.new_empty(0), tree)  # structure and dtypes, without the tensors
            # guard: float64-sums
            self._sums = {name: torch.zeros_like(leaf, dtype=torch.float64) for name, leaf in named.items()}
        if named.keys() != self._sums.keys():
            raise ValueError("the mean of trees that have different leaves")
        if named:
            torch._foreach_add_([self._sums[name] for name in named], list(named.values()), alpha=weight)  # in float64
        self._weight += weight  # guard: renormalisation-over-those-replied

    @classmethod
    def of_sums(cls, like: Tree, sums: Mapping[str, Tensor], weight: float) -> "Mean":
        """The mean of trees like this one whose sums, by path, and whose weights' sum are known."""
        mean = cls()
        mean._like = map(lambda leaf: leaf.new_empty(0), like)
        mean._sums = {path: sums[path] for path in named_leaves(like)}
        mean._weight = weight
        return mean

    @property
    def weight(self) -> float:
        """The sum of all weights so far."""
        return self._weight

    @property
    def total(self) -> Tree:
        """The sum so far, in float64."""
        return with_leaves(self._like, list(self._sums.values()))

    def value(self) -> Tree:
        if self._weight <= 0:  # guard: mean-no-weight-abandons-round
            raise RoundAbandoned("there is no mean: nothing was added to it, or only at weight 0")
        means = {name: total / self._weight for name, total in self._sums.items()}
        likes = named_leaves(self._like)
        return with_leaves(self._like, [_as_kind(means[name], like.dtype) for name, like in likes.items()])


def _as_kind(mean: Tensor, kind: torch.dtype) -> Tensor:
    """Integers, such as an index that a network keeps in a buffer, are rounded."""
    return mean.to(kind) if kind.is_floating_point else mean.round().to(kind)


def _mapped(function: Callable[[Any], Any], tree: Tree) -> Any:
    """Every upload passes here several times, so trees of the usual kinds are walked directly, for speed."""
    kind = type(tree)
    if kind is Tensor:
        return function(tree)
    if kind is dict:
        return {
            key: function(child) if type(child) is Tensor else _mapped(function, child) for key, child in tree.items()
        }
    if kind is list or kind is tuple:
        return kind([_mapped(function, child) for child in tree])
    if kind not in pytree.SUPPORTED_NODES and not isinstance(tree, tuple):
        return function(tree)
    if not is_dataclass(kind):
        return pytree.tree_map(function, tree)
    fields = [(name, getattr(tree, name)) for name in kind.__dataclass_fields__]
    return kind(**{name: None if child is None else _mapped(function, child) for name, child in fields})


def _collect(tree: Tree, collected: list[Any]) -> None:
    """Adds the leaves that `_mapped` goes through, in its order, without making a tree of them."""
    kind = type(tree)
    if kind is Tensor:
        collected.append(tree)
    elif kind is dict:
        for child in tree.values():
            _collect(child, collected)
    elif kind is list or kind is tuple:
        for child in tree:
            _collect(child, collected)
    elif kind in pytree.SUPPORTED_NODES and is_dataclass(kind):
        for name in kind.__dataclass_fields__:
            if (child := getattr(tree, name)) is not None:
                _collect(child, collected)
    else:
        _mapped(collected.append, tree)


def _map_ragged(function: Callable[[Tensor, Ragged], Tensor], tree: Tree) -> Any:
    if isinstance(tree, Tensor):
        return tree
    if isinstance(tree, dict):
        return {key: _map_ragged(function, child) for key, child in tree.items()}
    if isinstance(tree, list | tuple):
        children = [_map_ragged(function, child) for child in tree]
        return type(tree)(*children) if hasattr(tree, "_fields") else type(tree)(children)
    if not is_dataclass(tree) or isinstance(tree, type):
        return tree
    changes: dict[str, Any] = {}
    for name, ragged in _ragged_fields(type(tree)).items():
        child = getattr(tree, name)
        if ragged is None:
            changes[name] = _map_ragged(function, child)
        elif child is not None:
            changes[name] = map(lambda leaf, ragged=ragged: function(leaf, ragged), child)
    return replace(tree, **changes)


@cache
def _ragged_fields(kind: type) -> dict[str, Ragged | None]:
    """Every field of a record, and whether it is ragged."""
    try:
        hints = get_type_hints(kind, include_extras=True)
    except NameError:  # an annotation that is a string and names something out of reach
        hints = {}
    marks = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    names: list[str] = list(kind.__dataclass_fields__)  # type: ignore[attr-defined]
    return {name: next((m for m in marks.get(name, ()) if isinstance(m, Ragged)), None) for name in names}


def _name(tree: Tree, prefix: str, named: dict[str, Tensor]) -> None:
    """Adds the leaves of a tree under this prefix. Every upload passes here, so it is written for speed."""
    children = None if isinstance(tree, Tensor) else _children(tree)
    if children is None:
        if prefix[:-1] in named:
            raise ValueError(f"two leaves of a tree have the same name, {prefix[:-1]!r}")
        named[prefix[:-1]] = tree
        return
    for word, child in children:
        if "/" in word:
            raise ValueError(f"{word!r} cannot name a leaf: '/' separates the words of a path")
        _name(child, f"{prefix}{word}/", named)


def _children(tree: Tree) -> list[tuple[str, Tree]] | None:
    """The children of a node, in the order of its leaves; None for a leaf."""
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return list(zip(tree._fields, tree, strict=True))
    if type(tree) not in pytree.SUPPORTED_NODES:
        return None
    match tree:
        case dict():
            return [(str(key), child) for key, child in tree.items()]
        case list() | tuple():
            return [(str(i), child) for i, child in enumerate(tree)]
    if is_dataclass(tree):  # a field that is None has no leaf
        fields = [(name, getattr(tree, name)) for name in tree.__dataclass_fields__]
        return [(name, child) for name, child in fields if child is not None]
    raise TypeError(f"{type(tree).__name__} cannot hold leaves: use records, dicts, lists and tuples")
