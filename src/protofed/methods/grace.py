"""GRACE (a reconstruction of its client): meta-learning steps that align features, and a mean by agreement.

Zhang, Zhou, Xu, Zhang, Wang, Chen, Zhang: GRACE: A Generalized and Personalized Federated Learning Method for Medical
Imaging, MICCAI 2023. The server is that of the authors' code. The client's part of that code is not public, and is
rebuilt here from the paper's description.

Sends: weights. Keeps: nothing. Server: mean of the updates weighted by the number of examples times how well a client's
update agrees with those of the others.

Departures:
1. The client's step is a guess: with one half of a batch a trial step, with the other half the gradient after it, of
   cross-entropy and of the distance between covariances of features (CORAL) to the received model; to first order.
2. The halves are every other row of the batch. Where the second has no row of its own, as in a last batch of one, the
   rows that fill the batch stand in, which are the client's too. Elsewhere copies fill it; if its rows are odd in
   number, copies of one half's rows are in the other, where BatchNorm alone sees them.
3. The trial step is one of plain gradient descent; the outer one is of the configured optimiser.
4. The statistics of BatchNorm are those of the second half; what the trial step sees does not move them. The received
   model is in evaluation mode.
5. Agreement is measured on parameters; the statistics of BatchNorm are averaged with the same weights.
6. Agreement is divided by the largest one always; the authors' code does so when it exceeds 1. The mean is the same.
7. A single client agrees with itself; where no two updates agree at all, numbers of examples decide alone.
8. The other distances of the authors' code, by kernels and by an adversary, are left out.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.api.contexts import ServerContext
from protofed.api.method import NonNegative, Positive, SettingErrors, Uploads
from protofed.api.task import TaskSpec
from protofed.data.batches import Batch
from protofed.errors import BadInput
from protofed.methods._shared.models import needs_two_rows, own_statistics
from protofed.methods.families import GlobalModel, Weights, WeightUpload
from protofed.nn.networks import Model
from protofed.optim.optimizers import Optimizer
from protofed.tree import Mean, Nothing, Params

LEAST_AGREEMENT = 1e-3
"""What is left of the agreement of the client that agrees least, where it is negative."""


@dataclass(frozen=True)
class GRACE(GlobalModel[Nothing]):
    tags = ("global", "server-side", "reconstruction")
    trial_rate: NonNegative = 0.01
    """a, the learning rate of the trial step."""
    alignment_weight: NonNegative = 0.1
    """β, the weight of the distance between covariances."""
    server_rate: Positive = 1.0
    """η_s, how far the server goes towards the mean."""

    not_by_record = "it trains on one half of a batch after a step on the other"
    needs_each_upload = "it weighs clients by how well their updates agree"

    def validate(self, optimizer: Optimizer, batch_size: int, spec: TaskSpec | None) -> SettingErrors:
        if batch_size < 2:
            yield "training.batch_size", "GRACE halves its batches: set it to 2 or more"
        elif batch_size < 4 and spec and needs_two_rows(spec, partial(self.networks, spec, min(spec.clients))):
            why = "GRACE halves its batches, and this network has a BatchNorm that needs two rows: set it to 4 or more"
            yield "training.batch_size", why

    def aggregate(self, state: Weights, uploads: Uploads[WeightUpload], server: ServerContext) -> Weights:
        """The mean by numbers of examples and agreement, which needs all updates side by side."""
        replies = [upload for _, upload in uploads]
        names = server.networks.trainable
        updates = torch.stack([flat(state.params, names) - flat(r.params, names) for r in replies])  # (N, P)
        mean = Mean()
        for reply, weight in zip(replies, agreement(updates).tolist(), strict=True):
            mean.add(reply.params, self.weight_of(reply.num_examples) * weight)
        return Weights(stepped(state.params, mean.value(), names, self.server_rate))

    def loss(self, model: Model, batch: Batch, message: Weights, memory: Nothing) -> Tensor:
        """What is descended after the trial step."""
        first, second = halves(batch)
        tried = self.tried(model, first)
        z = tried.features(second.x)
        loss = second.cross_entropy(tried.scores(z))
        if self.alignment_weight:
            with torch.no_grad():
                z_received = model.frozen(message.params).features(second.x)
            loss = loss + self.alignment_weight * coral(z, z_received, second.weight)
        return loss

    def tried(self, model: Model, batch: Batch) -> Model:
        """The model after a trial step; the step itself has no gradient."""
        trainable = {name: leaf for name, leaf in model.trainable.items() if leaf.requires_grad}
        loss = batch.cross_entropy(own_statistics(model).logits(batch.x))
        grads = torch.autograd.grad(loss, list(trainable.values()), materialize_grads=True)
        moved = {name: leaf - self.trial_rate * g for (name, leaf), g in zip(trainable.items(), grads, strict=True)}
        return model.at({**model.params, **moved})


def halves(batch: Batch) -> tuple[Batch, Batch]:
    """Every other row of a batch, and the rows between."""
    if len(batch.y) < 2:
        raise BadInput("GRACE halves its batches: configure a batch size of at least 2")
    first, second = (
        replace(batch, x=batch.x[k::2], y=batch.y[k::2], weight=batch.weight[k::2], index=batch.index[k::2])
        for k in (0, 1)
    )
    weight = torch.where(second.weight.any(), second.weight, 1.0)
    return first, replace(second, weight=weight)


def coral(z: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """The squared distance between the covariances of two sets of features, over 4 D²."""
    return (covariance(z, weight) - covariance(target, weight)).square().sum() / (4 * z.shape[-1] ** 2)


def covariance(z: Tensor, weight: Tensor) -> Tensor:
    """Of the rows that count, (D, D)."""
    centred = (z - weight @ z / weight.sum().clamp(min=1)) * weight[:, None]
    return centred.T @ centred / (weight.sum() - 1).clamp(min=1)


def agreement(updates: Tensor) -> Tensor:
    """How well each update (N, P) agrees with the others, relative to the one that does best, (N,)."""
    unit = F.normalize(updates, dim=-1)
    cosines = (unit @ unit.T).fill_diagonal_(0)
    mean = cosines.sum(-1) / max(len(updates) - 1, 1)
    if mean.min() < 0:
        mean = mean - mean.min() + LEAST_AGREEMENT
    return mean / mean.max() if mean.max() > 0 else torch.ones_like(mean)


def stepped(start: Params, mean: Params, names: tuple[str, ...], rate: float) -> Params:
    """`rate` of the way from the start to the mean for the named entries, all of it for the others."""
    return {**mean, **{n: ((1 - rate) * start[n].double() + rate * mean[n].double()).to(mean[n].dtype) for n in names}}


def flat(params: Params, names: tuple[str, ...]) -> Tensor:
    """All parameters in one row, (P,), float64."""
    return torch.cat([params[name].flatten().double() for name in names])
