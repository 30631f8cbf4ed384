"""GRACE in plain torch: the server after the authors' code, the client from our own page.

The client's part of the authors' code is not public.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from references.plain import (
    CLIENTS,
    ROUNDS,
    SGD,
    SIZE,
    State,
    batches,
    features,
    network,
    parameters,
    scores,
    state_of,
)


def covariance(z: Tensor) -> Tensor:
    return torch.cov(z.T) if len(z) > 1 else torch.zeros(z.shape[1], z.shape[1])


def local(client: str, t: int, received: State, trial: float, beta: float) -> State:
    model = network(received)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    for batch in batches(client, t):
        halves = [(batch.x[k::2], batch.y[k::2], batch.weight[k::2] > 0) for k in (0, 1)]
        (x1, y1, rows1), (x2, y2, rows2) = halves
        if not rows2.any():
            rows2 = torch.ones_like(rows2)
        tried = network(state_of(model))
        F.cross_entropy(scores(tried, x1)[rows1], y1[rows1]).backward()
        moved = {name: p.detach() - trial * p.grad for name, p in tried.named_parameters()}
        outer = network(state_of(model) | moved)  # the statistics are those of before the trial step
        z = outer["features"](x2)
        gap = covariance(z[rows2]) - covariance(features(received, x2)[rows2])
        loss = F.cross_entropy(outer["classifier"](z)[rows2], y2[rows2])
        (loss + beta * (gap**2).sum() / (4 * z.shape[1] ** 2)).backward()
        for p, other in zip(model.parameters(), outer.parameters(), strict=True):
            p.grad = other.grad
        for own, other in zip(model.buffers(), outer.buffers(), strict=True):
            own.copy_(other)
        optimizer.step()
    return state_of(model)


def rounds(start: State, trial: float, beta: float, server_rate: float) -> dict:
    names = parameters(start)
    for t in range(ROUNDS):
        trained = {client: local(client, t, start, trial, beta) for client in CLIENTS}
        moves = {c: torch.cat([(start[n] - own[n]).double().flatten() for n in names]) for c, own in trained.items()}
        agreement = {}
        for a in CLIENTS:
            others = [F.cosine_similarity(moves[a], moves[b], dim=0).item() for b in CLIENTS if b != a]
            agreement[a] = sum(others) / len(others)
        if min(agreement.values()) < 0:
            agreement = {c: value - min(agreement.values()) + 1e-3 for c, value in agreement.items()}
        weight = {c: SIZE[c] * value for c, value in agreement.items()}
        share = {c: value / sum(weight.values()) for c, value in weight.items()}
        mean = {n: sum(share[c] * trained[c][n].double() for c in CLIENTS) for n in start}
        start = {
            n: ((start[n] - server_rate * (start[n] - leaf)) if n in names else leaf).float()
            for n, leaf in mean.items()
        }
    return {"server": {"params": start}}
