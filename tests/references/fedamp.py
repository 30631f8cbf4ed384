"""FedAMP and HeurFedAMP in plain torch, after Huang et al., pair by pair of models: nothing of protofed."""

import copy
from collections.abc import Callable, Iterable
from math import exp

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batches = Callable[[str, int], Iterable[tuple[Tensor, Tensor, Tensor]]]
"""Inputs, labels and rows that count, of a client in a round."""


def rounds(
    start: nn.ModuleDict,
    clients: list[str],
    batches: Batches,
    num_rounds: int,
    sgd: dict[str, float],
    lamda: float,
    alpha: float,
    sigma: float,
    own_weight: float | None,
) -> tuple[dict[str, dict[str, Tensor]], list[list[float]]]:
    """The clients' models, and the attention between them. With the weight of the own model it is HeurFedAMP."""
    models = {client: copy.deepcopy(start) for client in clients}
    for t in range(num_rounds):
        rows = attention(list(models.values()), alpha, sigma, own_weight)
        mixed = {}
        for client, row in zip(clients, rows, strict=True):
            mixed[client] = copy.deepcopy(start)
            states = [model.state_dict() for model in models.values()]
            for name, leaf in mixed[client].state_dict().items():
                leaf.copy_(sum(w * state[name].double() for w, state in zip(row, states, strict=True)))
        for client in clients:
            model, anchor = copy.deepcopy(mixed[client]).train(), list(mixed[client].parameters())
            optimizer = torch.optim.SGD(model.parameters(), **sgd)
            for x, y, counts in batches(client, t):
                optimizer.zero_grad()
                loss = F.cross_entropy(model["classifier"](model["features"](x))[counts], y[counts])
                squares = sum(((p - u.detach()) ** 2).sum() for p, u in zip(model.parameters(), anchor, strict=True))
                (loss + lamda / (2 * alpha) * squares).backward()
                optimizer.step()
            models[client] = model
    found = {client: model.state_dict() for client, model in models.items()}
    return found, attention(list(models.values()), alpha, sigma, own_weight)


def attention(models: list[nn.ModuleDict], alpha: float, sigma: float, own_weight: float | None) -> list[list[float]]:
    flat = [torch.cat([p.detach().flatten() for p in model.parameters()]).double() for model in models]
    rows = []
    for i, mine in enumerate(flat):
        row = []
        for j, other in enumerate(flat):
            if i == j:
                row.append(0.0)
            elif own_weight is None:
                row.append(alpha * exp(-((mine - other) ** 2).sum().item() / sigma) / sigma)
            else:
                row.append(exp(sigma * F.cosine_similarity(mine, other, dim=0).item()))
        if own_weight is None:
            row = [w / max(sum(row), 1.0) for w in row]
            row[i] = 1 - sum(row)
        else:
            row = [(1 - own_weight) * w / sum(row) for w in row]
            row[i] = own_weight
        rows.append(row)
    return rows
