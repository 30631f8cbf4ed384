"""FPL in plain torch, after Eq. (3) to (12) of Huang and others, with the readings of the authors' code.

Those are: FINCH's coarsest partition of more than one cluster, the squared error as a mean over dimensions, and the
prototypes of the features that the last epoch saw. FINCH is by its adjacency: i and j are joined if one is the first
neighbour of the other, or both have the same.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofed.data.batches import Batch
from references.plain import (
    CLASSES,
    CLIENTS,
    FEATURES,
    ROUNDS,
    State,
    batches,
    class_means,
    counted,
    mean,
    network,
    state_of,
    train,
)

Clusters = dict[int, list[Tensor]]


def partition(points: list[Tensor]) -> list[list[int]]:
    """The components of FINCH's graph, by their first points."""
    n = len(points)
    cosine = [[F.cosine_similarity(a.double(), b.double(), dim=0).item() for b in points] for a in points]
    first = [max((j for j in range(n) if j != i), key=lambda j, i=i: cosine[i][j]) for i in range(n)]
    groups = [{i} for i in range(n)]
    for i in range(n):
        for j in range(n):
            if first[i] == j or first[j] == i or first[i] == first[j]:
                joined = groups[i] | groups[j]
                for k in joined:
                    groups[k] = joined
    return sorted({tuple(sorted(group)) for group in groups})


def clustered(points: list[Tensor], level: str) -> list[Tensor]:
    """The means of the clusters, each of its client prototypes."""
    if len(points) == 1:
        return points
    groups = [list(group) for group in partition(points)]
    while level == "last" and len(groups) > 1:
        centres = [torch.stack([points[i] for i in group]).mean(0) for group in groups]
        coarser = [[i for g in joined for i in groups[g]] for joined in partition(centres)]
        if len(coarser) == 1:
            break
        groups = [sorted(group) for group in coarser]
    return [torch.stack([points[i] for i in group]).mean(0) for group in sorted(groups)]


def terms(z: Tensor, y: int, clusters: Clusters, unbiased: dict[int, Tensor], tau: float, reduction: str) -> Tensor:
    """Eq. (8) and (10), of one example."""
    if y not in clusters:
        return 0 * z.sum()
    exps = {c: sum(torch.exp(F.cosine_similarity(z, p, dim=0) / tau) for p in own) for c, own in clusters.items()}
    squares = (z - unbiased[y]) ** 2
    return -torch.log(exps[y] / sum(exps.values())) + (squares.mean() if reduction == "mean" else squares.sum())


def rounds(start: State, tau: float, level: str = "last", reduction: str = "mean") -> dict:
    clusters: Clusters = {}
    unbiased: dict[int, Tensor] = {}
    owners = torch.zeros(CLASSES)
    for t in range(ROUNDS):
        trained, sent = {}, {}
        for client in CLIENTS:
            seen_z, seen_y = [], []

            def loss(model: nn.ModuleDict, batch: Batch) -> Tensor:
                rows = counted(batch)
                z, y = model["features"](batch.x)[rows], batch.y[rows]
                if batch.is_last_epoch:
                    seen_z.append(z.detach())
                    seen_y.append(y)
                each = [terms(a, int(b), clusters, unbiased, tau, reduction) for a, b in zip(z, y, strict=True)]
                return F.cross_entropy(model["classifier"](z), y) + torch.stack(each).sum() / len(rows)

            model = network(start)
            train(model, batches(client, t), loss)
            trained[client], sent[client] = state_of(model), class_means(torch.cat(seen_z), torch.cat(seen_y))
        start = mean(trained)
        for c in range(CLASSES):
            points = [own[c] for own in sent.values() if c in own]
            if points:
                clusters[c] = clustered(points, level)
                unbiased[c], owners[c] = torch.stack(clusters[c]).mean(0), len(points)
    targets = {
        "clusters": torch.stack([p for c in sorted(clusters) for p in clusters[c]]),
        "label": torch.tensor([c for c in sorted(clusters) for _ in clusters[c]]),
        "consistent": {
            "mean": torch.stack([unbiased.get(c, torch.zeros(FEATURES)) for c in range(CLASSES)]),
            "count": owners,
        },
    }
    return {"server": {"params": start, "prototypes": targets}}
