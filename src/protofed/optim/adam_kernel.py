"""Adam's step of many clients whose weights are stacked, as a GPU kernel, in Triton.

torch's own fused step takes a list of tensors, here one for each client and parameter, and a launch holds few of them.
"""

# Triton reads the types of a kernel's arguments from the call. Names in capitals are known when it is compiled.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from math import ceil

import triton
import triton.language as tl
from torch import Tensor

from protofed.optim.steps import Tensors

BLOCK = 2048
"""Numbers that one program changes."""


def stacked_step(
    weights: Tensors,
    grads: Tensors,
    first: Tensors,
    second: Tensors,
    size: Tensor,
    spread: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Changes weights and moments (K, ...) in place. `size` (K,) is a client's learning rate over the correction of its
    first moments, `spread` (K,) the root of that of its second."""
    for weight, grad, mean, square in zip(weights, grads, first, second, strict=True):
        assert weight.is_contiguous()
        clients, numbers = len(weight), weight[0].numel()
        _adam_kernel[clients, ceil(numbers / BLOCK)](
            *(weight, grad, mean, square, size, spread, numbers),
            BETA1=beta1,
            BETA2=beta2,
            EPS=eps,
            DECAY=weight_decay,
            BLOCK=BLOCK,
        )


@triton.jit
def _adam_kernel(
    weights,
    grads,
    first,
    second,
    size,
    spread,
    numbers,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPS: tl.constexpr,
    DECAY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    client = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real = place < numbers
    at = client.to(tl.int64) * numbers + place
    weight = tl.load(weights + at, is_real, other=0.0)
    grad = tl.load(grads + at, is_real, other=0.0) + DECAY * weight
    mean = tl.load(first + at, is_real, other=0.0)
    square = tl.load(second + at, is_real, other=0.0)
    mean += (1 - BETA1) * (grad - mean)
    square = BETA2 * square + (1 - BETA2) * grad * grad
    scale = tl.div_rn(tl.sqrt_rn(square), tl.load(spread + client)) + EPS
    tl.store(weights + at, weight - tl.load(size + client) * tl.div_rn(mean, scale), is_real)
    tl.store(first + at, mean, is_real)
    tl.store(second + at, square, is_real)
