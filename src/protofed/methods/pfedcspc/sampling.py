"""Several prototypes per class: K-means inside the class, and means of random samples of each cluster."""

from typing import Annotated

import torch
from torch import Tensor

from protofed.api.roles import Count, Prototype
from protofed.prototypes.kmeans import kmeans
from protofed.tree import record


@record
class Slots:
    """Room for a fixed number of prototypes of each class, of which some may be empty."""

    mean: Annotated[Tensor, Prototype()]  # (C · S, D), slots by class; zero where empty
    count: Annotated[Tensor, Count()]  # (C · S,), 1 where there is a prototype, else 0


def empty_slots(num_classes: int, per_class: int, dim: int) -> Slots:
    return Slots(torch.zeros(num_classes * per_class, dim), torch.zeros(num_classes * per_class))


def sampled_mean(points: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """The mean of a random part of the points, drawn without replacement, at least one of them, Eq. (9)."""
    size = max(1, round(share * len(points)))
    drawn = torch.randperm(len(points), generator=generator)[:size]
    return points[drawn].double().mean(0).to(points.dtype)


def sampled_prototypes(
    z: Tensor, y: Tensor, num_classes: int, clusters: int, repeats: int, share: float, generator: torch.Generator
) -> Slots:
    """`repeats` sampled means of each of the clusters of each class, Eq. (8) and (9)."""
    slots = empty_slots(num_classes, clusters * repeats, z.shape[-1])
    mean = slots.mean.view(num_classes, clusters, repeats, -1)
    count = slots.count.view(num_classes, clusters, repeats)
    for c in sorted(set(y.tolist())):
        features = z[y == c]
        labels = kmeans(features, min(clusters, len(features)), generator, restarts=1)  # Eq. (8)
        for j in sorted(set(labels.tolist())):
            for t in range(repeats):
                mean[c, j, t] = sampled_mean(features[labels == j], share, generator)
            count[c, j] = 1
    return slots
