"""Training under differential privacy (DP-SGD: Abadi et al., CCS 2016), with the losses that methods have.

Each record's gradient is that of the method's own loss on a batch of this record alone, by vmap. The plan is the one of
any other fit: each record is in one batch of an epoch, so all steps of an epoch are one release. Sums are divided by
the size of a full batch, which tells nothing of a batch that is not full.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.func import grad, vmap

from protofed.api.requests import Fitted, Objective, PrivateFit
from protofed.data.batches import Batch, batch_at, training_plan
from protofed.nn.precision import Precision
from protofed.runtimes.divergence import Diverged, are_finite
from protofed.tree import Params

CHUNK_BYTES = 2**26
"""Of the gradients of records that are in memory at a time."""
BYTES_PER_NUMBER = 32
"""A gradient, the same in float64 and its clipped form, and what autograd keeps meanwhile."""


def private_fit(request: PrivateFit, precision: Precision = "float32") -> Fitted:
    """Alternates one noised optimiser step for each objective on every batch of the seeded plan."""
    draws = torch.Generator().manual_seed(request.seed)
    plan = training_plan(request.data, request.batch_size, request.epochs, request.transform, draws)
    if request.is_sum:
        return Fitted(
            gradient_sum(request, batch_at(request.data, plan, 0, request.transform), precision), (), (), None
        )
    trained, params = request.trained(), {name: leaf.detach() for name, leaf in request.params.items()}
    states = [request.optimizer.init(weights) for weights in trained]
    for step in range(len(plan.index)):
        batch = batch_at(request.data, plan, step, request.transform)
        for i, names in enumerate(trained):
            weights = {name: params[name] for name in names}
            slope = partial(_noised, request, i, batch, dict(params), precision)
            weights, states[i] = request.optimizer.step(slope, weights, states[i])
            params |= weights
    request.networks.check_unchanged()
    if not all(are_finite([(params, ())])):
        raise Diverged(
            "weights are not finite, which are made of clipped and noised gradients: lower the learning rate"
        )
    return Fitted(params, (), (), None)


def gradient_sum(request: PrivateFit, batch: Batch, precision: Precision) -> Params:
    """The sum over a batch of the clipped gradients of its records."""
    [weights], [mechanism] = request.trained(), request.mechanisms
    of_records = _gradients(request, request.objectives[0], batch, request.params, list(weights), precision)
    released = mechanism.released(sum((mechanism.clipped(rows).sum(0) for rows in of_records), torch.zeros(())))
    pieces = torch.split(released, [leaf.numel() for leaf in weights.values()])
    return {name: piece.view_as(leaf) for (name, leaf), piece in zip(weights.items(), pieces, strict=True)}


def _noised(request: PrivateFit, i: int, batch: Batch, params: Params, precision: Precision, weights: Params) -> Params:
    """The gradient at these weights: clipped, summed, noised, and divided by the size of a full batch."""
    mechanism = request.mechanisms[i]
    of_records = _gradients(request, request.objectives[i], batch, params | weights, list(weights), precision)
    total = sum((mechanism.clipped(rows).sum(0) for rows in of_records), torch.zeros(()))  # guard: sum-not-mean
    noised = mechanism.released(total) / min(len(request.data), request.batch_size)  # guard: constant-batch-size
    pieces = torch.split(noised, [leaf.numel() for leaf in weights.values()])
    grads = {
        name: piece.view_as(leaf).to(leaf.dtype) for (name, leaf), piece in zip(weights.items(), pieces, strict=True)
    }
    if request.penalty is None:
        return grads
    return {name: grads[name] + pull for name, pull in _penalty(request, params, weights, precision).items()}


def _gradients(
    request: PrivateFit, objective: Objective, batch: Batch, params: Params, names: list[str], precision: Precision
) -> Iterator[Tensor]:
    """The gradients of single records (n, P), in parts that fit in memory. Rows that fill a batch have none."""

    def loss(weights: Params, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        model = request.networks.model({**params, **weights}, training=True, precision=precision)
        one = torch.ones_like(index, dtype=torch.float32)[None]
        record = Batch(x[None], y[None], one, index[None], batch.is_last_epoch, batch.number + index)
        return objective.loss(model, record, *request.context)

    weights = {name: params[name] for name in names}
    numbers = sum(leaf.numel() for leaf in weights.values())
    size = max(1, CHUNK_BYTES // (BYTES_PER_NUMBER * numbers))
    of_record = vmap(grad(loss), in_dims=(None, 0, 0, 0), randomness="different")
    counts = torch.nonzero(batch.weight)[:, 0]
    for rows in torch.split(counts, size):
        grads = of_record(weights, batch.x[rows], batch.y[rows], batch.index[rows])
        yield torch.cat([grads[name].reshape(len(rows), -1) for name in names], 1)


def _penalty(request: PrivateFit, params: Params, weights: Params, precision: Precision) -> Params:
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in weights.items()}
    model = request.networks.model({**params, **leaves}, training=True, precision=precision)
    penalty: Callable[..., Tensor] = request.penalty  # type: ignore[assignment]
    grads = torch.autograd.grad(penalty(model, *request.context), list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, grads, strict=True))
