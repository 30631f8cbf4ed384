"""The reference runtime: one client after another, one request at a time, plain autograd.

It defines what every other runtime must reproduce.
"""

from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from protofed import tree
from protofed.api.contexts import Reply
from protofed.api.requests import Fit, Fitted, Map, Objective, PrivateFit, Request, Total
from protofed.api.task import Task
from protofed.data.batches import Batch, batch_at, evaluation_plan, training_plan
from protofed.nn.networks import Model
from protofed.nn.precision import Precision
from protofed.optim.optimizers import Gradient
from protofed.runtimes.client_store import ClientStore, InMemoryStore
from protofed.runtimes.device import CPU, Residence, moved, working
from protofed.runtimes.divergence import are_finite, explained
from protofed.runtimes.isolation import SharedTensors, Watch, let_pass
from protofed.runtimes.jobs import Answer, Failure, Host, Job, Outcome, Reason, failure_of, taken
from protofed.runtimes.malloc import keep_freed_memory
from protofed.runtimes.private_fit import private_fit
from protofed.seeds import derive_seed
from protofed.tree import Params, Tree

T = TypeVar("T")


class Sequential:
    device = CPU
    precision: Precision = "float32"
    deterministic = True

    def __init__(self, device: str = "cpu", precision: Precision = "float32", deterministic: bool = True) -> None:
        self.device = torch.device(device)
        self.precision = precision
        self.deterministic = deterministic
        self.store: ClientStore = InMemoryStore()
        self._residence = Residence(self.device)
        self._shared = SharedTensors()

    def open(self, host: Host) -> AbstractContextManager[None]:
        keep_freed_memory()
        return working(self.device, self.precision, self.deterministic)

    def close(self) -> None:
        self._shared.forget()

    def placed(self, task: Task) -> Task:
        return task if self.device == CPU else self._residence.placed(task)

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        for job in jobs:
            yield job.client, self._outcome(job)

    def _outcome(self, job: Job) -> Answer | Failure:
        watch = Watch(self._shared, job.context)
        job = replace(job, message=watch.lent(job.message, "its message"))  # guard: messages-copied
        try:
            before = job.memory(self.store)
            before = before if job.receipt is None else watch.lent(before, "its memory")  # guard: memories-copied
            reply: Reply[Any, Any] | Failure = taken(job.client, self.reply(job, before))
        # whatever goes wrong at a client concerns that client only
        except BaseException as error:  # guard: leaving-is-a-failure
            let_pass(error)
            reply = failure_of(job.client, error)
        if change := watch.change():  # guard: changes-refused
            return Failure(job.client, Reason.CHANGED_SHARED, change)
        return reply if isinstance(reply, Failure) else job.finished(reply, before, self.store)

    def reply(self, job: Job, memory: Tree) -> Reply[Any, Any]:
        """What a step ends with that begins with this memory."""
        return self._drive(job.start(memory))

    def for_server(self) -> Callable[[Request[Any]], Any]:
        return Sequential(str(self.device), self.precision, self.deterministic).answer

    def answers(self, requests: Sequence[Request[Any]]) -> list[Any]:
        return [self.answer(request) for request in requests]

    def answer(self, request: Request[Any]) -> Any:
        match request:
            case PrivateFit():
                with _seeded(request):
                    return private_fit(request, self.precision)
            case Fit():
                return fit(request, self.precision)
            case Total():
                return total(request, self.precision)
            case Map():
                return mapped(request, self.precision)
        raise TypeError(f"unknown request {request!r}")

    def _drive(self, step: Coroutine[Request[Any], Any, T]) -> T:
        answer, error = None, None
        try:
            while True:
                request = step.send(answer) if error is None else step.throw(error)
                try:
                    answer, error = self.answer(request), None
                except BaseException as found:  # a method may know what to do about it
                    let_pass(found)
                    answer, error = None, found
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            error = None  # it holds this frame, which would hold it


def fit(request: Fit, precision: Precision = "float32") -> Fitted:
    """Alternates one optimiser step for each objective on every batch of the seeded plan."""
    draws = torch.Generator().manual_seed(request.seed)
    plan = training_plan(request.data, request.batch_size, request.epochs, request.transform, draws)
    networks, params = request.networks, dict(request.params)
    trained = request.trained()
    losses = _Losses()
    folded = _Folded(request.fold)
    is_last_epoch = plan.is_last_epoch.tolist() if request.fold else []
    buffers = networks.buffer_copies(params)
    params |= buffers  # the networks update them in place
    states = list(request.states or [request.optimizer.init(weights) for weights in trained])
    with _seeded(request):
        for step in range(len(plan.index)):
            batch = batch_at(request.data, plan, step, request.transform)
            for i, objective in enumerate(request.objectives):
                weights = {name: params[name] for name in trained[i]}
                fold = folded if i == 0 and request.fold and is_last_epoch[step] else None
                slope = _gradient(request, objective, batch, params, buffers, precision, losses, fold)
                weights, states[i] = request.optimizer.step(slope, weights, states[i])
                params |= weights
    networks.check_unchanged()
    left = () if request.states is None else tuple(states)
    if not all(are_finite([((params, folded.sums, left), losses.stacked)])):
        raise explained(request, partial(fit, precision=precision))
    return Fitted(params, folded.sums, left, losses.mean(len(plan.index)))


