"""Requests as loops: a body that takes one batch, over and over, on values that stay where they are.

A body is a pure function `(carry, known, batch, slope) -> (carry, output)`. Requests with equal bodies and shapes can
be run together, in whatever way: the body does not know. It must not leave the device, branch on a tensor or draw.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from protofed import tree
from protofed.api.requests import Fit, Map, Objective, Request, Total
from protofed.data.batches import Batch, Data, Plan, batch_at, training_plan
from protofed.data.transforms import Draws, Transform
from protofed.nn.networks import Model, Networks
from protofed.nn.precision import Precision
from protofed.optim.optimizers import HasRate, Optimizer, in_place_step
from protofed.runtimes.device import CPU, on
from protofed.tree import Params, Ragged, Tree

LARGEST_BATCH = 1024
"""Of examples that are only looked at."""

MOST_SEEN = 128
"""Kinds of requests whose first trial is remembered; a method may make a new kind in every round."""

MOST_FRESH = 8
"""States of optimisers before the first step that are kept, each as large as the weights that it is for."""

MOST_PADDED = 64
"""Leaves of ragged contexts that are kept beside their padded form."""

RAGGED_ROWS = 32
"""Ragged leaves are padded to a multiple of so many rows."""

LossOf = Callable[[Params, Params], tuple[Tensor, Tree]]
"""The loss at trained weights and buffers, and the statistic folded beside it; changes the buffers in place."""
Slope = Callable[[LossOf, Params, Params, bool], tuple[Params, Params, Tensor, Tree]]
"""The gradient of a loss, the buffers after it, which may be changed where they are if so told, the loss, and the
statistic folded beside it."""


def by_autograd(
    loss_of: LossOf, weights: Params, buffers: Params, in_place: bool
) -> tuple[Params, Params, Tensor, Tree]:
    own = buffers if in_place else {name: leaf.clone() for name, leaf in buffers.items()}
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in weights.items()}
    with torch.enable_grad():
        loss, value = loss_of(leaves, own)
    grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, grads, strict=True)), own, loss.detach(), value


def by_transform(loss_of: LossOf, weights: Params, buffers: Params, _: bool) -> tuple[Params, Params, Tensor, Tree]:
    """The same in a way that vmap can map, where nothing is changed in place."""

    def both(leaves: Params) -> tuple[Tensor, tuple[Params, Tensor, Tree]]:
        own = {name: leaf.clone() for name, leaf in buffers.items()}
        loss, value = loss_of(leaves, own)
        return loss, (own, loss.detach(), value)

    grads, (own, loss, value) = torch.func.grad(both, has_aux=True)(weights)
    return grads, own, loss, value


class Body(Protocol):
    def __call__(
        self, carry: Tree, known: Tree, batch: Batch, slope: Slope, in_place: bool = False
    ) -> tuple[Tree, Tree]:
        """With `in_place` the carry may be changed where it is."""


@dataclass(frozen=True)
class FitBody:
    """One optimiser step for each objective. `carry` is the parameters, the optimisers' states, a number that is 0 as
    long as every loss was finite, and the sums of `fold`."""

    networks: Networks
    objectives: tuple[Objective, ...]
    trained: tuple[tuple[str, ...], ...]
    optimizer: Optimizer
    has_rate: bool
    """Whether the learning rate is the first thing known."""
    fold: Callable[..., Tree] | None
    precision: Precision

    def __call__(
        self, carry: Tree, known: Tree, batch: Batch, slope: Slope, in_place: bool = False
    ) -> tuple[Tree, Tree]:
        params, states, trouble, folded = carry
        rate, context = known
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
            trouble = trouble + gradient.trouble
            if fold is not None:
                folded = _added(folded, gradient.folded, batch.is_last_epoch)
        return (params, states, trouble, folded), None


def _added(sums: Tree | None, value: Tree, is_last_epoch: Tensor) -> Tree:
    """The sums with one more value, if it is of the last epoch; the value alone where there are no sums yet."""
    if sums is None:
        return value
    return tree.map(lambda total, leaf: torch.where(is_last_epoch, total + leaf, total), sums, value)


class _Gradient:
    """The gradient as a function of the trained weights. Buffers and the folded statistic are those of its first call:
    they belong to the weights themselves, not to places that an optimiser tries."""

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
        self._body, self._objective, self._fold, self._params = body, objective, fold, params
        self._context, self._batch, self._slope = context, batch, slope
        self._is_first, self._in_place = True, in_place
        self.trouble: Tensor | float = 0.0
        """0 times the losses: not a number once one of them was not finite."""
        self.buffers = without_names(params, body.networks.trainable)
        self.folded: Tree = ()

    def __call__(self, weights: Params) -> Params:
        grads, buffers, loss, value = self._slope(self._loss, weights, self.buffers, self._in_place and self._is_first)
        self.trouble = self.trouble + 0 * loss
        if self._is_first:
            self.buffers, self.folded, self._is_first = buffers, value, False
        return grads

    def _loss(self, weights: Params, buffers: Params) -> tuple[Tensor, Tree]:
        params = {**self._params, **buffers, **weights}
        model = self._body.networks.model(params, training=True, precision=self._body.precision)
        loss: Tensor = self._objective.loss(model, self._batch, *self._context)
        if self._fold is None or not self._is_first:
            return loss, ()
        with torch.no_grad():
            return loss, tree.map(Tensor.detach, self._fold(model, self._batch, *self._context))


@dataclass(frozen=True)
class TotalBody:
    """A statistic's sums, in float64."""

    networks: Networks
    statistic: Callable[..., Tree]
    precision: Precision

    def __call__(
        self, carry: Tree, known: Tree, batch: Batch, slope: Slope, in_place: bool = False
    ) -> tuple[Tree, Tree]:
        value = self.value(known, batch)
        return tree.map(lambda total, leaf: total + leaf, carry, value), None

    def value(self, known: Tree, batch: Batch) -> Tree:
        params, context = known
        return self.statistic(_looking(self, params), batch, *context)


