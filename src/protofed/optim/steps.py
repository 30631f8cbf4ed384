"""What an optimiser is: `init` makes a state, `step` maps weights and state to new ones.

`step` is given the gradient as a function of the weights, so that an optimiser may ask for it at more than one place,
as sharpness-aware minimisation does.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import repeat
from typing import Annotated, Any, Protocol, Self, cast, runtime_checkable

import torch
from annotated_types import Ge, Gt, Interval
from torch import Tensor

from protofed.tree import Params, Tree

Gradient = Callable[[Params], Params]
Tensors = tuple[Tensor, ...]
Step = Callable[[Gradient, Params, Any], tuple[Params, Any]]

Rate = Annotated[float, Gt(0)]
Share = Annotated[float, Interval(ge=0, lt=1)]
Amount = Annotated[float, Ge(0)]


@runtime_checkable
class Optimizer(Protocol):
    """What every optimiser has. One may also have a rate (`HasRate`) and a step in place (`in_place_step`)."""

    def for_round(self, round: int) -> Self:
        """This optimiser as it is in a given round."""

    def init(self, params: Params) -> Tree:
        """The state before the first step."""

    def step(self, gradient: Gradient, params: Params, state: Tree) -> tuple[Params, Tree]: ...


@runtime_checkable
class HasRate(Optimizer, Protocol):
    """An optimiser whose learning rate can be read and set."""

    @property
    def lr(self) -> float: ...

    def with_lr(self, lr: Any) -> Self:
        """The same with another learning rate. A tensor may hold it: then it can change without a change of code."""


class DecayingRate:
    """Of an optimiser with the settings `lr` and `lr_decay`: the learning rate of round t is lr · lr_decayᵗ."""

    lr: float
    lr_decay: float

    def for_round(self, round: int) -> Self:
        return self.with_lr(self.lr * self.lr_decay**round)

    def with_lr(self, lr: Any) -> Self:
        changed: Self = replace(cast(Any, self), lr=lr)
        return changed


def rate_of(optimizer: Optimizer) -> float | None:
    """The learning rate; None for an optimiser without one."""
    return optimizer.lr if isinstance(optimizer, HasRate) else None


def halved(optimizer: Optimizer, times: int) -> Optimizer:
    """The same with the learning rate halved so often; it must have one."""
    assert isinstance(optimizer, HasRate)
    return optimizer.with_lr(optimizer.lr / 2**times)


def in_place_step(optimizer: Optimizer) -> Step | None:
    """The optimiser's `step_in_place(gradient, params, state)`, which changes weights and state where they are. None if
    it has none, or inherits one from a class whose `step` it replaces."""
    for cls in type(optimizer).__mro__:
        if "step_in_place" in vars(cls):
            step: Step = optimizer.step_in_place  # type: ignore[attr-defined]
            return step
        if "step" in vars(cls):
            return None
    return None


def named(params: Params, leaves: Tensors) -> Params:
    return dict(zip(params, leaves, strict=True))


def each(operation: str, first: Tensors, *others: Tensors | Tensor | float, **settings: float) -> Tensors:
    """An operation of torch on each tensor: in few kernels, or one by one under vmap, which has no rule for that."""
    if not is_mapped():
        foreach: Callable[..., Tensors] = getattr(torch, f"_foreach_{operation}")
        return foreach(first, *others, **settings)
    columns = [other if isinstance(other, tuple | list) else repeat(other) for other in others]
    rows = zip(first, *columns, strict=False)  # what is repeated has no end
    return tuple(getattr(torch, operation)(*row, **settings) for row in rows)


def is_mapped() -> bool:
    """Whether vmap, or another transform of functions, is at work."""
    return torch._C._functorch.maybe_current_level() is not None


def norm(grads: Tensors) -> Tensor:
    """Over all tensors together."""
    norms = [torch.linalg.vector_norm(grad) for grad in grads] if is_mapped() else list(torch._foreach_norm(grads))
    together: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return together


def clipped(grads: Tensors, limit: float) -> Tensors:
    """As torch.nn.utils.clip_grad_norm_ does."""
    if not limit:
        return grads
    return each("mul", grads, (limit / (norm(grads) + 1e-6)).clamp(max=1.0))


def descended(weights: Tensors, moves: Tensors, lr: float | Tensor) -> Tensors:
    """weights − lr · moves."""
    if isinstance(lr, Tensor):
        return each("add", weights, each("mul", moves, -lr))
    return each("add", weights, moves, alpha=-lr)


def laid_out(grad: Tensor, leaf: Tensor) -> Tensor:
    """The gradient in the memory layout of its weights, which a fused step takes for granted."""
    return grad if grad.stride() == leaf.stride() else torch.empty_like(leaf).copy_(grad)