class _Losses:
    """The losses of a fit."""

    def __init__(self) -> None:
        self._all: list[Tensor] = []
        self._is_first: list[bool] = []

    def add(self, loss: Tensor, is_first: bool) -> None:
        """`is_first` says whether it is the loss at the weights themselves, not at others that an optimiser tries."""
        self._all.append(loss.detach() if loss.dim() == 0 else loss.detach().reshape(()))
        self._is_first.append(is_first)

    @cached_property
    def stacked(self) -> list[Tensor]:
        """All of them as one tensor, once the fit has ended; empty without any."""
        return [torch.stack(self._all).double()] if self._all else []

    def mean(self, num_batches: int) -> float | None:
        """Over the batches, in float64 and in their order."""
        if not num_batches:
            return None
        values: list[float] = self.stacked[0].tolist()
        return sum(value for value, is_first in zip(values, self._is_first, strict=True) if is_first) / num_batches


class _Folded:
    """The sums of a fit's `fold`, in the statistic's own dtype and the order of the batches."""

    def __init__(self, statistic: Callable[..., Tree] | None) -> None:
        self._statistic = statistic
        self.sums: Tree = ()

    @torch.no_grad()
    def add(self, model: Model, batch: Batch, context: tuple[Tree, ...]) -> None:
        assert self._statistic is not None
        value = tree.map(Tensor.detach, self._statistic(model, batch, *context))
        if self.sums == ():
            self.sums = tree.map(torch.zeros_like, value)
        self.sums = tree.map(torch.add, self.sums, value)


def _gradient(
    request: Fit,
    objective: Objective,
    batch: Batch,
    params: Params,
    buffers: Params,
    precision: Precision,
    losses: _Losses,
    folded: _Folded | None,
) -> Gradient:
    """The gradient as a function of the trained weights. Buffers and folded sums change at its first call only: they
    belong to the weights themselves, not to other points that an optimiser tries."""
    is_first = True

    def gradient(weights: Params) -> Params:
        nonlocal is_first
        changing = buffers if is_first else {name: leaf.clone() for name, leaf in buffers.items()}
        leaves = {name: leaf.detach().requires_grad_() for name, leaf in weights.items()}
        model = request.networks.model({**params, **leaves, **changing}, training=True, precision=precision)
        loss = objective.loss(model, batch, *request.context)
        if folded is not None and is_first:
            folded.add(model, batch, request.context)
        losses.add(loss, is_first)
        is_first = False
        grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        return {name: grad.contiguous() for name, grad in zip(leaves, grads, strict=True)}

    return gradient


def total(request: Total[T], precision: Precision = "float32") -> T:
    """Sums over batches, accumulated in float64."""
    kinds: list[torch.dtype] = []
    sums: list[Tensor] = []
    value: Tree = None
    for value, _ in _evaluated(request, request.statistic, precision):
        leaves = tree.leaves(value)
        kinds = kinds or [leaf.dtype for leaf in leaves]
        sums = [s + leaf for s, leaf in zip(sums, leaves, strict=True)] if sums else [leaf.double() for leaf in leaves]
    summed: T = tree.with_leaves(value, [s.to(kind) for s, kind in zip(sums, kinds, strict=True)])
    return summed


def mapped(request: Map[T], precision: Precision = "float32") -> T:
    pieces = [
        tree.map(lambda leaf, keep=batch.weight > 0: leaf[keep], value)
        for value, batch in _evaluated(request, request.function, precision)
    ]
    joined: T = tree.map(lambda *leaves: torch.cat(leaves), *pieces)
    return moved(joined, CPU) if request.to_cpu else joined


@torch.no_grad()
def _evaluated(
    request: Request[Any], function: Callable[..., Tree], precision: Precision
) -> Iterator[tuple[Tree, Batch]]:
    params = {**request.params, **request.networks.buffer_copies(request.params)}
    model = request.networks.model(params, precision=precision)
    plan = evaluation_plan(request.data)
    with _seeded(request):
        for step in range(len(plan.index)):
            batch = batch_at(request.data, plan, step, request.transform)
            yield function(model, batch, *request.context), batch
    request.networks.check_unchanged()


@contextmanager
def _seeded(request: Request[Any]) -> Iterator[None]:
    """For networks that draw from torch's own generator, such as dropout."""
    device = request.data.y.device
    with torch.random.fork_rng(
        devices=[] if device == CPU else [device], device_type=device.type if device != CPU else "cuda"
    ):
        torch.default_generator.manual_seed(derive_seed(request.seed, "networks"))
        if device != CPU:
            torch.cuda.manual_seed(derive_seed(request.seed, "networks"))
        yield
