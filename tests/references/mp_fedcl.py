"""MP-FedCL in plain torch, after the paper's abstract and the supervised contrastive loss, on whole batches."""

import copy
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Data = dict[str, tuple[Tensor, Tensor]]


def clustered(points: Tensor, k: int) -> list[Tensor]:
    """The centroids of the tightest of all partitions of a few points."""
    if len(points) <= k:
        return list(points)
    best, found = float("inf"), []
    for labels in product(range(k), repeat=len(points)):
        if len(set(labels)) < k:
            continue
        groups = [points[[i for i, label in enumerate(labels) if label == g]] for g in range(k)]
        spread = sum(((group - group.mean(0)) ** 2).sum().item() for group in groups)
        if spread < best - 1e-9:
            best, found = spread, [group.mean(0) for group in groups]
    return found


def contrast(z: Tensor, y: Tensor, pool: list[tuple[int, Tensor]], temperature: float) -> Tensor:
    losses = []
    for feature, c in zip(z, y.tolist(), strict=True):
        logits = [F.cosine_similarity(feature, p, dim=0) / temperature for _, p in pool]
        whole = torch.logsumexp(torch.stack(logits), 0)
        own = [whole - logit for logit, (label, _) in zip(logits, pool, strict=True) if label == c]
        losses.append(sum(own) / len(own))
    return torch.stack(losses).mean()


def final_weights(
    data: Data,
    parts: nn.ModuleDict,
    rounds: int,
    *,
    epochs: int,
    lr: float,
    momentum: float,
    weight: float,
    temperature: float,
    k: int,
) -> dict[str, Tensor]:
    """The mean weights."""
    server, pool = copy.deepcopy(parts), []
    total = sum(len(y) for _, y in data.values())
    for _ in range(rounds):
        trained, sent = [], []
        for x, y in data.values():
            model = copy.deepcopy(server)
            optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
            for _ in range(epochs):
                optimizer.zero_grad()
                z = model["features"](x)
                loss = F.cross_entropy(model["classifier"](z), y)
                if pool:
                    loss = loss + weight * contrast(z, y, pool, temperature)
                loss.backward()
                optimizer.step()
            trained.append((len(y) / total, model.state_dict()))
            with torch.no_grad():
                z = model["features"](x)
            sent += [(c, centroid) for c in sorted(set(y.tolist())) for centroid in clustered(z[y == c], k)]
        server.load_state_dict({name: sum(share * own[name] for share, own in trained) for name in trained[0][1]})
        pool = sent
    return dict(server.state_dict())
