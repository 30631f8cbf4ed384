"""A Gaussian for each class: at a client, pooled over clients, and as a source of features."""

from typing import Annotated

import torch
from torch import Tensor

from protofed.api.method import Uploads
from protofed.api.roles import Count, PerClass, Prototype
from protofed.data.batches import Data
from protofed.tree import record

LONE_VARIANCE = 1e-3
"""Of each dimension, for a class of which there is one example."""


@record
class ClassGaussians:
    count: Annotated[Tensor, Count()]  # (C,), examples of each class; 0 marks an absent class
    mean: Annotated[Tensor, Prototype()]  # (C, P)
    covariance: Annotated[Tensor, PerClass()]  # (C, P, P), divided by count − 1; zero where the count is at most 1


def no_gaussians(num_classes: int, width: int) -> ClassGaussians:
    square = torch.zeros(num_classes, width, width)
    return ClassGaussians(torch.zeros(num_classes), torch.zeros(num_classes, width), square)


def class_gaussians(z: Tensor, y: Tensor, num_classes: int) -> ClassGaussians:
    """Count, mean and covariance of the features (n, P) of each class."""
    gaussians = no_gaussians(num_classes, z.shape[-1])
    for c in y.bincount(minlength=num_classes).nonzero().flatten().tolist():
        features = z[y == c].double()
        centred = features - features.mean(0)
        gaussians.count[c] = len(features)
        gaussians.mean[c] = features.mean(0)
        gaussians.covariance[c] = centred.T @ centred / max(len(features) - 1, 1)
    return gaussians


def pooled(uploads: Uploads[ClassGaussians], like: ClassGaussians) -> ClassGaussians:
    """Count, mean and covariance of the features of all clients together, in float64."""
    count, mean, scatter = like.count.double(), like.mean.double(), like.covariance.double()
    for _, upload in uploads:
        added, total = upload.count.double(), (count + upload.count).clamp(min=1)
        delta = (upload.mean.double() - mean) * (added > 0)[:, None]  # (C, P), from the mean so far to the client's
        between = (count * added / total)[:, None, None] * delta[:, :, None] * delta[:, None, :]
        scatter = scatter + (added - 1).clamp(min=0)[:, None, None] * upload.covariance.double() + between
        mean = mean + (added / total)[:, None] * delta
        count = count + added
    return ClassGaussians(count, mean, scatter / (count - 1).clamp(min=1)[:, None, None])


@record
class ClassMoments:
    """Sums over examples, which sums over clients keep; all float64."""

    count: Tensor  # (C,)
    total: Tensor  # (C, P), Σ z
    square: Tensor  # (C, P, P), Σ z zᵀ


def moments(gaussians: ClassGaussians) -> ClassMoments:
    """What a client's examples add to the sums."""
    count, mean = gaussians.count.double(), gaussians.mean.double()
    scatter = (count - 1).clamp(min=0)[:, None, None] * gaussians.covariance.double()
    return ClassMoments(count, count[:, None] * mean, scatter + count[:, None, None] * outer(mean))


def of_moments(sums: ClassMoments) -> ClassGaussians:
    """The Gaussians of the examples behind the sums. It loses the digits that `pooled` keeps, but needs no upload by
    itself."""
    mean = sums.total / sums.count.clamp(min=1)[:, None]
    scatter = sums.square - sums.count[:, None, None] * outer(mean)
    covariance = scatter / (sums.count - 1).clamp(min=1)[:, None, None]
    return ClassGaussians(sums.count, mean, covariance * (sums.count > 1)[:, None, None])


def outer(mean: Tensor) -> Tensor:
    return mean[:, :, None] * mean[:, None, :]


def virtual_features(gaussians: ClassGaussians, samples: int, draws: torch.Generator) -> Data:
    """Features drawn from the Gaussian of every class that there is."""
    features, labels = [], []
    for c in (gaussians.count > 0).nonzero().flatten().tolist():
        covariance = gaussians.covariance[c]
        if gaussians.count[c] == 1:
            covariance = LONE_VARIANCE * torch.eye(len(covariance), dtype=covariance.dtype)
        normal = torch.randn(samples, len(covariance), dtype=covariance.dtype, generator=draws)
        features.append(gaussians.mean[c] + normal @ square_root(covariance))
        labels.append(torch.full((samples,), c))
    return Data.of(torch.cat(features).float(), torch.cat(labels))


def square_root(covariance: Tensor) -> Tensor:
    """The symmetric root: it does not depend on the choice of eigenvectors, and small changes change it little."""
    values, vectors = torch.linalg.eigh(covariance)
    root: Tensor = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    return root
