"""Which clients are drawn."""

from collections.abc import Sequence

import torch

from protofed.api.task import ClientId
from protofed.seeds import generator


def shuffled(ids: Sequence[ClientId], seed: int, *path: str | int) -> list[ClientId]:
    """The clients in an order drawn from the run's seed."""
    with torch.device("cpu"):
        order = torch.randperm(len(ids), generator=generator(seed, *path)).tolist()
    return [ids[i] for i in order]


def round_half_up(value: float) -> int:
    return int(value + 0.5)
