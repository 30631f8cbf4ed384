"""Sharpness-aware minimisation."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from protofed.optim.adam import Adam
from protofed.optim.adamw import AdamW
from protofed.optim.rmsprop import RmsProp
from protofed.optim.sgd import Sgd
from protofed.optim.steps import Amount, Gradient, each, named, norm
from protofed.tree import Params, Tree

Plain = Sgd | Adam | AdamW | RmsProp
"""Optimisers that take the gradient at the weights themselves."""


@dataclass(frozen=True)
class _SharpnessAware(ABC):
    """The gradient is taken at the worst place near the weights, then applied at the weights by a plain optimiser."""

    base: Plain = Sgd()  # noqa: RUF009 (it is frozen, so it can be shared)
    """The optimiser that takes the step."""

    @abstractmethod
    def climbed(self, gradient: Gradient, params: Params) -> Params:
        """The worst place near these weights, to first order."""

    @property
    def lr(self) -> float:
        return self.base.lr

    def with_lr(self, lr: Any) -> Self:
        return replace(self, base=self.base.with_lr(lr))

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
        moves = each("mul", grads, self.rho / (norm(grads) + 1e-12))
        return named(params, each("add", tuple(params.values()), moves))


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
        scaled = each("mul", tuple(gradient(params).values()), scales)
        moves = each("mul", each("mul", scaled, scales), self.rho / (norm(scaled) + 1e-12))
        return named(params, each("add", weights, moves))
