"""Prototypes of many clients as a training set for the server: augmented, contrasted, and made into exemplars."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofed.api.contexts import ServerContext
from protofed.api.requests import Objective
from protofed.data.batches import Batch, Data
from protofed.methods._shared.losses import known_cross_entropy
from protofed.methods.pfedcspc.sampling import Slots
from protofed.nn.networks import Model
from protofed.nn.precision import product
from protofed.optim.optimizers import Sgd
from protofed.prototypes.class_means import Prototypes
from protofed.prototypes.contrast import ABSENT, EPS
from protofed.tree import Params, Tree, record

STRENGTHS = (0.1, 0.3, 0.5)
"""The values that λ of Eq. (10) is drawn from."""
BATCH = 100
"""Prototypes in a batch of the calibration."""

ROW_BY_ROW = (nn.Sequential, nn.Linear, nn.ReLU, nn.LeakyReLU, nn.GELU, nn.Tanh, nn.Identity, nn.LayerNorm)
"""Layers that treat each row of a batch as if it were alone."""
MOST_TOGETHER = 1024
"""Rows of a batch, or classes, that one program of the GPU's kernels holds."""

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
    """What each prototype is augmented with: first `A` others of its class, then `A` of another class."""

    rows: Tensor  # (M, 2 · A), of the pool; its own where there is no other
    step: Tensor  # (M, 2 · A), −λ and then λ: the share of the way to the partner

    @property
    def same(self) -> Tensor:
        return self.rows[:, : self.rows.shape[1] // 2]

    @property
    def other(self) -> Tensor:
        return self.rows[:, self.rows.shape[1] // 2 :]

    @property
    def strength(self) -> Tensor:
        """λ, (M, A)."""
        return self.step[:, self.step.shape[1] // 2 :]


@dataclass(frozen=True)
class Contrasts:
    """The contrasts of the server's objective, Eq. (11) and (12), and their settings."""

    across: bool
    """Whether prototypes are contrasted across clients, Eq. (12)."""
    augmented: bool
    """Whether augmented prototypes are, Eq. (11)."""
    weight: float
    temperature: float
    easy_weight: float
    margin: float

    def objective(
        self, logits: Tensor, z: Tensor, pairs: Tensor, client: Tensor, is_known: Tensor, batch: Batch
    ) -> Tensor:
        """Eq. (17), of logits (B, C), embeddings (B, P) and embedded pairs (B, 2 · A, P), ()."""
        if _has_kernels(z, logits):
            inputs = batch.y, client, batch.weight, is_known
            loss: Tensor = _ByKernels.apply(logits, z, pairs, *inputs, self)[0]  # type: ignore[no-untyped-call]
            return loss
        each = known_cross_entropy(logits, batch.y, is_known)
        if self.across:
            separation = weighted_contrast(z, batch.y, client, batch.weight, self.temperature, self.easy_weight)
            each = each + self.weight * separation
        if self.augmented:
            positive, negative = pairs.chunk(2, dim=1)
            each = each + self.weight * augmented_contrast(z, positive, negative, self.margin)
        return batch.mean(each)


class _ByKernels(torch.autograd.Function):
    """The objective on a GPU, and its gradients at logits, embeddings and pairs."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        from protofed.kernels.calibration import with_slopes  # Triton comes with torch for GPUs only

        *tensors, contrasts = inputs
        loss, slopes = with_slopes(contrasts, *tensors)
        return loss, *slopes

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """One after another: there is one server."""
        *tensors, contrasts = inputs
        found = []
        for k in range(info.batch_size):
            of_one = [leaf if dim is None else leaf.select(dim, k) for leaf, dim in zip(tensors, dims, strict=False)]
            found.append(_ByKernels.apply(*of_one, contrasts))  # type: ignore[no-untyped-call]
        return tuple(map(torch.stack, zip(*found, strict=True))), (0,) * 4

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, *slopes = output
        ctx.set_materialize_grads(False)  # no zeros as gradients of the slopes
        ctx.mark_non_differentiable(*slopes)
        ctx.save_for_backward(*slopes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *(grads[0] * slope for slope in ctx.saved_tensors), *[None] * 5


def _has_kernels(z: Tensor, logits: Tensor) -> bool:
    return z.is_cuda and z.dtype == torch.float32 and max(len(z), logits.shape[-1]) <= MOST_TOGETHER


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
    strength = strengths[torch.randint(len(strengths), same.shape, generator=generator)]
    return Partners(torch.cat([same, other], 1), torch.cat([-strength, strength], 1))


def _drawn(may: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """For each row `count` columns that it may have, with replacement; its own number where it may have none."""
    weight = may.float()
    none = ~may.any(-1)
    weight[none, none.nonzero().squeeze(1)] = 1.0
    return torch.multinomial(weight, count, replacement=True, generator=generator)


def augmented(u: Tensor, rows: Tensor, pool: Pool, partners: Partners) -> Tensor:
    """u⁺, beyond u (B, D) as seen from its own class, then u⁻, on the way to another class, (B, 2 · A, D), Eq. (10).
    `rows` (B,) are those of u in the pool."""
    u, step = u[:, None], partners.step[rows][..., None]
    return torch.addcmul(u, step, pool.mean[partners.rows[rows]] - u)


def embedded(model: Model, u: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """The embeddings of prototypes (B, D) and of their pairs (B, 2 · A, D), computed together where no layer mixes the
    rows of a batch."""
    if all(type(layer) in ROW_BY_ROW for layer in model.networks.modules("projection")):
        sizes = [len(u), len(u) * pairs.shape[1]]
        z, others = torch.split(model.embedding(torch.cat([u, pairs.flatten(0, 1)])), sizes)
    else:
        z, others = model.embedding(u), model.embedding(pairs.flatten(0, 1))
    return z, others.view(*pairs.shape[:2], -1)


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