@dataclass(frozen=True)
class MapBody:
    """A function's value for each batch."""

    networks: Networks
    function: Callable[..., Tree]
    precision: Precision

    def __call__(
        self, carry: Tree, known: Tree, batch: Batch, slope: Slope, in_place: bool = False
    ) -> tuple[Tree, Tree]:
        return carry, self.value(known, batch)

    def value(self, known: Tree, batch: Batch) -> Tree:
        params, context = known
        return self.function(_looking(self, params), batch, *context)


def _looking(body: TotalBody | MapBody, params: Params) -> Model:
    return body.networks.model(params, precision=body.precision)


@dataclass(frozen=True)
class Loop:
    body: Body
    carry: Tree
    known: Tree
    data: Data
    plan: Plan  # its index holds positions 0..n-1 in `data`; on the CPU
    transform: Transform
    answer: Callable[[Tree, Tree], Any]
    """What the request asked for, from the last carry and the outputs (S, B, ...) of all steps."""
    draws: bool
    """Whether its body drew from torch's own generator, as dropout does, when it was tried."""
    example: Tree = None
    """An output of one batch, for bodies that have outputs."""

    @property
    def num_steps(self) -> int:
        return len(self.plan.index)

    @property
    def batch_size(self) -> int:
        return self.plan.index.shape[1]

    @cached_property
    def key(self) -> Hashable:
        """Equal for loops that the same recorded work can do, if their examples come from the same store."""
        specs = spec(self.carry), spec(self.known), spec(self.example)
        return self.body, self.transform, self.batch_size, self.data.x.dtype, self.data.x.shape[1:], *specs


def spec(value: Tree) -> Hashable:
    leaves, structure = pytree.tree_flatten(value)
    return structure, tuple(None if leaf is None else (leaf.dtype, tuple(leaf.shape)) for leaf in leaves)


def without_names(params: Params, names: tuple[str, ...]) -> Params:
    excluded = set(names)
    return {name: leaf for name, leaf in params.items() if name not in excluded}


