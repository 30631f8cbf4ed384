"""Small layers of many clients at once, and the fetching of their batches: GPU kernels, in Triton.

What is one kernel here is many for torch under vmap, and their number decides how long a small network's step takes.
"""

# Triton reads the types of a kernel's arguments from the call. Names in capitals are known when it is compiled.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from math import ceil

import torch
import triton
import triton.language as tl
from torch import Tensor

Pair = tuple[int, int]

BLOCK = 1024
"""Numbers that one program of an elementwise kernel writes."""


def geometry(before: Pair, after: Pair, kernel: Pair, stride: Pair) -> dict[str, int]:
    pairs = {"SIZE": before, "OUT": after, "KERNEL": kernel, "STRIDE": stride}
    return {f"{name}_{side}": value for name, pair in pairs.items() for side, value in zip("HW", pair, strict=True)}


def max_pool(x: Tensor, kernel: Pair) -> tuple[Tensor, Tensor]:
    """The largest number in each window of images (..., H, W), and its place in the window; windows do not overlap."""
    x = x.contiguous()
    height, width = (side // reach for side, reach in zip(x.shape[-2:], kernel, strict=True))
    out = torch.empty((*x.shape[:-2], height, width), dtype=x.dtype, device=x.device)
    place = torch.empty_like(out, dtype=torch.uint8)
    _pool_kernel[(ceil(out.numel() / BLOCK),)](*(x, out, place, out.numel()), **_windows(x.shape, kernel), BLOCK=BLOCK)
    return out, place


def max_pool_gradient(grad: Tensor, place: Tensor, size: Pair, kernel: Pair) -> Tensor:
    """Of max pooling: (..., H, W) from that of its output."""
    grad, place = grad.contiguous(), place.contiguous()
    out = torch.empty((*grad.shape[:-2], *size), dtype=grad.dtype, device=grad.device)
    _unpool_kernel[(ceil(out.numel() / BLOCK),)](
        *(grad, place, out, out.numel()), **_windows(out.shape, kernel), BLOCK=BLOCK
    )
    return out


def cross_entropy(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row of logits (..., N, C) with labels (..., N), and its gradient at the logits."""
    logits, y, classes = logits.contiguous(), y.contiguous(), logits.shape[-1]
    loss, slope = torch.empty_like(y, dtype=logits.dtype), torch.empty_like(logits)
    _cross_entropy_kernel[(y.numel(),)](
        *(logits, y, loss, slope), CLASSES=classes, BLOCK=triton.next_power_of_2(classes), num_warps=1
    )
    return loss, slope


def fetched(
    x: Tensor, row: Tensor, offset: Tensor | None, flip: Tensor | None, step: Tensor, table: Tensor, pad: int
) -> Tensor:
    """The batch (K, B, C, H, W) of one step, of bytes in a store x (N, C, H, W), through a table (C · 256,).

    A plan says for each client and step which rows these are (K, S, B), where in the padded image (K, S, B, 2), and
    which are mirrored (K, S, B). `step` (1,) is the number of the step."""
    clients, _, batch = row.shape
    out = torch.empty((clients, batch, *x.shape[1:]), dtype=table.dtype, device=x.device)
    size = x[0].numel()
    _fetch_kernel[clients * batch, ceil(size / BLOCK)](
        *(x, row, row if offset is None else offset, row if flip is None else flip, step, table, out),
        *(row.stride(0), batch, size),
        HAS_OFFSET=offset is not None,
        HAS_FLIP=flip is not None,
        PAD=pad,
        SIZE_H=x.shape[2],
        SIZE_W=x.shape[3],
        BLOCK=BLOCK,
    )
    return out


def planned(plan: list[Tensor], step: Tensor) -> list[Tensor]:
    """What a plan says of one step: labels, weights and rows (K, B) from (K, S, B), then the two fields (K,) of the
    whole batch from (K, S)."""
    clients, steps, batch = plan[0].shape
    found = [torch.empty_like(leaf[:, 0], memory_format=torch.contiguous_format) for leaf in plan]
    _plan_kernel[(clients,)](*plan, step, *found, steps, batch, BLOCK=triton.next_power_of_2(batch))
    return found


def _windows(shape: torch.Size, kernel: Pair) -> dict[str, int]:
    """Of pooling that turns images of this shape into smaller ones."""
    height, width = shape[-2:]
    return geometry((height, width), (height // kernel[0], width // kernel[1]), kernel, kernel)


@triton.jit
def _pool_kernel(
    x, out, best, size,
    SIZE_H: tl.constexpr, SIZE_W: tl.constexpr, OUT_H: tl.constexpr, OUT_W: tl.constexpr,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_pixel = i < size
    h, w = (i // OUT_W) % OUT_H * STRIDE_H, i % OUT_W * STRIDE_W
    x += i // (OUT_H * OUT_W) * (SIZE_H * SIZE_W) + h * SIZE_W + w
    largest = tl.load(x, is_pixel, 0.0)
    place = tl.zeros((BLOCK,), dtype=tl.int32)
    for entry in tl.static_range(1, KERNEL_H * KERNEL_W):
        value = tl.load(x + (entry // KERNEL_W * SIZE_W + entry % KERNEL_W), is_pixel, 0.0)
        is_larger = (value > largest) | (value != value)  # as in torch, NaN counts as the largest
        largest, place = tl.where(is_larger, value, largest), tl.where(is_larger, entry, place)
    tl.store(out + i, largest, is_pixel)
    tl.store(best + i, place, is_pixel)


@triton.jit
def _unpool_kernel(
    grad, best, out, size,
    SIZE_H: tl.constexpr, SIZE_W: tl.constexpr, OUT_H: tl.constexpr, OUT_W: tl.constexpr,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    h, w = (i // SIZE_W) % SIZE_H, i % SIZE_W
    is_pixel = i < size
    is_pooled = is_pixel & (h < OUT_H * STRIDE_H) & (w < OUT_W * STRIDE_W)
    at = i // (SIZE_H * SIZE_W) * (OUT_H * OUT_W) + h // STRIDE_H * OUT_W + w // STRIDE_W
    is_best = tl.load(best + at, is_pooled, 255).to(tl.int32) == h % STRIDE_H * KERNEL_W + w % STRIDE_W
    tl.store(out + i, tl.where(is_best, tl.load(grad + at, is_pooled, 0.0), 0.0), is_pixel)


@triton.jit
def _cross_entropy_kernel(logits, y, loss, slope, CLASSES: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    scores = tl.load(logits + row * CLASSES + c, c < CLASSES, -float("inf")).to(tl.float32)
    highest = tl.max(scores, 0)
    powers = tl.exp(scores - highest)
    total = tl.sum(powers, 0)
    label = tl.load(y + row)
    score = tl.sum(tl.where(c == label, scores, 0.0), 0)
    tl.store(loss + row, tl.log(total) + highest - score)
    tl.store(slope + row * CLASSES + c, powers / total - tl.where(c == label, 1.0, 0.0), c < CLASSES)


@triton.jit
def _fetch_kernel(
    x, rows, offsets, flips, step, table, out, client_stride, batch, size,
    HAS_OFFSET: tl.constexpr, HAS_FLIP: tl.constexpr, PAD: tl.constexpr,
    SIZE_H: tl.constexpr, SIZE_W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One image of a batch: padded with zeros, cropped, mirrored, and normalised by a table."""
    image = tl.program_id(0).to(tl.int64)
    pixel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = image // batch * client_stride + tl.load(step) * batch + image % batch
    channel, h, w = pixel // (SIZE_H * SIZE_W), (pixel // SIZE_W) % SIZE_H, pixel % SIZE_W
    if HAS_FLIP:
        w = tl.where(tl.load(flips + at) != 0, SIZE_W - 1 - w, w)
    if HAS_OFFSET:
        h = h + tl.load(offsets + 2 * at) - PAD
        w = w + tl.load(offsets + 2 * at + 1) - PAD
    is_inside = (h >= 0) & (h < SIZE_H) & (w >= 0) & (w < SIZE_W) & (pixel < size)
    source = x + tl.load(rows + at) * size + channel * (SIZE_H * SIZE_W) + h * SIZE_W + w
    byte = tl.load(source, is_inside, 0).to(tl.int32)
    tl.store(out + image * size + pixel, tl.load(table + channel * 256 + byte, pixel < size, 0.0), pixel < size)


@triton.jit
def _plan_kernel(
    label, weight, index, is_last, number, step,
    out_label, out_weight, out_index, out_is_last, out_number,
    steps, batch, BLOCK: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(0).to(tl.int64)
    now = client * steps + tl.load(step)
    i = tl.arange(0, BLOCK)
    is_row, source, target = i < batch, now * batch + i, client * batch + i
    tl.store(out_label + target, tl.load(label + source, is_row), is_row)
    tl.store(out_weight + target, tl.load(weight + source, is_row), is_row)
    tl.store(out_index + target, tl.load(index + source, is_row), is_row)
    tl.store(out_is_last + client, tl.load(is_last + now))
    tl.store(out_number + client, tl.load(number + now))
