"""Stochastic gradient descent."""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Interval

from protofed.errors import BadInput
from protofed.optim.steps import (
    Amount,
    DecayingRate,
    Gradient,
    Rate,
    Share,
    Tensors,
    clipped,
    descended,
    each,
    laid_out,
    named,
)
from protofed.tree import Params


@dataclass(frozen=True)
class Sgd(DecayingRate):
    """Stochastic gradient descent, with the meaning of every option that torch.optim.SGD gives it."""

    lr: Rate = 0.01
    """The learning rate."""
    momentum: Share = 0.0
    """How much of the last step is kept in the next one."""
    weight_decay: Amount = 0.0
    """So many times the weights are added to their gradient."""
    nesterov: bool = False
    """Whether the step looks ahead, as Nesterov's momentum does."""
    clip_norm: Amount = 0.0
    """The gradient is scaled down to this norm, over all parameters together; 0 leaves it alone."""
    lr_decay: Annotated[float, Interval(gt=0, le=1)] = 1.0
    """The learning rate of round t is lr · lr_decayᵗ."""

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            raise BadInput("nesterov = true needs a momentum above 0")

    @property
    def is_elementwise(self) -> bool:
        """Whether a step treats every number alike, so that the weights of many clients may be stacked."""
        return not self.clip_norm

    def init(self, params: Params) -> Tensors:
        """The momentum of each parameter."""
        return tuple(torch.zeros_like(leaf) for leaf in params.values()) if self.momentum else ()

    def step(self, gradient: Gradient, params: Params, state: Tensors) -> tuple[Params, Tensors]:
        weights = tuple(params.values())
        grads = clipped(tuple(gradient(params).values()), self.clip_norm)
        if self.weight_decay:
            grads = each("add", grads, weights, alpha=self.weight_decay)
        if self.momentum:
            state = each("add", each("mul", state, self.momentum), grads)
            grads = each("add", grads, state, alpha=self.momentum) if self.nesterov else state
        return named(params, descended(weights, grads, self.lr)), state

    def step_in_place(self, gradient: Gradient, params: Params, state: Tensors) -> tuple[Params, Tensors]:
        """The same step, but weights and state are changed where they are: on a GPU it moves a third of the bytes."""
        grads = clipped(tuple(gradient(params).values()), self.clip_norm)
        torch._fused_sgd_(
            list(params.values()),
            [laid_out(grad, leaf) for grad, leaf in zip(grads, params.values(), strict=True)],
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
