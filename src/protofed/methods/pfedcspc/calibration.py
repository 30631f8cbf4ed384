"""Prototypes of many clients as a training set for the server: augmented, contrasted, and made into exemplars."""

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.api.contexts import ServerContext
from protofed.api.requests import Objective
from protofed.data.batches import Data
from protofed.methods.pfedcspc.sampling import Slots
from protofed.nn.precision import product
from protofed.optim.optimizers import Sgd
from protofed.prototypes.class_means import Prototypes
from protofed.prototypes.contrast import ABSENT, EPS
from protofed.tree import Params, Tree, record

STRENGTHS = (0.1, 0.3, 0.5)
"""The values that λ of Eq. (10) is drawn from."""
BATCH = 100
"""Prototypes in a batch of the calibration."""

Steps = list[tuple[int, float]]
"""Epochs and learning rate of consecutive fits."""


@record
class Pool:
    """The prototypes of all clients of a round."""

    mean: Tensor  # (M, D)
    label: Tensor  # (M,), their classes
    client: Tensor  # (M,), whose they are: the position of the client in the round


@record
class Partners:
    """What each prototype is augmented with, `A` times over."""

    same: Tensor  # (M, A), rows of the pool: another prototype of the class, or itself
    other: Tensor  # (M, A), rows of the pool: a prototype of another class, or itself
    strength: Tensor  # (M, A), λ


def pooled(slots: list[Slots], num_classes: int) -> Pool:
    """The prototypes that exist, client by client."""
    per_class = len(slots[0].count) // num_classes
    label = torch.arange(num_classes).repeat_interleave(per_class)
    exists = [client.count > 0 for client in slots]
    return Pool(
        torch.cat([client.mean[e] for client, e in zip(slots, exists, strict=True)]),
        torch.cat([label[e] for e in exists]),
        torch.cat([torch.full((int(e.sum()),), k) for k, e in enumerate(exists)]),
    )


def drawn_partners(pool: Pool, count: int, generator: torch.Generator) -> Partners:
    """Partners for Eq. (10), drawn inside each prototype's client.

    A prototype that is its client's only one of the class is its own partner. A client of one class takes prototypes of
    other classes from other clients.
    """
    same = torch.empty(len(pool.label), count, dtype=torch.int64)
    other = torch.empty_like(same)
    for k in range(int(pool.client.max()) + 1):
        rows = (pool.client == k).nonzero().squeeze(1)  # (R,)
        labels = pool.label[rows]
        is_same = labels[:, None] == labels
        same[rows] = rows[_drawn(is_same & ~torch.eye(len(rows), dtype=torch.bool), count, generator)]
        if is_same.all():
            elsewhere = (pool.label != labels[0]).expand(len(rows), -1)
            drawn = _drawn(elsewhere, count, generator)
            other[rows] = drawn if elsewhere.any() else rows[:, None].expand(-1, count)
        else:
            other[rows] = rows[_drawn(~is_same, count, generator)]
    strengths = torch.tensor(STRENGTHS)
    return Partners(same, other, strengths[torch.randint(len(strengths), same.shape, generator=generator)])


