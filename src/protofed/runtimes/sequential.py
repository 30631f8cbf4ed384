"""The reference runtime: one client after another, one request at a time, plain autograd.

It defines what every other runtime must reproduce.
"""

from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from protofed import tree
from protofed.data import Batch, batch_at, evaluation_plan, training_plan
from protofed.method import ClientId, Fit, Map, Objective, Reply, Request, Total
from protofed.networks import matching, without
from protofed.optim import Gradient
from protofed.runtimes.jobs import Failure, Job, failure_of
from protofed.seeds import derive_seed
from protofed.tree import Params, Tree

if TYPE_CHECKING:
    from protofed.runtimes.federation import Federation

T = TypeVar("T")


class Sequential:
    def open(self, federation: "Federation") -> None:
        pass

    def close(self) -> None:
        pass

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[ClientId, Reply[Any, Any] | Failure]]:
        for job in jobs:
            try:
                yield job.client, self._reply(job)
            except Exception as error:  # whatever goes wrong at a client concerns that client only
                yield job.client, failure_of(job.client, error)

    def _reply(self, job: Job) -> Reply[Any, Any]:
        reply = self._drive(job.start())
        if not isinstance(reply, Reply):
            raise TypeError(f"a step ends with a Reply, not with {type(reply).__name__}")
        return reply

    def answer(self, request: Request[Any]) -> Any:
        match request:
            case Fit():
                return fit(request)
            case Total():
                return total(request)
            case Map():
                return mapped(request)
        raise TypeError(f"unknown request {request!r}")

    def _drive(self, step: Coroutine[Request[Any], Any, T]) -> T:
        answer = None
        while True:
            try:
                request = step.send(answer)
            except StopIteration as end:
                result: T = end.value
                return result
            answer = self.answer(request)


def fit(request: Fit) -> Params:
    """Alternates one optimiser step for each objective on every batch of the seeded plan."""
    draws = torch.Generator().manual_seed(request.seed)
    plan = training_plan(request.data, request.batch_size, request.epochs, request.transform, draws)
    networks, params = request.networks, dict(request.params)
    networks.check(params)
    trainable = tree.select(params, networks.trainable)
    buffers = {name: leaf.clone() for name, leaf in params.items() if name not in trainable}
    params |= buffers  # the networks update them in place
    trained = [without(matching(trainable, o.trains), o.freezes) for o in request.objectives]
    for objective, names in zip(request.objectives, trained, strict=True):
        if not names:
            raise ValueError(f"no parameter matches {objective.trains} without {objective.freezes}")
    states = [request.optimizer.init(weights) for weights in trained]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(
            derive_seed(request.seed, "networks")
        )  # for networks that draw, such as dropout
        for step in range(len(plan.index)):
            batch = batch_at(request.data, plan, step, request.transform)
            for i, objective in enumerate(request.objectives):
                weights = {name: params[name] for name in trained[i]}
                slope = _gradient(request, objective, batch, params, buffers)
                weights, states[i] = request.optimizer.step(slope, weights, states[i])
                params |= weights
    networks.check_constants()
    return params


def _gradient(request: Fit, objective: Objective, batch: Batch, params: Params, buffers: Params) -> Gradient:
    """The gradient as a function of the trained weights. Buffers change at its first call only: statistics belong to
    the weights themselves, not to places that an optimiser tries."""
    is_first = True

    def gradient(weights: Params) -> Params:
        nonlocal is_first
        own = buffers if is_first else {name: leaf.clone() for name, leaf in buffers.items()}
        is_first = False
        leaves = {name: leaf.detach().requires_grad_() for name, leaf in weights.items()}
        model = request.networks.model({**params, **leaves, **own}, training=True)
        loss = objective.loss(model, batch, *request.context)
        grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        return dict(zip(leaves, grads, strict=True))

    return gradient


def total(request: Total[T]) -> T:
    """Sums over batches, accumulated in float64."""
    kinds: list[torch.dtype] = []
    sums: list[Tensor] = []
    value: Tree = None
    for value, _ in _evaluated(request, request.statistic):
        leaves = tree.leaves(value)
        kinds = kinds or [leaf.dtype for leaf in leaves]
        sums = [s + leaf for s, leaf in zip(sums, leaves, strict=True)] if sums else [leaf.double() for leaf in leaves]
    summed: T = tree.with_leaves(value, [s.to(kind) for s, kind in zip(sums, kinds, strict=True)])
    return summed


def mapped(request: Map[T]) -> T:
    pieces = [
        tree.map(lambda leaf, keep=batch.weight > 0: leaf[keep], value)
        for value, batch in _evaluated(request, request.function)
    ]
    joined: T = tree.map(lambda *leaves: torch.cat(leaves), *pieces)
    return joined


@torch.no_grad()
def _evaluated(request: Request[Any], function: Callable[..., Tree]) -> Iterator[tuple[Tree, Batch]]:
    model = request.networks.model(request.params)
    plan = evaluation_plan(request.data)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(request.seed, "networks"))
        for step in range(len(plan.index)):
            batch = batch_at(request.data, plan, step, request.transform)
            yield function(model, batch, *request.context), batch
    request.networks.check_constants()
