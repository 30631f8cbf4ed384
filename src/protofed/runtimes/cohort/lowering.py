"""Requests as loops: a body that takes one batch, over and over, on values that stay where they are.

Requests with equal bodies and shapes can be run together.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from protofed import tree
from protofed.api.requests import Fit, Map, Request, Total
from protofed.data.batches import Batch, Data, Plan, batch_at, training_plan
from protofed.data.transforms import Draws, Transform
from protofed.nn.precision import Precision
from protofed.optim.optimizers import HasRate, Optimizer
from protofed.runtimes.cohort.bodies import Body, FitBody, MapBody, TotalBody, by_autograd
from protofed.runtimes.device import CPU, on
from protofed.tree import Params, Ragged, Tree

LARGEST_BATCH = 1024
"""Examples in a batch of a request that does not train."""

MOST_SEEN = 128
"""Kinds of requests whose first trial is kept; a method may make a new kind in every round."""

MOST_FRESH = 8
"""Initial optimiser states that are kept, each as large as its weights."""

MOST_PADDED = 64
"""Leaves of ragged contexts that are kept beside their padded form."""

RAGGED_ROWS = 32
"""Ragged leaves are padded to a multiple of so many rows."""


@dataclass(frozen=True)
class Loop:
    body: Body
    carry: Tree
    inputs: Tree
    data: Data
    plan: Plan  # its index holds positions 0..n-1 in `data`; on the CPU
    transform: Transform
    answer: Callable[[Tree, Tree], Any]
    """Makes the answer to the request, from the last carry and the outputs (S, B, ...) of all steps."""
    draws: bool
    """Whether its body draws from torch's own generator, as dropout does. Found by a trial, like the next."""
    step_bytes: int
    """The memory that a step takes on a GPU."""
    example: Tree = None
    """The output of one batch, for bodies that have outputs."""

    @property
    def num_steps(self) -> int:
        return len(self.plan.index)

    @property
    def batch_size(self) -> int:
        return self.plan.index.shape[1]

    @cached_property
    def key(self) -> Hashable:
        """Equal for loops that one recorded program can run, if their examples come from the same store."""
        specs = spec(self.carry), spec(self.inputs), spec(self.example)
        return self.body, self.transform, self.batch_size, self.data.x.dtype, self.data.x.shape[1:], *specs


def spec(value: Tree) -> Hashable:
    leaves, structure = pytree.tree_flatten(value)
    return structure, tuple(None if leaf is None else (leaf.dtype, tuple(leaf.shape)) for leaf in leaves)


