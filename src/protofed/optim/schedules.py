"""Schedules: how the learning rate of clients changes over the rounds, whatever the optimiser.

A schedule is a share of lr for each round. Rounds are numbered t = 0, 1, ..., T − 1. The peak is round p = w − 1 with a
warm-up of w rounds, and round 0 without one.
"""

from dataclasses import dataclass
from math import cos, pi
from typing import Annotated, Protocol, runtime_checkable

from annotated_types import Ge, Interval

from protofed.optim.steps import HasRate, Optimizer


@runtime_checkable
class Schedule(Protocol):
    def share(self, round: int, num_rounds: int) -> float:
        """The learning rate of a round, as a share of lr."""


@dataclass(frozen=True)
class ConstantRate:
    """The learning rate stays as it is after the warm-up: its share is 1 from the peak on."""

    warmup: Annotated[int, Ge(0)] = 0
    """w, the rounds of the warm-up: the share of round t < w is (t + 1) / w. 0: none."""

    def share(self, round: int, num_rounds: int) -> float:
        """The learning rate of a round, as a share of lr."""
        peak = max(self.warmup - 1, 0)
        if round < peak:
            return (round + 1) / self.warmup
        return self.after_peak(round - peak, num_rounds - peak)

    def after_peak(self, round: int, num_rounds: int) -> float:
        """The share of a round if the peak is round 0 of so many rounds."""
        return 1.0


@dataclass(frozen=True)
class CosineRate(ConstantRate):
    """The learning rate falls along half a cosine, and reaches its final value when the last round has ended:
    final + (1 − final) · (1 + cos(π (t − p) / (T − p))) / 2, from the peak on."""

    final: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """The share of lr that is left at the end. No round trains with a rate of 0."""

    def after_peak(self, round: int, num_rounds: int) -> float:
        return self.final + (1 - self.final) * (1 + cos(pi * min(round / max(num_rounds, 1), 1.0))) / 2


@dataclass(frozen=True)
class StepRate(ConstantRate):
    """The learning rate falls in steps: its share is factor^⌊(t − p) / every⌋, from the peak on."""

    every: Annotated[int, Ge(1)] = 10
    """Rounds between two steps."""
    factor: Annotated[float, Interval(gt=0, le=1)] = 0.1
    """What the learning rate is multiplied by at each step."""

    def after_peak(self, round: int, num_rounds: int) -> float:
        return float(self.factor ** (round // self.every))


SCHEDULES: dict[str, type[ConstantRate]] = {"constant": ConstantRate, "cosine": CosineRate, "step": StepRate}


def scheduled(optimizer: Optimizer, share: float) -> Optimizer:
    """The optimiser with this share of its learning rate; it must have one, unless the share is 1."""
    if share == 1:
        return optimizer
    assert isinstance(optimizer, HasRate)
    return optimizer.with_lr(optimizer.lr * share)
