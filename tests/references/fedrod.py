"""Fed-RoD with a linear personal head in plain torch, after Chen and Chao and PFLlib's `clientrod.py`, with one
optimiser for each head: nothing of protofed."""

import copy
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batches = Callable[[str, int], Iterable[tuple[Tensor, Tensor, Tensor]]]
"""Inputs, labels and rows that count, of a client's training in a round."""


def rounds(
    start: nn.ModuleDict,
    labels: dict[str, Tensor],
    batches: Batches,
    num_rounds: int,
    sgd: dict[str, float],
    gamma: float,
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """The global weights after so many rounds, and the clients' personal heads."""
    server = copy.deepcopy(start)
    heads = {}
    for client in labels:
        heads[client] = copy.deepcopy(start["classifier"])
        nn.init.zeros_(heads[client].weight)
        nn.init.zeros_(heads[client].bias)
    total = sum(len(y) for y in labels.values())
    for t in range(num_rounds):
        mean = {name: torch.zeros_like(leaf, dtype=torch.float64) for name, leaf in server.state_dict().items()}
        for client, own in labels.items():
            model, head = copy.deepcopy(server).train(), heads[client]
            generic_optimizer = torch.optim.SGD(model.parameters(), **sgd)
            personal_optimizer = torch.optim.SGD(head.parameters(), **sgd)
            prior = torch.tensor([float((own == c).sum()) for c in range(head.out_features)]) ** gamma
            for x, y, counts in batches(client, t):
                z = model["features"](x)
                generic = model["classifier"](z)
                generic_optimizer.zero_grad()
                F.cross_entropy((generic + prior.log())[counts], y[counts]).backward()
                generic_optimizer.step()
                personal_optimizer.zero_grad()
                F.cross_entropy((generic.detach() + head(z.detach()))[counts], y[counts]).backward()
                personal_optimizer.step()
            for name, leaf in model.state_dict().items():
                mean[name] += len(own) / total * leaf.double()
        server.load_state_dict({name: leaf.to(server.state_dict()[name].dtype) for name, leaf in mean.items()})
    return server.state_dict(), {client: head.state_dict() for client, head in heads.items()}
