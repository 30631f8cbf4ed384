"""An optimiser that takes no step, for methods whose clients send gradients."""

from dataclasses import dataclass
from typing import Self

from protofed.optim.steps import Gradient
from protofed.tree import Params


@dataclass(frozen=True)
class Gradients:
    """What it makes of weights is their gradient, in their place."""

    is_elementwise = True

    def for_round(self, round: int) -> Self:
        return self

    def init(self, params: Params) -> tuple[()]:
        return ()

    def step(self, gradient: Gradient, params: Params, state: tuple[()]) -> tuple[Params, tuple[()]]:
        return gradient(params), state
