"""AdamW."""

from dataclasses import dataclass

from torch import Tensor

from protofed.optim.adam import Adam
from protofed.optim.steps import Amount, Gradient, Tensors, clipped, each, named
from protofed.tree import Params


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam whose decay of the weights does not pass through the moments, with the meaning of every option that
    torch.optim.AdamW gives it."""

    weight_decay: Amount = 0.01
    """Before each step the weights are multiplied by 1 − lr · weight_decay."""

    def step(
        self, gradient: Gradient, params: Params, state: tuple[Tensors, Tensors, Tensor]
    ) -> tuple[Params, tuple[Tensors, Tensors, Tensor]]:
        weights = tuple(params.values())
        grads = clipped(tuple(gradient(params).values()), self.clip_norm)
        if self.weight_decay:
            weights = each("mul", weights, 1 - self.lr * self.weight_decay)
        weights, state = self.moved(weights, grads, state)
        return named(params, weights), state
