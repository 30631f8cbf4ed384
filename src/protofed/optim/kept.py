"""An optimiser's state by weight, so that a part of the weights can train and leave its state behind.

A state is made for all trainable weights. In it, a tuple with one tensor for each weight, of the weight's shape, is by
weight. All else, such as Adam's number of steps, is common to all weights.
"""

from typing import Any

from torch import Tensor

from protofed import tree
from protofed.optim.steps import Optimizer
from protofed.tree import Params, Tree


def part_of(state: Tree, weights: Params, names: list[str]) -> Tree:
    """Of the state for these weights, the state for some of them."""
    places = [place for place, name in enumerate(weights) if name in set(names)]

    def chosen(value: Tree) -> Tree:
        if _is_by_weight(value, weights):
            return tuple(value[place] for place in places)
        return tuple(chosen(child) for child in value) if isinstance(value, tuple) else value

    return chosen(state)


def with_part(state: Tree, weights: Params, names: list[str], part: Tree) -> Tree:
    """The state for these weights, with that of some of them replaced."""

    def joined(value: Tree, new: Any) -> Tree:
        if _is_by_weight(value, weights):
            by_name = {**dict(zip(weights, value, strict=True)), **dict(zip(names, new, strict=True))}
            return tuple(by_name[name] for name in weights)
        if isinstance(value, tuple):
            return tuple(joined(child, other) for child, other in zip(value, new, strict=True))
        return new

    return joined(state, part)


def _is_by_weight(value: Tree, weights: Params) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == len(weights)
        and all(
            isinstance(leaf, Tensor) and leaf.shape == weight.shape
            for leaf, weight in zip(value, weights.values(), strict=True)
        )
    )


def why_not_kept(optimizer: Optimizer, weights: Params) -> str:
    """Why the optimiser's state for these weights cannot be kept from round to round; empty if it can."""
    state = optimizer.init(weights)
    if not tree.leaves(state):
        return f"{optimizer!r} has no state: give it a momentum, or leave this out"
    names = list(weights)[:1]
    part = part_of(state, weights, names)
    if _spec(part) != _spec(optimizer.init({name: weights[name] for name in names})):
        return f"the state of {optimizer!r} is not by weight"
    return ""


def _spec(state: Tree) -> list[tuple[str, Any, Any]]:
    return [(path, leaf.shape, leaf.dtype) for path, leaf in tree.named_leaves(state).items()]
