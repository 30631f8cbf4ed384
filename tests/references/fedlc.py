"""FedLC in plain torch, written from the loss that the paper gives, with the true class in the sum or not: nothing of
protofed."""

import copy
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

Batches = Callable[[str, int], Iterable[tuple[Tensor, Tensor, Tensor]]]
"""Inputs, labels and rows that count, of a client's training in a round."""


def rounds(
    start: nn.ModuleDict,
    labels: dict[str, Tensor],
    batches: Batches,
    num_rounds: int,
    sgd: dict[str, float],
    tau: float,
    with_true_class: bool,
) -> dict[str, Tensor]:
    """The global weights after so many rounds."""
    server = copy.deepcopy(start)
    total = sum(len(y) for y in labels.values())
    for t in range(num_rounds):
        mean = {name: torch.zeros_like(leaf, dtype=torch.float64) for name, leaf in server.state_dict().items()}
        for client, own in labels.items():
            model = copy.deepcopy(server).train()
            optimizer = torch.optim.SGD(model.parameters(), **sgd)
            for x, y, counts in batches(client, t):
                optimizer.zero_grad()
                scores = model["classifier"](model["features"](x))
                kept = [k for k in range(len(y)) if counts[k]]
                losses = [one_loss(scores[k], int(y[k]), own, tau, with_true_class) for k in kept]
                torch.stack(losses).mean().backward()
                optimizer.step()
            for name, leaf in model.state_dict().items():
                mean[name] += len(own) / total * leaf.double()
        server.load_state_dict({name: leaf.to(server.state_dict()[name].dtype) for name, leaf in mean.items()})
    return server.state_dict()


def one_loss(scores: Tensor, y: int, labels: Tensor, tau: float, with_true_class: bool) -> Tensor:
    """Of one example, class by class."""
    lowered = {}
    for c in range(len(scores)):
        count = int((labels == c).sum())
        if count:
            lowered[c] = scores[c] - tau * count ** (-1 / 4)
    others = [torch.exp(value) for c, value in lowered.items() if c != y or with_true_class]
    if not others:
        return 0 * scores.sum()
    return -torch.log(torch.exp(lowered[y]) / sum(others))
