"""pFedMe in plain torch, after Algorithm 1 of Dinh, Tran and Nguyen and the authors' `userpFedMe.py`: nothing of
protofed."""

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
    num_rounds: int,
    personal_lr: float,
    lamda: float,
    inner_steps: int,
    eta: float,
    beta: float,
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """The global weights, and the clients' personal ones."""
    server, personal = copy.deepcopy(start), {}
    for t in range(num_rounds):
        mean = {name: torch.zeros_like(leaf, dtype=torch.float64) for name, leaf in server.state_dict().items()}
        for client, n in examples.items():
            theta = copy.deepcopy(server).train()
            local = [p.detach().clone() for p in server.parameters()]
            for x, y, counts in batches(client, t):
                for k in range(inner_steps):
                    if k:  # statistics of BatchNorm see a batch once
                        before = {name: b.clone() for name, b in theta.named_buffers()}
                    theta.zero_grad()
                    F.cross_entropy(theta["classifier"](theta["features"](x))[counts], y[counts]).backward()
                    with torch.no_grad():
                        for p, w in zip(theta.parameters(), local, strict=True):
                            p -= personal_lr * (p.grad + lamda * (p - w))
                        if k:
                            for name, b in theta.named_buffers():
                                b.copy_(before[name])
                with torch.no_grad():
                    for w, p in zip(local, theta.parameters(), strict=True):
                        w -= lamda * eta * (w - p)
            personal[client] = theta.state_dict()
            sent = {**theta.state_dict(), **dict(zip(dict(theta.named_parameters()), local, strict=True))}
            for name, leaf in sent.items():
                mean[name] += n / sum(examples.values()) * leaf.double()
        previous, trainable = server.state_dict(), dict(server.named_parameters())
        for name, leaf in mean.items():
            kept = (1 - beta) * previous[name].double() + beta * leaf if name in trainable else leaf
            previous[name].copy_(kept)
    return server.state_dict(), personal
