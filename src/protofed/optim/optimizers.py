"""Optimisers as pure functions: `init` makes a state, `step` maps weights and state to new ones.

`step` is given the gradient as a function of the weights, so that an optimiser may ask for it at more than one place,
as sharpness-aware minimisation does.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Annotated, Any, Protocol, Self, runtime_checkable

import torch
from annotated_types import Ge, Gt, Interval
from torch import Tensor

from protofed.errors import BadInput
from protofed.tree import Params, Tree

Gradient = Callable[[Params], Params]
Tensors = tuple[Tensor, ...]

Rate = Annotated[float, Gt(0)]
Share = Annotated[float, Interval(ge=0, lt=1)]
Amount = Annotated[float, Ge(0)]


@runtime_checkable
class Optimizer(Protocol):
    def for_round(self, round: int) -> Self:
        """This optimiser as it is in a given round."""

    def init(self, params: Params) -> Tree:
        """The state before the first step."""

    def step(self, gradient: Gradient, params: Params, state: Tree) -> tuple[Params, Tree]: ...


@dataclass(frozen=True)
class Sgd:
    """Stochastic gradient descent, with the meaning of every option that torch.optim.SGD gives it."""

    lr: Rate = 0.01
    momentum: Share = 0.0
    weight_decay: Amount = 0.0
    nesterov: bool = False
    clip_norm: Amount = 0.0
    """The gradient is scaled down to this norm, over all parameters together; 0 leaves it alone."""
    lr_decay: Annotated[float, Interval(gt=0, le=1)] = 1.0
    """The learning rate of round t is lr · lr_decayᵗ."""

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            raise BadInput("nesterov = true needs a momentum above 0")

    def for_round(self, round: int) -> Self:
        return replace(self, lr=self.lr * self.lr_decay**round)

    def init(self, params: Params) -> Tensors:
        """The momentum of each parameter."""
        return tuple(torch.zeros_like(leaf) for leaf in params.values()) if self.momentum else ()

    def step(self, gradient: Gradient, params: Params, state: Tensors) -> tuple[Params, Tensors]:
        weights = tuple(params.values())
        grads = _clipped(tuple(gradient(params).values()), self.clip_norm)
        if self.weight_decay:
            grads = _each("add", grads, weights, alpha=self.weight_decay)
        if self.momentum:
            state = _each("add", _each("mul", state, self.momentum), grads)
            grads = _each("add", grads, state, alpha=self.momentum) if self.nesterov else state
        return _named(params, _descended(weights, grads, self.lr)), state

    def step_in_place(self, gradient: Gradient, params: Params, state: Tensors) -> tuple[Params, Tensors]:
        """The same step, but weights and state are changed where they are: on a GPU it moves a third of the bytes."""
        grads = _clipped(tuple(gradient(params).values()), self.clip_norm)
        torch._fused_sgd_(
            list(params.values()),
            [_laid_out(grad, leaf) for grad, leaf in zip(grads, params.values(), strict=True)],
            list(state),
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=self.lr,
            dampening=0.0,
            nesterov=self.nesterov,
            maximize=False,
            is_first_step=False,
        )
        return params, state


@dataclass(frozen=True)
class Adam:
    """Adam with bias correction, with the meaning of every option that torch.optim.Adam gives it."""

    lr: Rate = 0.001
    beta1: Share = 0.9
    beta2: Share = 0.999
    eps: Rate = 1e-8
    weight_decay: Amount = 0.0
    clip_norm: Amount = 0.0
    """The gradient is scaled down to this norm, over all parameters together; 0 leaves it alone."""
    lr_decay: Annotated[float, Interval(gt=0, le=1)] = 1.0
    """The learning rate of round t is lr · lr_decayᵗ."""

    def for_round(self, round: int) -> Self:
        return replace(self, lr=self.lr * self.lr_decay**round)

    def init(self, params: Params) -> tuple[Tensors, Tensors, Tensor]:
        """First and second moments, and the number of steps taken."""
        moments = tuple(torch.zeros_like(leaf) for leaf in params.values())
        device = moments[0].device if moments else None
        return moments, moments, torch.zeros((), dtype=torch.float64, device=device)

    def step(
        self, gradient: Gradient, params: Params, state: tuple[Tensors, Tensors, Tensor]
    ) -> tuple[Params, tuple[Tensors, Tensors, Tensor]]:
        first, second, steps = state
        weights = tuple(params.values())
        grads = _clipped(tuple(gradient(params).values()), self.clip_norm)
        if self.weight_decay:
            grads = _each("add", grads, weights, alpha=self.weight_decay)
        steps = steps + 1
        first = _each("lerp", first, grads, 1 - self.beta1)
        second = _each("addcmul", _each("mul", second, self.beta2), grads, grads, value=1 - self.beta2)
        size = self.lr / (1 - self.beta1**steps)
        spread = (1 - self.beta2**steps).sqrt()
        scales = _each("add", _each("div", _each("sqrt", second), spread), self.eps)
        moves = _each("mul", _each("div", first, scales), -size)
        return _named(params, _each("add", weights, moves)), (first, second, steps)


@dataclass(frozen=True)
class _SharpnessAware(ABC):
    """The gradient is taken at the worst place near the weights, then applied at the weights by a plain optimiser."""

    base: Sgd | Adam = Sgd()

    @abstractmethod
    def climbed(self, gradient: Gradient, params: Params) -> Params:
        """The worst place near these weights, to first order."""

    def for_round(self, round: int) -> Self:
        return replace(self, base=self.base.for_round(round))

    def init(self, params: Params) -> Tree:
        return self.base.init(params)

    def step(self, gradient: Gradient, params: Params, state: Tree) -> tuple[Params, Tree]:
        return self.base.step(lambda weights: gradient(self.climbed(gradient, weights)), params, state)


@dataclass(frozen=True)
class Sam(_SharpnessAware):
    """Sharpness-aware minimisation (Foret et al., ICLR 2021)."""

    rho: Amount = 0.05
    """ρ, the radius of the neighbourhood."""

    def climbed(self, gradient: Gradient, params: Params) -> Params:
        """w + ρ g / ‖g‖."""
        grads = tuple(gradient(params).values())
        moves = _each("mul", grads, self.rho / (_norm(grads) + 1e-12))
        return _named(params, _each("add", tuple(params.values()), moves))


@dataclass(frozen=True)
class Asam(_SharpnessAware):
    """Adaptive SAM (Kwon et al., ICML 2021): the neighbourhood is scaled by the size of each weight, biases aside."""

    rho: Amount = 0.5
    """ρ, the radius of the scaled neighbourhood."""
    eta: Amount = 0.2
    """η, added to |w| in the scale of each weight."""

    def climbed(self, gradient: Gradient, params: Params) -> Params:
        """w + ρ T² g / ‖T g‖ with T = |w| + η for tensors named weight, and 1 for all others."""
        weights = tuple(params.values())
        scales = tuple(
            leaf.abs() + self.eta if "weight" in name else torch.ones_like(leaf) for name, leaf in params.items()
        )
        scaled = _each("mul", tuple(gradient(params).values()), scales)
        moves = _each("mul", _each("mul", scaled, scales), self.rho / (_norm(scaled) + 1e-12))
        return _named(params, _each("add", weights, moves))


OPTIMIZERS: dict[str, type[Sgd | Adam | Sam | Asam]] = {"sgd": Sgd, "adam": Adam, "sam": Sam, "asam": Asam}


def rate_of(optimizer: Optimizer) -> float | None:
    """The learning rate of an optimiser of this module; None for others."""
    match optimizer:
        case Sgd() | Adam():
            return optimizer.lr
        case _SharpnessAware():
            return optimizer.base.lr
    return None


def at_rate(optimizer: Optimizer, lr: Any) -> Optimizer:
    """The same with another learning rate, which a tensor may hold: then it may change without a change of code."""
    match optimizer:
        case Sgd() | Adam():
            return replace(optimizer, lr=lr)
        case _SharpnessAware():
            return replace(optimizer, base=replace(optimizer.base, lr=lr))
    raise TypeError(f"{optimizer!r} has no learning rate that could be set")


def halved(optimizer: Optimizer, times: int) -> Optimizer:
    """The same with the learning rate halved so often; it must have one."""
    rate = rate_of(optimizer)
    assert rate is not None
    return at_rate(optimizer, rate / 2**times)


def _named(params: Params, leaves: Tensors) -> Params:
    return dict(zip(params, leaves, strict=True))


def _descended(weights: Tensors, grads: Tensors, lr: float | Tensor) -> Tensors:
    if isinstance(lr, Tensor):
        return _each("add", weights, _each("mul", grads, -lr))
    return _each("add", weights, grads, alpha=-lr)


def _each(operation: str, first: Tensors, *others: Tensors | Tensor | float, **settings: float) -> Tensors:
    """An operation of torch on each tensor: in few kernels, or one by one under vmap, which has no rule for that."""
    if not _is_mapped():
        foreach: Callable[..., Tensors] = getattr(torch, f"_foreach_{operation}")
        return foreach(first, *others, **settings)
    columns = [other if isinstance(other, tuple | list) else repeat(other) for other in others]
    rows = zip(first, *columns, strict=False)  # what is repeated has no end
    return tuple(getattr(torch, operation)(*row, **settings) for row in rows)


def _is_mapped() -> bool:
    """Whether vmap, or another transform of functions, is at work."""
    return torch._C._functorch.maybe_current_level() is not None


def _laid_out(grad: Tensor, leaf: Tensor) -> Tensor:
    """The gradient in the memory layout of its weights, which a fused step takes for granted."""
    return grad if grad.stride() == leaf.stride() else torch.empty_like(leaf).copy_(grad)


def _norm(grads: Tensors) -> Tensor:
    norms = [torch.linalg.vector_norm(grad) for grad in grads] if _is_mapped() else list(torch._foreach_norm(grads))
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def _clipped(grads: Tensors, limit: float) -> Tensors:
    """As torch.nn.utils.clip_grad_norm_ does."""
    if not limit:
        return grads
    return _each("mul", grads, (limit / (_norm(grads) + 1e-6)).clamp(max=1.0))
