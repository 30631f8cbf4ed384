"""FedPLVM in plain torch, after the authors' `main.py`, `utils/util.py` and `utils/update.py`, on whole batches."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Data = dict[str, tuple[Tensor, Tensor]]
Prototypes = dict[int, list[Tensor]]


def linked(points: list[Tensor]) -> list[int]:
    """The group of each point when every point is joined to the one of largest cosine."""
    groups = list(range(len(points)))
    for i, point in enumerate(points):
        others = [j for j in range(len(points)) if j != i]
        nearest = max(others, key=lambda j: F.cosine_similarity(point.double(), points[j].double(), dim=0).item())
        old, new = groups[nearest], groups[i]
        groups = [new if group == old else group for group in groups]
    numbers = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    return [numbers[group] for group in groups]


def cluster_means(points: list[Tensor], groups: list[int]) -> list[Tensor]:
    return [
        torch.stack([p for p, group in zip(points, groups, strict=True) if group == g]).mean(0)
        for g in range(max(groups) + 1)
    ]


def clustered(points: list[Tensor]) -> list[Tensor]:
    """The means of FINCH's last partition before all are one; of the first if that is one already."""
    if len(points) == 1:
        return points
    groups = linked(points)
    while max(groups) > 0:
        coarser = linked(cluster_means(points, groups))
        if max(coarser) == 0:
            break
        groups = [coarser[group] for group in groups]
    return cluster_means(points, groups)


def prototype_loss(
    z: Tensor, y: Tensor, clusters: Prototypes, average: dict[int, Tensor], alpha: float, tau: float
) -> Tensor:
    contrast, correction = [], []
    for feature, c in zip(z, y.tolist(), strict=True):
        powers = {
            k: [F.cosine_similarity(feature, p, dim=0).clamp(min=1e-4) ** alpha for p in own]
            for k, own in clusters.items()
        }
        exps = {k: sum(torch.exp(s / tau) for s in own) for k, own in powers.items()}
        contrast.append(-torch.log(exps[c] / sum(exps.values())))
        correction.append((F.cosine_similarity(feature, average[c], dim=0) - 1) ** 2)
    return torch.stack(contrast).mean() + 2 * torch.stack(correction).mean()


def final_weights(
    data: Data,
    parts: nn.ModuleDict,
    rounds: int,
    *,
    epochs: int,
    lr: float,
    momentum: float,
    weight: float,
    alpha: float,
    tau: float,
) -> tuple[dict[str, Tensor], Prototypes]:
    """The mean weights, and the global prototypes of each class."""
    server, clusters, average = copy.deepcopy(parts), {}, {}
    total = sum(len(y) for _, y in data.values())
    for _ in range(rounds):
        trained, collected = [], {}
        for x, y in data.values():
            model = copy.deepcopy(server)
            optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
            for _ in range(epochs):
                optimizer.zero_grad()
                z = model["features"](x)
                loss = F.cross_entropy(model["classifier"](z), y)
                if clusters:
                    loss = loss + weight * prototype_loss(z, y, clusters, average, alpha, tau)
                loss.backward()
                optimizer.step()
            trained.append((len(y) / total, model.state_dict()))
            with torch.no_grad():
                z = model["features"](x)
            for c in sorted(set(y.tolist())):
                collected.setdefault(c, []).extend(clustered(list(z[y == c])))
        server.load_state_dict({k: sum(share * own[k] for share, own in trained) for k in trained[0][1]})
        clusters = {c: clustered(points) for c, points in collected.items()}
        average = {c: torch.stack(own).mean(0) for c, own in clusters.items()}
    return dict(server.state_dict()), clusters
