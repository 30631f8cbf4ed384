"""FedDyn in plain torch, after Algorithm 1 of Acar and others, with its gradients g and its h."""

import torch
from torch import Tensor, nn

from protofed.data.batches import Batch
from references.plain import (
    CLIENTS,
    ROUNDS,
    SIZE,
    State,
    batches,
    cross_entropy,
    distance,
    mean,
    network,
    parameters,
    state_of,
    train,
)


def rounds(start: State, alpha: float, weights: dict[str, float] = SIZE) -> dict:
    names, x = parameters(start), start
    h = {name: torch.zeros_like(start[name]) for name in names}
    g = {client: dict(h) for client in CLIENTS}
    for t in range(ROUNDS):
        trained = {}
        for client in CLIENTS:

            def loss(model: nn.ModuleDict, batch: Batch) -> Tensor:
                linear = sum((g[client][name] * p).sum() for name, p in model.named_parameters())
                return cross_entropy(model, batch) - linear + alpha / 2 * distance(model, x)

            model = network(x)
            train(model, batches(client, t), loss)
            trained[client] = state_of(model)
            g[client] = {n: g[client][n] - alpha * (trained[client][n] - x[n]) for n in names}
        averaged = mean(trained, weights)
        h = {name: h[name] - alpha * (averaged[name] - x[name]) for name in names}
        x = averaged | {name: averaged[name] - h[name] / alpha for name in names}
    drifts = {client: {"drift": {n: -leaf / alpha for n, leaf in g[client].items()}} for client in CLIENTS}
    return {"server": {"params": x, "drift": {n: -leaf / alpha for n, leaf in h.items()}}, "memories": drifts}
