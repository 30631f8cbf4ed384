"""Several models as one record, and means of models."""

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor

from protofed import tree
from protofed.tree import Mean, Params

T = TypeVar("T")


def stacked(values: list[T]) -> T:
    """One record of several alike: its tensors have a leading axis."""
    return tree.map(lambda *leaves: torch.stack(leaves), *values)


def entry(stack: T, k: int) -> T:
    """One of the stacked records."""
    return tree.map(lambda leaf: leaf[k], stack)


def weighted_mean(models: Iterable[tuple[Params, float]]) -> Params:
    """The mean of models by their weights."""
    mean = Mean()
    for params, weight in models:
        mean.add(params, weight)
    value: Params = mean.value()
    return value


def running_average(average: Params, count: Tensor, params: Params, has_started: bool) -> tuple[Params, Tensor]:
    """The mean of `count` models and one more, and how many it is of; before the start it is the last model."""
    if not has_started:
        return params, count
    return weighted_mean([(average, int(count)), (params, 1)]), count + 1
