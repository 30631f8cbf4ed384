"""FedBABU in plain torch, after Algorithm 1 of Oh et al. and `main_fed.py` of the authors: nothing of protofed."""

import copy
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batches = Callable[[str, int, int], Iterable[tuple[Tensor, Tensor, Tensor]]]
"""Inputs, labels and rows that count, of a client in a round: those of its training (0) or of its fine-tuning (1)."""


def rounds(
    start: nn.ModuleDict, examples: dict[str, int], batches: Batches, num_rounds: int, sgd: dict[str, float]
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """The global weights, and what every client fine-tuned of those that it received in the last round."""
    server, own = copy.deepcopy(start), {}
    for t in range(num_rounds):
        sent = {}
        for client in examples:
            sent[client] = trained(server, batches(client, t, 0), list_of(server, "features"), sgd)
            own[client] = trained(server, batches(client, t, 1), None, sgd).state_dict()
        weights = {client: n / sum(examples.values()) for client, n in examples.items()}
        mean = server.state_dict()
        for name, leaf in mean.items():
            if name.startswith("features") and leaf.is_floating_point():
                mean[name] = sum(w * sent[client].state_dict()[name].double() for client, w in weights.items()).float()
        server.load_state_dict(mean)
    return server.state_dict(), own


def list_of(model: nn.ModuleDict, part: str) -> list[str]:
    return [name for name, _ in model.named_parameters() if name.startswith(part)]


def trained(
    start: nn.ModuleDict, batches: Iterable[tuple[Tensor, Tensor, Tensor]], names: list[str] | None, sgd: dict
) -> nn.ModuleDict:
    model = copy.deepcopy(start).train()
    optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if names is None or name in names], **sgd)
    for x, y, counts in batches:
        optimizer.zero_grad()
        F.cross_entropy(model["classifier"](model["features"](x))[counts], y[counts]).backward()
        optimizer.step()
    return model
