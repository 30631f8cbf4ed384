"""Training that diverges: noticed when a fit ends, then explained by repeating the fit with every value checked.

To check every step would slow down every fit. A fit is a function of its request, so one that has failed can be
repeated: then every operation of the losses, every gradient and every new weight is checked, and the first that is not
finite is named.
"""

import linecache
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from protofed import tree
from protofed.api.requests import Fit
from protofed.optim.optimizers import Gradient, Optimizer
from protofed.tree import Params, Tree

TORCH = str(Path(torch.__file__).parent)
MASKS = {"masked_fill", "masked_fill_", "where", "full", "full_like", "new_full", "fill_", "__setitem__"}
"""Operations that write infinities on purpose."""


class Diverged(ArithmeticError):
    """A loss or a weight of a fit was not finite; the message says where that began."""


def are_finite(fits: Sequence[tuple[Tree, Iterable[Tensor]]]) -> list[bool]:
    """Whether all results and all losses of each fit are finite, in one look at the device."""
    # guard: losses-weights-not-finite-noticed
    return torch.stack([_largest(results, losses) for results, losses in fits]).isfinite().tolist()


def _largest(results: Tree, losses: Iterable[Tensor]) -> Tensor:
    """The sum of the largest sizes: not finite if and only if one of the values is not."""
    sizes = tree.norms(tree.leaves(results), torch.inf)
    return torch.cat([sizes, *(loss.detach().double().reshape(-1) for loss in losses)]).sum()


def explained(request: Fit, fit: Callable[[Fit], Any]) -> Diverged:
    """What went wrong in a fit, found by repeating it."""
    if isinstance(request.optimizer, _WatchedOptimizer):  # this is the repetition, whose checks found nothing
        return Diverged("buffers or folded sums were not finite, though every loss, gradient and weight was")
    steps = request.epochs * ceil(len(request.data) / request.batch_size)
    witness = _Witness(f"of {steps}", len(request.objectives))
    objectives = tuple(replace(o, loss=_Watched(o.loss, witness)) for o in request.objectives)
    try:
        fit(replace(request, objectives=objectives, optimizer=_WatchedOptimizer(request.optimizer, witness)))
    except Diverged as error:
        return error
    return Diverged("its losses or weights were not finite; done again by itself, the same training stays finite")


@dataclass
class _Witness:
    """How far a repeated fit has come."""

    num_steps: str
    num_objectives: int
    taken: int = 0
    """Optimiser steps so far, one for each objective and batch."""
    harmless: set[str] = field(default_factory=set)
    """Operations that gave infinities while the loss stayed finite, as masks do."""

    def found(self, what: str) -> Diverged:
        step, objective = divmod(self.taken, self.num_objectives)
        of_which = f", objective {objective + 1} of {self.num_objectives}" if self.num_objectives > 1 else ""
        return Diverged(f"step {step + 1} {self.num_steps}{of_which}: {what}")


@dataclass(frozen=True)
class _Watched:
    """A loss, each of whose operations is checked."""

    loss: Callable[..., Tensor]
    witness: _Witness

    def __call__(self, *arguments: Any) -> Tensor:
        with _Operations(self.witness.harmless) as operations:
            loss = self.loss(*arguments)
        if loss.isfinite().all():
            self.witness.harmless |= {place for place, _, _ in operations.noted}
            return loss
        # Operations with a gradient come first: others do not reach the weights.
        noted = sorted(operations.noted, key=lambda one: not one[2])
        first = noted[0][1] if noted else "no operation of it was seen to begin"
        raise self.witness.found(f"the loss was {loss.item():g}: {first}")


class _Operations(TorchFunctionMode):
    """Notes the operations with finite arguments whose values are not finite."""

    def __init__(self, harmless: set[str]) -> None:
        super().__init__()
        self._harmless = harmless
        self.noted: list[tuple[str, str, bool]] = []
        """The place in the code, a description, and whether a gradient flows through it."""

    def __enter__(self) -> Self:
        self._base = sys._getframe(1)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        if name not in MASKS and not _is_finite(value) and _is_finite((args, kwargs)):
            place, text = _place(sys._getframe(1), self._base)
            if place not in self._harmless:
                has_gradient = any(leaf.requires_grad for leaf in tree.leaves(value) if isinstance(leaf, Tensor))
                self.noted.append((place, f"it began with `{name}` {text}", has_gradient))
        return value


@dataclass(frozen=True)
class _WatchedOptimizer:
    """An optimiser, each of whose gradients and steps is checked."""

    base: Optimizer
    witness: _Witness

    def for_round(self, round: int) -> Self:
        return replace(self, base=self.base.for_round(round))

    def init(self, params: Params) -> Tree:
        return self.base.init(params)

    def step(self, gradient: Gradient, params: Params, state: Tree) -> tuple[Params, Tree]:
        weights, state = self.base.step(lambda at: self._checked(gradient, at), params, state)
        bad = _not_finite(weights)
        if bad:
            raise self.witness.found(f"the optimiser's step took {bad} out of bounds, from a finite gradient")
        self.witness.taken += 1
        return weights, state

    def _checked(self, gradient: Gradient, at: Params) -> Params:
        grads = gradient(at)
        bad = _not_finite(grads)
        if bad:
            raise self.witness.found(f"the loss was finite, but the gradient of {bad} was not{_origin(gradient, at)}")
        return grads


def _origin(gradient: Gradient, at: Params) -> str:
    """The operation whose derivative is not finite, if torch can tell."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch repeats as a warning what the exception says
            with torch.autograd.detect_anomaly():
                gradient(at)
    except RuntimeError as error:
        return f" ({str(error).rstrip('.')})"
    return ""


def _not_finite(params: Params) -> str:
    bad = [name for name, leaf in params.items() if not leaf.isfinite().all()]
    return ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")


def _is_finite(value: Tree) -> bool:
    floats = (leaf for leaf in tree.leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    return all(bool(leaf.isfinite().all()) for leaf in floats)


def _place(frame: FrameType | None, base: FrameType) -> tuple[str, str]:
    """The place of an operation: the innermost line, and the line of the loss that called it."""
    frames: list[FrameType] = []
    while frame is not None and frame is not base:
        if not frame.f_code.co_filename.startswith(TORCH):
            frames.append(frame)
        frame = frame.f_back
    if not frames:
        return "torch", "within torch"
    innermost, term = frames[0], frames[-1]
    text = f"in {_line(innermost)}"
    return text, text if term is innermost else f"{text}, for {_line(term)}"


def _line(frame: FrameType) -> str:
    name = Path(frame.f_code.co_filename).name
    source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return f"{frame.f_code.co_qualname} ({name}, line {frame.f_lineno}: `{source}`)"
