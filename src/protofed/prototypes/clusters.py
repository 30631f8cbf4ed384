"""Prototypes of clusters of clients: within a cluster, and between clusters by their similarity."""

from typing import Literal

import torch
from torch import Tensor

from protofed.prototypes.class_means import Prototypes

Rho = Literal["cosine", "softmax", "uniform"]
"""How cosines become shares: divided by their sum, by a softmax, or not at all: then all shares are equal."""


def members_mean(sent: list[tuple[Prototypes, float]], previous: Prototypes) -> Prototypes:
    """A cluster's prototypes: the weighted mean over the members that own each class; a class without one stays."""
    total = torch.zeros_like(previous.mean, dtype=torch.float64)
    weights, owners = torch.zeros_like(previous.count, dtype=torch.float64), torch.zeros_like(previous.count)
    for prototypes, weight in sent:
        total += weight * prototypes.mean.double() * prototypes.is_known[:, None]
        weights += weight * prototypes.is_known
        owners += prototypes.is_known
    mean = (total / weights.where(weights > 0, 1.0)[:, None]).to(previous.mean.dtype)
    is_new = weights > 0
    return Prototypes(torch.where(is_new[:, None], mean, previous.mean), torch.where(is_new, owners, previous.count))


def similarity_shares(clusters: Prototypes, rho: Rho, temperature: float) -> Tensor:
    """ρ in Eq. (5) and (6), (J, J), float64: what each cluster (a row) takes from each; rows sum to 1."""
    mean = clusters.mean.double()
    if rho == "uniform":
        return torch.full((len(mean), len(mean)), 1 / len(mean), dtype=torch.float64)
    is_shared = clusters.is_known[:, None] & clusters.is_known  # (J, J, C)
    products = (torch.einsum("jcd,kcd->jkc", mean, mean) * is_shared).sum(-1)  # (J, J)
    squares = (mean.square().sum(-1)[:, None] * is_shared).sum(-1)  # (J, J), of a row's classes shared with a column
    cosines = products / (squares * squares.T).sqrt().clamp(min=1e-16)
    itself = torch.eye(len(mean), dtype=torch.bool)
    cosines = torch.where(itself, 1.0, cosines.clamp(min=0))
    if rho == "cosine":
        return cosines / cosines.sum(-1, keepdim=True)
    return torch.where(is_shared.any(-1) | itself, cosines / temperature, -torch.inf).softmax(-1)


def blended_prototypes(clusters: Prototypes, shares: Tensor) -> Prototypes:
    """What each cluster learns against, Eq. (7), over the clusters that have the class."""
    weights = shares[:, :, None] * clusters.is_known  # (J, J, C)
    total = weights.sum(1)  # (J, C)
    mean = torch.einsum("jkc,kcd->jcd", weights, clusters.mean.double()) / total.where(total > 0, 1.0)[..., None]
    return Prototypes(mean.to(clusters.mean.dtype), ((weights > 0) * clusters.count).sum(1))
