"""Pooling whose gradient is deterministic on every device."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class AdaptiveMean2d(nn.Module):
    """Means over `side` × `side` windows that cover images of any size: nn.AdaptiveAvgPool2d, whose gradient on a GPU
    has no deterministic form in torch."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        if height % self.side == 0 and width % self.side == 0:
            return F.avg_pool2d(x, (height // self.side, width // self.side))
        rows, columns = windows(height, self.side, x), windows(width, self.side, x)  # (side, H), (side, W)
        return rows @ x @ columns.T / (rows.sum(1)[:, None] * columns.sum(1))

    def extra_repr(self) -> str:
        return str(self.side)


def windows(size: int, count: int, like: Tensor) -> Tensor:
    """Which of `size` positions are in which of `count` windows, as 0 and 1, (count, size). Windows that do not divide
    the size evenly overlap."""
    window, position = torch.arange(count, device=like.device)[:, None], torch.arange(size, device=like.device)
    begin, end = window * size // count, ((window + 1) * size + count - 1) // count
    return ((position >= begin) & (position < end)).to(like.dtype)