class Lowering:
    """Makes loops of requests; out of `on`, since their plans begin on the CPU."""

    def __init__(self, precision: Precision) -> None:
        self._precision = precision
        self._seen: dict[Hashable, tuple[Tree, bool]] = {}
        self._fresh: dict[Hashable, tuple[Tree | None, Tensor]] = {}
        self._padded: dict[Hashable, tuple[Tensor, Tensor]] = {}

    def forget(self) -> None:
        self._seen.clear()
        self._fresh.clear()
        self._padded.clear()

    def of(self, request: Request[Any]) -> Loop:
        request = replace(request, context=tree.map_ragged(self._pad, request.context))
        match request:
            case Fit():
                return self._fit(request)
            case Total():
                return self._total(request)
            case Map():
                return self._map(request)
        raise TypeError(f"unknown request {request!r}")

    def _pad(self, leaf: Tensor, ragged: Ragged) -> Tensor:
        """The leaf with rows up to a multiple of 32, so that what was recorded for one number of rows serves others.
        Clients that share a leaf share the padded one."""
        key = (id(leaf), leaf._version, ragged)
        if key not in self._padded:
            if len(self._padded) == MOST_PADDED:
                self._padded.clear()
            missing = RAGGED_ROWS * max(1, ceil(len(leaf) / RAGGED_ROWS)) - len(leaf)
            padded = torch.cat([leaf, leaf.new_full((missing, *leaf.shape[1:]), ragged.fill)])
            self._padded[key] = leaf, padded  # the leaf is kept alive: a new tensor may reuse its id()
        return self._padded[key][1]

    def _fit(self, request: Fit) -> Loop:
        networks, params, optimizer = request.networks, dict(request.params), request.optimizer
        trained = request.trained()
        device, steady = request.data.y.device, optimizer
        rate = torch.zeros(0, device=device)
        if isinstance(optimizer, HasRate) and optimizer.for_round(1) != optimizer:  # it changes from round to round
            rate, steady = torch.full((1,), optimizer.lr, device=device), optimizer.with_lr(1.0)
        known, has_rate = (rate, request.context), bool(len(rate))
        body = FitBody(
            networks, request.objectives, tuple(map(tuple, trained)), steady, has_rate, request.fold, self._precision
        )
        plan = _fit_plan(request)
        start = params, *self._beginning(steady, trained, device)
        key = body if request.fold is None else (body, spec(known), request.data.x.shape[1:])
        zeros, draws = self._tried(key, device, lambda: _step_of(request, plan, body, start, known))
        carry = (*start, zeros)
        return Loop(body, carry, known, request.data, plan, request.transform, _fitted, draws)

    def _beginning(self, optimizer: Optimizer, trained: list[Params], device: torch.device) -> tuple[Tree, Tensor]:
        """The optimisers' states before the first step, and that no loss was not finite. The same tensors for all
        clients that train alike, so that one copy serves all, unless an optimiser begins with something of the weights.
        """
        key = (optimizer, spec(trained), device)
        if key not in self._fresh:
            if len(self._fresh) == MOST_FRESH:
                self._fresh.clear()
            others = [{name: 2 * leaf + 1 for name, leaf in weights.items()} for weights in trained]
            states, there = ([optimizer.init(weights) for weights in start] for start in (trained, others))
            is_fixed = all(map(torch.equal, tree.leaves(states), tree.leaves(there)))
            self._fresh[key] = (states if is_fixed else None), torch.zeros((), device=device)
        kept, untroubled = self._fresh[key]
        return ([optimizer.init(weights) for weights in trained] if kept is None else kept), untroubled

    def _total(self, request: Total[Any]) -> Loop:
        body = TotalBody(request.networks, request.statistic, self._precision)
        known = (dict(request.params), request.context)
        value, draws = self._output(request, body)
        sums = tree.map(lambda leaf: torch.zeros(leaf.shape, dtype=torch.float64, device=leaf.device), value)
        kinds = [leaf.dtype for leaf in tree.leaves(value)]

        def answer(carry: Tree, _: Tree) -> Tree:
            leaves = tree.leaves(carry)
            return tree.with_leaves(carry, [leaf.to(kind) for leaf, kind in zip(leaves, kinds, strict=True)])

        plan = _looking_plan(len(request.data))
        return Loop(body, sums, known, request.data, plan, request.transform, answer, draws)

    def _map(self, request: Map[Any]) -> Loop:
        body = MapBody(request.networks, request.function, self._precision)
        known = (dict(request.params), request.context)
        example, draws = self._output(request, body)
        n = len(request.data)

        def answer(_: Tree, outputs: Tree) -> Tree:
            return tree.map(lambda leaf: leaf.flatten(0, 1)[:n], outputs)

        plan = _looking_plan(n)
        return Loop(body, (), known, request.data, plan, request.transform, answer, draws, example)

    def _output(self, request: Total[Any] | Map[Any], body: TotalBody | MapBody) -> tuple[Tree, bool]:
        """What one example gives, and whether that took draws."""
        key = (body, spec((request.params, request.context)), request.data.x.shape[1:])

        def value() -> Tree:
            params = {**request.params, **request.networks.buffer_copies(request.params)}
            return body.value((params, request.context), _first(request))

        with torch.no_grad():
            return self._tried(key, request.data.y.device, value)

    def _tried(self, key: Hashable, device: torch.device, work: Callable[[], Tree]) -> tuple[Tree, bool]:
        """What some work gives, and whether it drew from torch's own generators, which are put back: tried once for all
        requests that are alike."""
        if key not in self._seen:
            if len(self._seen) == MOST_SEEN:
                self._seen.clear()
            with on(device), torch.random.fork_rng(devices=[] if device == CPU else [device]):
                before = _generators(device)
                self._seen[key] = work(), not all(map(torch.equal, before, _generators(device)))
        return self._seen[key]