class Lowering:
    """Makes loops of requests. To be used outside `on(device)`, since plans are made on the CPU."""

    def __init__(self, precision: Precision) -> None:
        self._precision = precision
        self._seen: dict[Hashable, _Trial] = {}
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
        changes = request.rate_changes or optimizer.for_round(1) != optimizer  # from round to round
        if isinstance(optimizer, HasRate) and changes:
            rate, steady = torch.full((1,), optimizer.lr, device=device), optimizer.with_lr(1.0)
        inputs, has_rate = (rate, request.context), bool(len(rate))
        body = FitBody(
            networks, request.objectives, tuple(map(tuple, trained)), steady, has_rate, request.fold, self._precision
        )
        plan = _fit_plan(request)
        fresh, zero = self._beginning(steady, trained, device)
        start = params, fresh if request.states is None else list(request.states), zero
        key = body if request.fold is None else (body, spec(inputs), request.data.x.shape[1:])
        trial = self._tried(key, device, lambda: _step_of(request, plan, body, start, inputs))
        carry = (*start, trial.value)
        answer = _fitted if request.states is None else _fitted_with_states
        return Loop(body, carry, inputs, request.data, plan, request.transform, answer, trial.draws, trial.num_bytes)

    def _beginning(self, optimizer: Optimizer, trained: list[Params], device: torch.device) -> tuple[Tree, Tensor]:
        """The optimisers' states before the first step, and the 0 to which losses are added. Clients share these
        tensors, so that one copy serves all, unless an optimiser's initial state depends on the weights."""
        key = (optimizer, spec(trained), device)
        if key not in self._fresh:
            if len(self._fresh) == MOST_FRESH:
                self._fresh.clear()
            others = [{name: 2 * leaf + 1 for name, leaf in weights.items()} for weights in trained]
            states, of_others = ([optimizer.init(weights) for weights in start] for start in (trained, others))
            is_fixed = all(map(torch.equal, tree.leaves(states), tree.leaves(of_others)))
            self._fresh[key] = (states if is_fixed else None), torch.zeros((), dtype=torch.float64, device=device)
        kept, zero = self._fresh[key]
        return ([optimizer.init(weights) for weights in trained] if kept is None else kept), zero

    def _total(self, request: Total[Any]) -> Loop:
        body = TotalBody(request.networks, request.statistic, self._precision)
        inputs = (dict(request.params), request.context)
        trial = self._output(request, body)
        sums = tree.map(lambda leaf: torch.zeros(leaf.shape, dtype=torch.float64, device=leaf.device), trial.value)
        kinds = [leaf.dtype for leaf in tree.leaves(trial.value)]

        def answer(carry: Tree, _: Tree) -> Tree:
            leaves = tree.leaves(carry)
            return tree.with_leaves(carry, [leaf.to(kind) for leaf, kind in zip(leaves, kinds, strict=True)])

        plan = _evaluation_plan(len(request.data))
        num_bytes = trial.num_bytes * plan.index.shape[1]
        return Loop(body, sums, inputs, request.data, plan, request.transform, answer, trial.draws, num_bytes)

    def _map(self, request: Map[Any]) -> Loop:
        body = MapBody(request.networks, request.function, self._precision)
        inputs = (dict(request.params), request.context)
        trial = self._output(request, body)
        n = len(request.data)

        def answer(_: Tree, outputs: Tree) -> Tree:
            return tree.map(lambda leaf: leaf.flatten(0, 1)[:n], outputs)

        plan = _evaluation_plan(n)
        num_bytes = trial.num_bytes * plan.index.shape[1]
        return Loop(
            body, (), inputs, request.data, plan, request.transform, answer, trial.draws, num_bytes, trial.value
        )

    def _output(self, request: Total[Any] | Map[Any], body: TotalBody | MapBody) -> "_Trial":
        """With one example."""
        key = (body, spec((request.params, request.context)), request.data.x.shape[1:])

        def value() -> Tree:
            params = {**request.params, **request.networks.buffer_copies(request.params)}
            return body.value((params, request.context), _first(request))

        with torch.no_grad():
            return self._tried(key, request.data.y.device, value)

    def _tried(self, key: Hashable, device: torch.device, work: Callable[[], Tree]) -> "_Trial":
        """Some work, done once for all requests of one kind. Generators that it draws from are put back."""
        if key not in self._seen:
            if len(self._seen) == MOST_SEEN:
                self._seen.clear()
            with on(device), torch.random.fork_rng(devices=[] if device == CPU else [device]):
                generators, memory = _generators(device), _Memory(device)
                value = work()
                draws = not all(map(torch.equal, generators, _generators(device)))
                self._seen[key] = _Trial(value, draws, memory.peak())
        return self._seen[key]


@dataclass(frozen=True)
class _Trial:
    value: Tree
    draws: bool
    """Whether the work drew from torch's own generators."""
    num_bytes: int
    """The memory of a GPU that it took at its peak, beside what was there."""


class _Memory:
    """Of a GPU, since this was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._before if self._device.type == "cuda" else 0


def _generators(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([] if device == CPU else [torch.cuda.get_rng_state(device)])]


def _fitted(last: Tree, _: Tree) -> Tree:
    """The weights, the folded sums, the sum of the losses, and no states."""
    params, _, losses, folded = last
    return params, folded, losses, ()


def _fitted_with_states(last: Tree, _: Tree) -> Tree:
    params, states, losses, folded = last
    return params, folded, losses, tuple(states)


def _step_of(request: Fit, plan: Plan, body: FitBody, start: Tree, inputs: Tree) -> Tree:
    """Takes a first step, and keeps nothing of it but zeros in the shape of the folded statistic. If a step without a
    fold fails, the real one will raise the error."""
    device = request.data.y.device
    first: Plan = tree.map(lambda leaf: leaf[:1].to(device), plan)
    first = replace(first, index=request.data.index[first.index])
    try:
        batch = batch_at(request.data, first, 0, request.transform)
        (*_, value), _ = body((*start, None), inputs, batch, by_autograd)
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
def _evaluation_plan(n: int) -> Plan:
    """One pass in order. Batch sizes are powers of two, so that clients of different sizes share programs."""
    size = min(LARGEST_BATCH, 1 << (n - 1).bit_length())
    steps = ceil(n / size)
    position = torch.arange(steps * size)
    weight = (position < n).float().view(steps, size)
    index = (position % n).view(steps, size)
    return Plan(index, weight, torch.ones(steps, dtype=torch.bool), torch.arange(steps), Draws(None, None, None))
