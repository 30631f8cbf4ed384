"""Adam."""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Interval
from torch import Tensor

from protofed.optim.steps import Amount, DecayingRate, Gradient, Rate, Share, Tensors, clipped, each, laid_out, named
from protofed.tree import Params


@dataclass(frozen=True)
class Adam(DecayingRate):
    """Adam with bias correction, with the meaning of every option that torch.optim.Adam gives it."""

    lr: Rate = 0.001
    """The learning rate."""
    beta1: Share = 0.9
    """How much of the mean gradient is kept from step to step."""
    beta2: Share = 0.999
    """How much of the mean squared gradient is kept from step to step."""
    eps: Rate = 1e-8
    """Added to the denominator of a step."""
    weight_decay: Amount = 0.0
    """So many times the weights are added to their gradient."""
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
        size, spread = (_of_clients(correction, weights) for correction in self._corrections(steps))
        scales = each("add", each("div", each("sqrt", second), spread), self.eps)
        moves = each("mul", each("div", first, scales), each("neg", size) if isinstance(size, tuple) else -size)
        kept = tuple(move.to(leaf.dtype) for move, leaf in zip(moves, weights, strict=True))  # float64 of one number
        return each("add", weights, kept), (first, second, steps)

    @property
    def is_elementwise(self) -> bool:
        """Whether a step treats every number alike, so that the weights of many clients may be stacked."""
        return not self.clip_norm

    def step_in_place(
        self, gradient: Gradient, params: Params, state: tuple[Tensors, Tensors, Tensor]
    ) -> tuple[Params, tuple[Tensors, Tensors, Tensor]]:
        """The same step, but weights and state are changed where they are: one kernel instead of ten."""
        first, second, steps = state
        weights = tuple(params.values())
        grads = clipped(tuple(gradient(params).values()), self.clip_norm)
        grads = tuple(laid_out(grad, leaf) for grad, leaf in zip(grads, weights, strict=True))
        steps += 1
        if steps.dim():  # of many clients, whose numbers of steps may differ
            from protofed.optim.adam_kernel import stacked_step  # Triton comes with torch for GPUs only

            size, spread = (correction.float() for correction in self._corrections(steps))
            decay = self.weight_decay
            stacked_step(weights, grads, first, second, size, spread, self.beta1, self.beta2, self.eps, decay)
            return params, state
        torch._fused_adam_(
            weights,
            grads,
            first,
            second,
            [],
            [steps.float()] * len(weights),
            lr=self.lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )
        return params, state

    def _corrections(self, steps: Tensor) -> tuple[Tensor, Tensor]:
        """The learning rate over the correction of the first moments, and the root of that of the second."""
        return self.lr / (1 - self.beta1**steps), (1 - self.beta2**steps).sqrt()


def _of_clients(scale: Tensor, leaves: Tensors) -> Tensor | Tensors:
    """A number for all leaves, or, of stacked clients (K,), one for each leaf that fits its shape."""
    if not scale.dim():
        return scale
    return tuple(scale.view(-1, *[1] * (leaf.dim() - 1)).to(leaf.dtype) for leaf in leaves)
