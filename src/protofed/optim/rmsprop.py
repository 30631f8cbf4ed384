"""RMSprop."""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Interval

from protofed.optim.steps import Amount, DecayingRate, Gradient, Rate, Share, Tensors, clipped, descended, each, named
from protofed.tree import Params


@dataclass(frozen=True)
class RmsProp(DecayingRate):
    """RMSprop, with the meaning of every option that torch.optim.RMSprop gives it."""

    lr: Rate = 0.01
    """The learning rate."""
    alpha: Share = 0.99
    """How much of the mean squared gradient is kept from step to step."""
    eps: Rate = 1e-8
    """Added to the denominator of a step."""
    weight_decay: Amount = 0.0
    """So many times the weights are added to their gradient."""
    momentum: Share = 0.0
    """How much of the last step is kept in the next one."""
    centered: bool = False
    """Whether gradients are divided by their standard deviation, not by the root of their mean square."""
    clip_norm: Amount = 0.0
    """The gradient is scaled down to this norm, over all parameters together; 0 leaves it alone."""
    lr_decay: Annotated[float, Interval(gt=0, le=1)] = 1.0
    """The learning rate of round t is lr · lr_decayᵗ."""

    def init(self, params: Params) -> tuple[Tensors, Tensors, Tensors]:
        """Mean squared gradients, mean gradients if it is centred, and the momentum if there is one."""
        zeros = tuple(torch.zeros_like(leaf) for leaf in params.values())
        return zeros, zeros if self.centered else (), zeros if self.momentum else ()

    def step(
        self, gradient: Gradient, params: Params, state: tuple[Tensors, Tensors, Tensors]
    ) -> tuple[Params, tuple[Tensors, Tensors, Tensors]]:
        squares, means, momentum = state
        weights = tuple(params.values())
        grads = clipped(tuple(gradient(params).values()), self.clip_norm)
        if self.weight_decay:
            grads = each("add", grads, weights, alpha=self.weight_decay)
        squares = each("addcmul", each("mul", squares, self.alpha), grads, grads, value=1 - self.alpha)
        spreads = squares
        if self.centered:
            means = each("lerp", means, grads, 1 - self.alpha)
            spreads = each("addcmul", squares, means, means, value=-1.0)
        moves = each("div", grads, each("add", each("sqrt", spreads), self.eps))
        if self.momentum:
            moves = momentum = each("add", each("mul", momentum, self.momentum), moves)
        return named(params, descended(weights, moves, self.lr)), (squares, means, momentum)
