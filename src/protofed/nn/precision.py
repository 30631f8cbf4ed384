"""What networks compute in, and products that are never rounded further."""

from typing import Any, Literal

import torch
from torch import Tensor

Precision = Literal["float32", "tf32", "bf16"]
"""What the networks' matrix products and convolutions are computed in. Weights and sums are always float32."""


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in the precision that a and b have, whatever the networks work in: for sums, for what is divided by a small
    temperature, and where a bound on rounding counts."""
    settings: Any = torch.backends.cuda.matmul
    is_rounded = settings.allow_tf32
    if not is_rounded and not torch.is_autocast_enabled(a.device.type):
        return a @ b
    settings.allow_tf32 = False
    try:
        with torch.autocast(a.device.type, enabled=False):
            return a @ b
    finally:
        settings.allow_tf32 = is_rounded
