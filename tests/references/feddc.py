"""FedDC in plain torch, after the authors' `utils_methods.py` and Algorithm 1 of Gao and others.

The means are by examples; or they are plain, and a client of relative size ω has α / ω and s̄ / ω, as the authors have.
"""

import torch
from torch import Tensor, nn

from protofed.data.batches import Batch
from references.plain import (
    CLIENTS,
    EQUAL,
    ROUNDS,
    SIZE,
    State,
    batches,
    cross_entropy,
    mean,
    network,
    parameters,
    state_of,
    train,
)


def rounds(start: State, alpha: float, uniform: bool, sgd: dict[str, float]) -> dict:
    names, x = parameters(start), start
    total, weights = sum(SIZE.values()), EQUAL if uniform else SIZE
    omega = {client: len(CLIENTS) * n / total if uniform else 1.0 for client, n in SIZE.items()}
    s_mean = {name: torch.zeros_like(start[name]) for name in names}
    h, s = {client: dict(s_mean) for client in CLIENTS}, {client: dict(s_mean) for client in CLIENTS}
    for t in range(ROUNDS):
        trained, changes = {}, {}
        for client in CLIENTS:
            w = omega[client]

            def loss(model: nn.ModuleDict, batch: Batch) -> Tensor:
                found = cross_entropy(model, batch)
                for name, p in model.named_parameters():
                    found = found + alpha / w / 2 * ((p + h[client][name] - x[name]) ** 2).sum()
                    found = found + (p * (s_mean[name] / w - s[client][name])).sum()
                return found

            model, of_batches = network(x), batches(client, t)
            train(model, of_batches, loss, sgd=sgd)
            trained[client] = state_of(model)
            # One step moves the weights by lr · g at once, and by momentum in the steps that follow.
            steps = sum(sum(sgd["momentum"] ** i for i in range(k)) for k in range(1, len(of_batches) + 1))
            update = {name: trained[client][name] - x[name] for name in names}
            new = {n: s[client][n] - s_mean[n] / w - update[n] / (steps * sgd["lr"]) for n in names}
            changes[client] = {n: (new[n] - s[client][n]) * w for n in names}
            s[client], h[client] = new, {n: h[client][n] + update[n] for n in names}
        averaged, h_mean, change = mean(trained, weights), mean(h, weights), mean(changes, weights)
        x = averaged | {n: averaged[n] + h_mean[n] for n in names}
        s_mean = {n: s_mean[n] + change[n] for n in names}
    sizes = {client: torch.tensor(w) for client, w in omega.items()}
    return {
        "server": {"params": x, "drift": h_mean, "gradient": s_mean, "sizes": sizes},
        "memories": {client: {"drift": h[client], "gradient": s[client]} for client in CLIENTS},
    }
