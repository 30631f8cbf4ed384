"""Class prototypes: the mean feature of each class at a client, and their mean over clients."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from protofed.api.contexts import ClientContext
from protofed.api.requests import Objective
from protofed.api.roles import Count, Prototype
from protofed.api.views import Points
from protofed.data.batches import Batch
from protofed.nn.networks import Model
from protofed.nn.precision import product
from protofed.tree import Params, Tree, record

PrototypeMode = Literal["running", "recomputed"]
"""`running`: the mean of the features that training saw in its last epoch (networks in training mode, varied images, a
moving model). `recomputed`: the mean of the trained model's features, in evaluation mode, over the unvaried data."""


@record
class Prototypes:
    mean: Annotated[Tensor, Prototype()]  # (C, D), zero where the class is absent
    count: Annotated[Tensor, Count()]  # (C,), what is behind each mean, examples or clients; 0 marks an absent class

    @property
    def is_known(self) -> Tensor:
        return self.count > 0


@record
class ClassSums:
    total: Tensor  # (C, D)
    count: Tensor  # (C,)

    def prototypes(self) -> Prototypes:
        return Prototypes(self.total / self.count.clamp(min=1)[:, None], self.count)


def ownership(prototypes: Prototypes) -> Prototypes:
    """The same means, saying which classes there are and not how many examples of each."""
    return Prototypes(prototypes.mean, prototypes.is_known.to(prototypes.count.dtype))


def points(prototypes: Prototypes) -> Points:
    """The known ones of prototypes (..., C, D), with their classes."""
    is_known = prototypes.is_known
    label = torch.arange(is_known.shape[-1], device=is_known.device).expand_as(is_known)
    return Points(prototypes.mean[is_known], label[is_known])


def no_prototypes(num_classes: int, dim: int) -> Prototypes:
    return Prototypes(torch.zeros(num_classes, dim), torch.zeros(num_classes))


def class_sums(z: Tensor, y: Tensor, weight: Tensor, num_classes: int) -> ClassSums:
    """Σ of the features of each class, and how many there are."""
    member = (y[:, None] == torch.arange(num_classes, device=y.device)) * weight[:, None]  # (B, C)
    return ClassSums(product(member.T, z), member.sum(0))


@dataclass(frozen=True)
class FeatureSums:
    """The statistic behind class means, for `total` and for the `fold` of a fit."""

    num_classes: int

    def __call__(self, model: Model, batch: Batch, *context: Tree) -> ClassSums:
        return class_sums(model.features(batch.x), batch.y, batch.weight, self.num_classes)


async def of_client(client: ClientContext, params: Params) -> Prototypes:
    """The class means of the client's examples under these weights, in evaluation mode."""
    sums = await client.total(FeatureSums(client.num_classes), params)
    return sums.prototypes()


async def fit_with_prototypes(
    client: ClientContext, objective: Objective, params: Params, context: tuple[Tree, ...], mode: PrototypeMode
) -> tuple[Params, Prototypes]:
    """The weights after training, and the client's class means in either mode."""
    if mode == "recomputed":
        fitted = await client.fit(objective, params=params, context=context)
        return fitted, await of_client(client, fitted)
    fold = FeatureSums(client.num_classes)
    fitted, sums = await client.fit(objective, params=params, context=context, fold=fold)
    return fitted, sums.prototypes()


def of_owner(prototypes: Prototypes) -> ClassSums:
    """What a client adds to the sum over the clients that own each class."""
    is_known = prototypes.is_known
    return ClassSums(prototypes.mean * is_known[:, None], is_known.to(prototypes.count.dtype))


def by_count(prototypes: Prototypes) -> ClassSums:
    """What a client adds to the sum in which each prototype counts as its `count` says."""
    count = prototypes.count.double()
    return ClassSums(prototypes.mean.double() * count[:, None], count)


def summed(of_clients: Iterable[ClassSums]) -> ClassSums:
    """The sum over clients, in float64."""
    totals, counts = zip(*((own.total.double(), own.count.double()) for own in of_clients), strict=True)
    return ClassSums(torch.stack(totals).sum(0), torch.stack(counts).sum(0))


def mean_of(sums: ClassSums, previous: Prototypes) -> Prototypes:
    """The mean prototype of each class, and what is behind it; a class that nobody sent stays as it was."""
    # guard: renormalisation-classes-over-their-holders
    mean = (sums.total / sums.count.clamp(min=1)[:, None]).to(previous.mean.dtype)
    is_new = sums.count > 0
    return Prototypes(
        torch.where(is_new[:, None], mean, previous.mean),  # guard: class-without-reply-keeps-prototype
        torch.where(is_new, sums.count.to(previous.count.dtype), previous.count),
    )
