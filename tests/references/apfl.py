"""APFL in plain torch, after Algorithm 1 of Deng, Kamani and Mahdavi, by vectors of parameters: nothing of protofed."""

import copy
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batches = Callable[[str, int], Iterable[tuple[Tensor, Tensor, Tensor]]]
"""Inputs, labels and rows that count, of a client in a round."""


def rounds(
    start: nn.ModuleDict,
    examples: dict[str, int],
    batches: Batches,
    share_batch: Batches,
    num_rounds: int,
    sgd: dict[str, float],
    share: float,
    adaptive: bool,
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]], dict[str, float]]:
    """The global weights, the clients' own weights v, and their shares α."""
    server = copy.deepcopy(start)
    own = {client: [p.detach().clone() for p in start.parameters()] for client in examples}
    mixed_models = {client: copy.deepcopy(start).train() for client in examples}  # they keep their statistics
    shares = dict.fromkeys(examples, share)
    for t in range(num_rounds):
        mean = {name: torch.zeros_like(leaf, dtype=torch.float64) for name, leaf in server.state_dict().items()}
        for client, n in examples.items():
            w, v, mixed = copy.deepcopy(server).train(), own[client], mixed_models[client]
            if adaptive:
                tried = copy.deepcopy(mixed)
                ((x, y, counts),) = share_batch(client, t)
                slope = gradient_of_mixture(tried, w, v, shares[client], x, y, counts)
                moves = zip(v, w.parameters(), slope, strict=True)
                way = sum(((a - b.detach()) * g).sum().item() for a, b, g in moves)
                shares[client] = min(max(shares[client] - sgd["lr"] * way, 0.0), 1.0)
            v_optimizer, w_optimizer = torch.optim.SGD(v, **sgd), torch.optim.SGD(w.parameters(), **sgd)
            for x, y, counts in batches(client, t):
                for leaf, g in zip(v, gradient_of_mixture(mixed, w, v, shares[client], x, y, counts), strict=True):
                    leaf.grad = shares[client] * g
                v_optimizer.step()
                w_optimizer.zero_grad()
                F.cross_entropy(w["classifier"](w["features"](x))[counts], y[counts]).backward()
                w_optimizer.step()
            for name, leaf in w.state_dict().items():
                mean[name] += n / sum(examples.values()) * leaf.double()
        server.load_state_dict({name: leaf.to(server.state_dict()[name].dtype) for name, leaf in mean.items()})
    names = [name for name, _ in start.named_parameters()]
    return server.state_dict(), {c: dict(zip(names, v, strict=True)) for c, v in own.items()}, shares


def gradient_of_mixture(
    mixed: nn.ModuleDict, w: nn.ModuleDict, v: list[Tensor], share: float, x: Tensor, y: Tensor, counts: Tensor
) -> list[Tensor]:
    """∇f at α v + (1 − α) w; the statistics of `mixed` move."""
    with torch.no_grad():
        for leaf, a, b in zip(mixed.parameters(), v, w.parameters(), strict=True):
            leaf.copy_(share * a + (1 - share) * b)
    loss = F.cross_entropy(mixed["classifier"](mixed["features"](x))[counts], y[counts])
    return list(torch.autograd.grad(loss, list(mixed.parameters())))
