"""Adam."""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Interval
from torch import Tensor

from protofed.optim.base import Amount, DecayingRate, Gradient, Rate, Share, Tensors, clipped, each, named
from protofed.tree import Params


@dataclass(frozen=True)
class Adam(DecayingRate):
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

    def init(self, params: Params) -> tuple[Tensors, Tensors, Tensor]:
        """First and second moments, and the number of steps taken."""
        moments = tuple(torch.zeros_like(leaf) for leaf in params.values())
        device = moments[0].device if moments else None
        return moments, moments, torch.zeros((), dtype=torch.float64, device=device)

    def step(
        self, gradient: Gradient, params: Params, state: tuple[Tensors, Tensors, Tensor]
    ) -> tuple[Params, tuple[Tensors, Tensors, Tensor]]:
        weights = tuple(params.values())
        grads = clipped(tuple(gradient(params).values()), self.clip_norm)
        if self.weight_decay:
            grads = each("add", grads, weights, alpha=self.weight_decay)
        weights, state = self.moved(weights, grads, state)
        return named(params, weights), state

    def moved(
        self, weights: Tensors, grads: Tensors, state: tuple[Tensors, Tensors, Tensor]
    ) -> tuple[Tensors, tuple[Tensors, Tensors, Tensor]]:
        """The weights after a step along the moments, and the new moments."""
        first, second, steps = state
        steps = steps + 1
        first = each("lerp", first, grads, 1 - self.beta1)
        second = each("addcmul", each("mul", second, self.beta2), grads, grads, value=1 - self.beta2)
        size = self.lr / (1 - self.beta1**steps)
        spread = (1 - self.beta2**steps).sqrt()
        scales = each("add", each("div", each("sqrt", second), spread), self.eps)
        moves = each("mul", each("div", first, scales), -size)
        kept = tuple(
            move.to(leaf.dtype) for move, leaf in zip(moves, weights, strict=True)
        )  # of a single number they are float64
        return each("add", weights, kept), (first, second, steps)