def _drawn(may: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """For each row `count` columns that it may have, with replacement; its own number where it may have none."""
    weight = may.float()
    none = ~may.any(-1)
    weight[none, none.nonzero().squeeze(1)] = 1.0
    return torch.multinomial(weight, count, replacement=True, generator=generator)


def augmented(u: Tensor, same: Tensor, other: Tensor, strength: Tensor) -> tuple[Tensor, Tensor]:
    """u⁺, beyond u as seen from its own class, and u⁻, on the way to another class; (B, A, D) each, Eq. (10)."""
    u, strength = u[:, None], strength[..., None]
    return u + strength * (u - same), u + strength * (other - u)


def augmented_contrast(z: Tensor, positive: Tensor, negative: Tensor, margin: float) -> Tensor:
    """How much nearer than by the margin a negative is, mean over the augmentations, (B,), Eq. (11) with a hinge."""
    near = (z[:, None] - positive).square().sum(-1)  # (B, A)
    far = (z[:, None] - negative).square().sum(-1)
    return F.relu(near - far + margin).mean(-1)


def weighted_contrast(
    z: Tensor, y: Tensor, client: Tensor, weight: Tensor, temperature: float, easy_weight: float
) -> Tensor:
    """−log of the share of each other prototype of the class among all others, mean over them, (B,), Eq. (12).

    Pairs that are easy (one class at one client, two classes at two clients) count `easy_weight` times. Zero for a
    prototype whose class has no other one in the batch.
    """
    unit = F.normalize(z.float(), dim=-1, eps=EPS)
    is_class, is_client = y[:, None] == y, client[:, None] == client
    sigma = torch.where(is_class ^ is_client, 1.0, easy_weight)
    others = (weight > 0) & ~torch.eye(len(y), dtype=torch.bool, device=y.device)  # (B, B)
    logits = torch.where(others, product(unit, unit.T) / temperature + sigma.log(), ABSENT)
    positive = (is_class & others).float()
    logs = logits - logits.logsumexp(-1, keepdim=True)
    return -(positive * logs).sum(-1) / positive.sum(-1).clamp(min=1)


def class_centres(values: Tensor, pool: Pool, previous: Prototypes) -> Prototypes:
    """The mean over clients of their mean values of each class, Eq. (14) and (16); an absent class stays as it was."""
    num_classes, num_clients = len(previous.count), int(pool.client.max()) + 1
    pair = pool.label * num_clients + pool.client  # (M,), one number for each class of each client
    size = pair.bincount(minlength=num_classes * num_clients).view(num_classes, num_clients)
    owners = (size > 0).sum(-1)  # (C,)
    # A prototype's share in its class: one of its client's, and its client one of the owners.
    share = 1 / (size.flatten()[pair].double() * owners[pool.label])
    total = torch.zeros_like(previous.mean, dtype=torch.float64)
    total.index_add_(0, pool.label, values.double() * share[:, None])
    is_new = owners > 0
    mean = torch.where(is_new[:, None], total.to(previous.mean.dtype), previous.mean)
    return Prototypes(mean, torch.where(is_new, owners.to(previous.count.dtype), previous.count))


def mixing_weights(losses: Tensor, temperature: float) -> Tensor:
    """How much each model counts for each client, from its losses on the client's prototypes, (K, K), Eq. (4)."""
    return (-losses.double() / temperature).softmax(-1)


def knowledge(z: Tensor, exemplars: Prototypes, temperature: float) -> Tensor:
    """The share of each class in the similarities to the exemplars, (B, C); none for a class without one, Eq. (15)."""
    unit, targets = F.normalize(z, dim=-1, eps=EPS), F.normalize(exemplars.mean, dim=-1, eps=EPS)
    return torch.where(exemplars.is_known, product(unit, targets.T) / temperature, ABSENT).softmax(-1)


@torch.no_grad()
def client_losses(params: Params, pool: Pool, server: ServerContext) -> Tensor:
    """The mean cross-entropy of one client's model on the prototypes of each client, (K,), L_sup in Eq. (4)."""
    logits = server.networks.model(params).scores(pool.mean)
    each = F.cross_entropy(logits, pool.label, reduction="none").double()  # (M,)
    total = torch.zeros(int(pool.client.max()) + 1, dtype=torch.float64).index_add(0, pool.client, each)
    return total / pool.client.bincount()


def schedule(epochs: int, rate: float, round: int) -> Steps:
    """Epochs and learning rate of the consecutive fits of one calibration."""
    start = rate * (1.0 if round <= 5 else 0.1 if round <= 40 else 0.01)
    return [(min(30, epochs - done), start * 0.1**k) for k, done in enumerate(range(0, epochs, 30))]


def retrained(
    params: Params, objective: Objective, context: tuple[Pool, *tuple[Tree, ...]], steps: Steps, server: ServerContext
) -> Params:
    """The weights after consecutive fits on the prototypes of the pool, the first of the contexts."""
    pool = context[0]
    for epochs, rate in steps:
        params = server.fit(
            objective,
            params=params,
            data=Data.of(pool.mean, pool.label),
            context=context,
            epochs=epochs,
            batch_size=BATCH,
            optimizer=Sgd(lr=rate, weight_decay=1e-5),
        )
    return params
