"""What is done for each batch of a request, as pure functions.

A body is a function `(carry, inputs, batch, slope) -> (carry, output)`: `carry` goes from step to step, `inputs` stay
as they are. It must not leave the device, branch on a tensor or draw, since executors record it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from protofed import tree
from protofed.api.requests import Objective
from protofed.data.batches import Batch
from protofed.nn.networks import Model, Networks
from protofed.nn.precision import Precision
from protofed.optim.optimizers import HasRate, Optimizer, in_place_step
from protofed.tree import Params, Tree

LossOf = Callable[[Params, Params, Tree], tuple[Tensor, Tree]]
"""The loss at trained weights and buffers, given all else that it reads, and the statistic folded beside it; changes
the buffers in place."""
Slope = Callable[[LossOf, Params, Params, Tree, bool], tuple[Params, Params, Tensor, Tree]]
"""Maps a loss, its arguments and whether buffers may change in place to the gradient, the new buffers, the loss, and
the statistic folded beside it."""


def by_autograd(
    loss_of: LossOf, weights: Params, buffers: Params, rest: Tree, in_place: bool
) -> tuple[Params, Params, Tensor, Tree]:
    buffers = buffers if in_place else {name: leaf.clone() for name, leaf in buffers.items()}
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in weights.items()}
    with torch.enable_grad():
        loss, value = loss_of(leaves, buffers, rest)
    grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, grads, strict=True)), buffers, loss.detach(), value


def by_transform(
    loss_of: LossOf, weights: Params, buffers: Params, rest: Tree, _: bool
) -> tuple[Params, Params, Tensor, Tree]:
    """The same in a way that vmap can map, where nothing is changed in place."""

    def both(leaves: Params) -> tuple[Tensor, tuple[Params, Tensor, Tree]]:
        copies = {name: leaf.clone() for name, leaf in buffers.items()}
        loss, value = loss_of(leaves, copies, rest)
        return loss, (copies, loss.detach(), value)

    grads, (changed, loss, value) = torch.func.grad(both, has_aux=True)(weights)
    return grads, changed, loss, value


def by_vmap(is_shared: Callable[[Any], bool]) -> Slope:
    """The same for many clients, whose tensors are stacked, but for those that they share."""

    def slope(
        loss_of: LossOf, weights: Params, buffers: Params, rest: Tree, _: bool
    ) -> tuple[Params, Params, Tensor, Tree]:
        leaves, structure = pytree.tree_flatten((weights, buffers, rest))

        def one(leaves: list[Tensor]) -> tuple[Params, Params, Tensor, Tree]:
            weights, buffers, rest = pytree.tree_unflatten(leaves, structure)
            return by_transform(loss_of, weights, buffers, rest, False)

        found: tuple[Params, Params, Tensor, Tree]
        found = torch.vmap(one, in_dims=([None if is_shared(leaf) else 0 for leaf in leaves],))(leaves)
        return found

    return slope


class Body(Protocol):
    @property
    def networks(self) -> Networks: ...

    def __call__(
        self, carry: Tree, inputs: Tree, batch: Batch, slope: Slope, in_place: bool = False
    ) -> tuple[Tree, Tree]:
        """With `in_place` it may change the tensors of `carry`."""


@dataclass(frozen=True)
class FitBody:
    """One optimiser step for each objective. `carry` is the parameters, the optimisers' states, the sum of the losses
    in float64, which is finite as long as all of them are, and the sums of `fold`."""

    networks: Networks
    objectives: tuple[Objective, ...]
    trained: tuple[tuple[str, ...], ...]
    optimizer: Optimizer
    has_rate: bool
    """Whether the learning rate is among the inputs, since it changes from round to round."""
    fold: Callable[..., Tree] | None
    precision: Precision

    def __call__(
        self, carry: Tree, inputs: Tree, batch: Batch, slope: Slope, in_place: bool = False
    ) -> tuple[Tree, Tree]:
        params, states, losses, folded = carry
        rate, context = inputs
        optimizer = self.optimizer
        if self.has_rate and isinstance(optimizer, HasRate):
            optimizer = optimizer.with_lr(rate.squeeze())
        step = (in_place_step(optimizer) if in_place else None) or optimizer.step
        states = list(states)
        for i, objective in enumerate(self.objectives):
            weights = tree.select(params, self.trained[i])
            fold = self.fold if i == 0 else None
            gradient = _Gradient(self, objective, fold, params, context, batch, slope, in_place)
            weights, states[i] = step(gradient, weights, states[i])
            params = {**params, **gradient.buffers, **weights}
            losses = losses + gradient.losses
            if fold is not None:
                folded = _added(folded, gradient.folded, batch.is_last_epoch)
        return (params, states, losses, folded), None


def _added(sums: Tree | None, value: Tree, is_last_epoch: Tensor) -> Tree:
    """The sums with one more value, if it is of the last epoch; the value alone where there are no sums yet."""
    if sums is None:
        return value

    def added(total: Tensor, leaf: Tensor) -> Tensor:
        is_last = is_last_epoch.view(-1, *[1] * (total.dim() - 1)) if is_last_epoch.dim() else is_last_epoch
        return torch.where(is_last, total + leaf, total)

    return tree.map(added, sums, value)


class _Gradient:
    """The gradient as a function of the trained weights. Buffers and the folded statistic are those of its first call:
    they belong to the weights themselves, not to other points that an optimiser tries."""

    def __init__(
        self,
        body: FitBody,
        objective: Objective,
        fold: Callable[..., Tree] | None,
        params: Params,
        context: Tree,
        batch: Batch,
        slope: Slope,
        in_place: bool,
    ) -> None:
        self._body, self._objective, self._fold = body, objective, fold
        self._rest, self._slope = (params, context, batch), slope
        self._is_first, self._in_place = True, in_place
        self.losses: Tensor | float = 0.0
        """The loss at the weights themselves, and 0 times those at other points: NaN once one of them is not finite."""
        self.buffers = _without(params, body.networks.trainable)
        self.folded: Tree = ()

    def __call__(self, weights: Params) -> Params:
        in_place = self._in_place and self._is_first
        grads, buffers, loss, value = self._slope(self._loss, weights, self.buffers, self._rest, in_place)
        self.losses = self.losses + (loss.double() if self._is_first else 0 * loss)
        if self._is_first:
            self.buffers, self.folded, self._is_first = buffers, value, False
        return grads

    def _loss(self, weights: Params, buffers: Params, rest: Tree) -> tuple[Tensor, Tree]:
        params, context, batch = rest
        params = {**params, **buffers, **weights}
        model = self._body.networks.model(params, training=True, precision=self._body.precision)
        loss: Tensor = self._objective.loss(model, batch, *context)
        if self._fold is None or not self._is_first:
            return loss, ()
        with torch.no_grad():
            return loss, tree.map(Tensor.detach, self._fold(model, batch, *context))


def _without(params: Params, names: tuple[str, ...]) -> Params:
    excluded = set(names)
    return {name: leaf for name, leaf in params.items() if name not in excluded}


@dataclass(frozen=True)
class TotalBody:
    """A statistic's sums, in float64."""

    networks: Networks
    statistic: Callable[..., Tree]
    precision: Precision

    def __call__(
        self, carry: Tree, inputs: Tree, batch: Batch, slope: Slope, in_place: bool = False
    ) -> tuple[Tree, Tree]:
        value = self.value(inputs, batch)
        return tree.map(lambda total, leaf: total + leaf, carry, value), None

    def value(self, inputs: Tree, batch: Batch) -> Tree:
        params, context = inputs
        return self.statistic(_evaluated(self, params), batch, *context)


@dataclass(frozen=True)
class MapBody:
    """A function's value for each batch."""

    networks: Networks
    function: Callable[..., Tree]
    precision: Precision

    def __call__(
        self, carry: Tree, inputs: Tree, batch: Batch, slope: Slope, in_place: bool = False
    ) -> tuple[Tree, Tree]:
        return carry, self.value(inputs, batch)

    def value(self, inputs: Tree, batch: Batch) -> Tree:
        params, context = inputs
        return self.function(_evaluated(self, params), batch, *context)


def _evaluated(body: TotalBody | MapBody, params: Params) -> Model:
    return body.networks.model(params, precision=body.precision)
