"""Examples of a client on which it does not train."""

import torch

from protofed.api.contexts import ClientContext
from protofed.data.batches import Data
from protofed.seeds import generator

SMALLEST_SPLIT = 100
"""A client of fewer examples has no validation data of its own."""


def num_training(n: int) -> int:
    """How many of a client's examples `held_out` leaves for training."""
    return n if n < SMALLEST_SPLIT else n - n // 10


def held_out(client: ClientContext) -> tuple[Data, Data]:
    """Training data, and a tenth of the client's examples for validation, the same in every round."""
    n = len(client.data)
    if n < SMALLEST_SPLIT:
        return client.data, client.data
    order = torch.randperm(n, generator=generator(client.seed, "validation", client.id))
    return client.data.rows(order[n // 10 :].sort().values), client.data.rows(order[: n // 10].sort().values)


def stratified_split(data: Data, part: float, draws: torch.Generator) -> tuple[Data, Data]:
    """Training and validation examples; of each class about this part is for validation."""
    order = torch.randperm(len(data), generator=draws)
    order = order[data.labels[order].sort(stable=True).indices]  # class by class, each in random order
    start = torch.rand((), dtype=torch.float64, generator=draws)
    steps = (start + part * torch.arange(len(data) + 1)).floor()  # (n + 1,)
    is_held = steps[1:] > steps[:-1]  # evenly spaced, so that every class gives its part
    if is_held.all() or not is_held.any():
        return data, data
    return data.rows(order[~is_held].sort().values), data.rows(order[is_held].sort().values)
