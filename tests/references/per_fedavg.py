"""Per-FedAvg in plain torch, after Algorithm 1 of Fallah, Mokhtari and Ozdaglar: nothing of protofed."""

import copy
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor, Tensor]
Batches = Callable[[str, int], Iterable[Batch]]
"""Inputs, labels and rows that count, of a client in a round."""


def rounds(
    start: nn.ModuleDict,
    examples: dict[str, int],
    batches: Batches,
    adaptation_batch: Batches,
    num_rounds: int,
    sgd: dict[str, float],
    alpha: float,
    delta: float | None,
    adaptation_steps: int,
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """The global weights, and what clients adapted of those that they received in the last round. Without δ it is the
    first-order version."""
    server, own = copy.deepcopy(start), {}
    for t in range(num_rounds):
        mean = {name: torch.zeros_like(leaf, dtype=torch.float64) for name, leaf in server.state_dict().items()}
        for client, n in examples.items():
            model = copy.deepcopy(server).train()
            optimizer = torch.optim.SGD(model.parameters(), **sgd)
            for batch in batches(client, t):
                for p, direction in zip(model.parameters(), meta_gradient(model, batch, alpha, delta), strict=True):
                    p.grad = direction
                optimizer.step()
            for name, leaf in model.state_dict().items():
                mean[name] += n / sum(examples.values()) * leaf.double()
            adapted = copy.deepcopy(server).train()
            (batch,) = adaptation_batch(client, t)
            for _ in range(adaptation_steps):
                steps = slope(adapted, batch)
                with torch.no_grad():
                    for p, g in zip(adapted.parameters(), steps, strict=True):
                        p -= alpha * g
            own[client] = adapted.state_dict()
        server.load_state_dict({name: leaf.to(server.state_dict()[name].dtype) for name, leaf in mean.items()})
    return server.state_dict(), own


def meta_gradient(model: nn.ModuleDict, batch: Batch, alpha: float, delta: float | None) -> list[Tensor]:
    num_parts = 2 if delta is None else 3
    parts = [tuple(leaf[k::num_parts] for leaf in batch) for k in range(num_parts)]
    parts = [(x, y, counts if counts.any() else torch.ones_like(counts)) for x, y, counts in parts]
    tried = moved(model, slope(copy.deepcopy(model), parts[0]), -alpha)
    direction = slope(tried, parts[1])
    for mine, theirs in zip(model.buffers(), tried.buffers(), strict=True):  # the statistics of this part alone
        mine.copy_(theirs)
    if delta is None:
        return direction
    ahead = slope(moved(model, direction, delta), parts[2])
    behind = slope(moved(model, direction, -delta), parts[2])
    rows = zip(direction, ahead, behind, strict=True)
    return [g - alpha * (a - b) / (2 * delta) for g, a, b in rows]


def slope(model: nn.ModuleDict, batch: Batch) -> list[Tensor]:
    x, y, counts = batch
    loss = F.cross_entropy(model["classifier"](model["features"](x))[counts], y[counts])
    return list(torch.autograd.grad(loss, list(model.parameters())))


def moved(model: nn.ModuleDict, direction: list[Tensor], step: float) -> nn.ModuleDict:
    model = copy.deepcopy(model)
    with torch.no_grad():
        for p, d in zip(model.parameters(), direction, strict=True):
            p += step * d
    return model