def _generators(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([] if device == CPU else [torch.cuda.get_rng_state(device)])]


def _fitted(last: Tree, _: Tree) -> Tree:
    """The weights, the folded sums, and the number that is 0 if all went well."""
    params, _, trouble, folded = last
    return params, folded, trouble


def _step_of(request: Fit, plan: Plan, body: FitBody, start: Tree, known: Tree) -> Tree:
    """Takes a first step, and keeps nothing of it but zeros in the shape of the folded statistic. If a step without a
    fold fails, whoever takes it in earnest will say so."""
    device = request.data.y.device
    first: Plan = tree.map(lambda leaf: leaf[:1].to(device), plan)
    first = replace(first, index=request.data.index[first.index])
    try:
        batch = batch_at(request.data, first, 0, request.transform)
        (*_, value), _ = body((*start, None), known, batch, by_autograd)
    except Exception:
        if body.fold is not None:
            raise
        return ()
    return tree.map(torch.zeros_like, value) if body.fold else ()


def _first(request: Request[Any]) -> Batch:
    """The first example alone."""
    data, index = request.data, request.data.index[:1]
    x = request.transform.clean(data.inputs(index))
    weight, is_last, number = torch.ones(1), torch.tensor(True), torch.tensor(0)
    return Batch(x, data.y[index], weight, index, is_last, number)


def _fit_plan(request: Fit) -> Plan:
    draws = torch.Generator().manual_seed(request.seed)
    positions = Data(torch.empty(0), torch.empty(0), torch.arange(len(request.data)))
    return training_plan(positions, request.batch_size, request.epochs, request.transform, draws)


@lru_cache
def _looking_plan(n: int) -> Plan:
    """One pass in order. Batches have few different sizes, so that clients of different sizes are alike."""
    size = min(LARGEST_BATCH, 1 << (n - 1).bit_length())
    steps = ceil(n / size)
    position = torch.arange(steps * size)
    weight = (position < n).float().view(steps, size)
    index = (position % n).view(steps, size)
    return Plan(index, weight, torch.ones(steps, dtype=torch.bool), torch.arange(steps), Draws(None, None, None))
