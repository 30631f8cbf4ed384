"""Convolutions of many clients at once, each with its own weights, and their gradients: GPU kernels, in Triton.

Clients are the first dimension of every tensor. Sums are taken in a fixed order: the same inputs give the same bits.
"""

# Triton reads the types of a kernel's arguments from the call. Names in capitals are known when it is compiled.
# ruff: noqa: N803, N806
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from math import ceil

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from protofed.runtimes.cohort.kernels import Pair, geometry

PART = 512
"""Places that one program sums over for a gradient of weights. It does not depend on the number of clients, so that a
kernel is compiled once for all."""


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """(K, B, O, h, w) from images (K, B, C, H, W), weights (K, O, C, kernel) and biases (K, O)."""
    return _correlated(_padded(x, padding), weight, bias, stride, is_transposed=False)


def input_gradient(grad: Tensor, weight: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Of a convolution: (K, B, C, H, W) from that of its output (K, B, O, h, w). It is a convolution too, of the
    gradient with zeros around and, for a stride, between its pixels."""
    sides = list(zip(size, grad.shape[3:], weight.shape[3:], stride, padding, strict=True))
    wide = grad.new_zeros(*grad.shape[:3], *(side + reach - 1 for side, _, reach, _, _ in sides))
    places = (slice(first := reach - 1 - pad, first + step * n, step) for _, n, reach, step, pad in sides)
    wide[..., next(places), next(places)] = grad
    return _correlated(wide, weight, None, (1, 1), is_transposed=True)


def weight_gradient(x: Tensor, grad: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> tuple[Tensor, Tensor]:
    """Of a convolution: of its weights (K, O, C, kernel) and of its biases (K, O)."""
    x, grad = _padded(x, padding), grad.contiguous()
    clients, batch, channels, *size = x.shape
    _, _, outputs, *area = grad.shape
    depth, places = channels * kernel[0] * kernel[1], batch * area[0] * area[1]
    block_o, parts = _block(outputs, 64), ceil(places / PART)
    tile = _gradient_tile(block_o, depth)
    sums = torch.empty((clients, parts, outputs, depth + 1), device=x.device)
    shapes = {"OUTPUTS": outputs, "DEPTH": depth}
    _gradient_kernel[parts, ceil(outputs / block_o) * ceil(depth / tile["BLOCK_K"]), clients](
        *(x, grad, sums, places, x.stride(0), x.stride(1)),
        **shapes,
        **geometry((size[0], size[1]), (area[0], area[1]), kernel, stride),
        **{"PART": PART, "PRECISION": _precision(), "BLOCK_O": block_o, **tile},
    )
    of_weight = torch.empty((clients, outputs, channels, *kernel), dtype=x.dtype, device=x.device)
    of_bias = torch.empty((clients, outputs), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(depth + 1)
    _sum_kernel[outputs, clients](*(sums, of_weight, of_bias), **shapes, PARTS=parts, BLOCK=block)
    return of_weight, of_bias


# ---- how kernels are started


def _padded(x: Tensor, padding: Pair) -> Tensor:
    """Images (K, B, C, H, W) with zeros around, contiguous but for what all clients share."""
    if len(x) > 1 and x.stride(0) == 0:
        return _padded(x[:1], padding).expand(len(x), *[-1] * 4)
    return F.pad(x, (padding[1],) * 2 + (padding[0],) * 2).contiguous() if any(padding) else x.contiguous()


def _columns(outputs: int, width: int) -> int:
    """Neighbouring pixels of an output that are computed together, as outputs of one wider window. An entry that lies
    in several of their windows is then fetched once for all."""
    return next(columns for columns in (4, 2, 1) if width % columns == 0 and (outputs * columns <= 64 or columns == 1))


def _convolution_tile(block_r: int) -> dict[str, int]:
    """The fastest of some 500 tried on an H200, on the layers of LeNet and of FedPC's network; likewise the next."""
    return {"BLOCK_P": 128 if block_r == 32 else 256, "BLOCK_K": 16, "num_warps": 4, "num_stages": 3}


def _gradient_tile(block_o: int, depth: int) -> dict[str, int]:
    return {"BLOCK_P": 32, "BLOCK_K": 128 if block_o == 64 or depth <= 128 else 64, "num_warps": 4, "num_stages": 3}


def _block(size: int, most: int) -> int:
    """A power of two of at least 16, the least that a product of tiles takes."""
    return max(16, min(most, 1 << (size - 1).bit_length()))


def _precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _correlated(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, is_transposed: bool) -> Tensor:
    """A convolution without padding; `is_transposed`, with inputs and outputs of the weights exchanged and the kernel
    turned round."""
    weight = weight.contiguous()
    clients, batch, channels, *size = x.shape
    kernel, rows = (weight.shape[3], weight.shape[4]), weight.shape[2 if is_transposed else 1]
    height, width = ((side - reach) // step + 1 for side, reach, step in zip(size, kernel, stride, strict=True))
    out = torch.empty((clients, batch, rows, height, width), dtype=x.dtype, device=x.device)
    columns = _columns(rows, width)
    places, block_r = batch * height * width // columns, _block(rows * columns, 64)
    tile = _convolution_tile(block_r)
    _correlate_kernel[ceil(places / tile["BLOCK_P"]), ceil(rows * columns / block_r), clients](
        *(x, weight, out if bias is None else bias.contiguous(), out, places, x.stride(0), x.stride(1)),
        ROWS=rows,
        CHANNELS=channels,
        COLUMNS=columns,
        HAS_BIAS=bias is not None,
        **{"TRANSPOSED": is_transposed, "PRECISION": _precision(), "BLOCK_R": block_r, **tile},
        **geometry((size[0], size[1]), (height, width), kernel, stride),
    )
    return out


# ---- kernels


@triton.jit
def _correlate_kernel(
    x, weight, bias, out, num_places, x_client, x_image,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr,
    TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
    SIZE_H: tl.constexpr, SIZE_W: tl.constexpr, OUT_H: tl.constexpr, OUT_W: tl.constexpr,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[r, place] = Σ_k weight[r, k] · window[k, place] + bias[r]: one tile, of one client.

    A place is a group of COLUMNS pixels, r = (output, pixel of the group), k = (channel, row, column) in the window of
    all of them. Windows are not laid out in memory: their entries are fetched from the image."""
    GROUPS: tl.constexpr = OUT_W // COLUMNS
    WINDOW: tl.constexpr = KERNEL_H * KERNEL_W
    WIDE: tl.constexpr = KERNEL_W + (COLUMNS - 1) * STRIDE_W
    DEPTH: tl.constexpr = CHANNELS * KERNEL_H * WIDE
    client = tl.program_id(2).to(tl.int64)
    place = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    row, pixel = r // COLUMNS, r % COLUMNS
    is_row, is_place = row < ROWS, place < num_places
    image, h, w = place // (OUT_H * GROUPS), (place // GROUPS) % OUT_H, place % GROUPS * COLUMNS
    corner = image * x_image + h * (STRIDE_H * SIZE_W) + w * STRIDE_W
    x += client * x_client
    weight += client * (ROWS * CHANNELS * WINDOW)
    total = tl.zeros((BLOCK_R, BLOCK_P), dtype=tl.float32)
    for start in range(0, DEPTH, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        is_k = k < DEPTH
        channel, down, right = k // (KERNEL_H * WIDE), (k // WIDE) % KERNEL_H, k % WIDE
        shift = channel * (SIZE_H * SIZE_W) + down * SIZE_W + right
        window = tl.load(x + (corner[None, :] + shift[:, None]), is_k[:, None] & is_place[None, :], 0.0)
        is_weight = is_row[:, None] & is_k[None, :]
        if COLUMNS == 1 and not TRANSPOSED:
            at = row[:, None] * DEPTH + k[None, :]
        else:
            column = right[None, :] - pixel[:, None] * STRIDE_W
            is_weight = is_weight & (column >= 0) & (column < KERNEL_W)
            entry = down[None, :] * KERNEL_W + column
            if TRANSPOSED:
                at = channel[None, :] * (ROWS * WINDOW) + row[:, None] * WINDOW + (WINDOW - 1 - entry)
            else:
                at = row[:, None] * (CHANNELS * WINDOW) + channel[None, :] * WINDOW + entry
        total = tl.dot(tl.load(weight + at, is_weight, 0.0), window, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias + client * ROWS + row, is_row, 0.0).to(tl.float32)[:, None]
    AREA: tl.constexpr = OUT_H * OUT_W
    out += client * num_places * (COLUMNS * ROWS)
    at = (image * (ROWS * AREA) + h * OUT_W + w)[None, :] + (row * AREA + pixel)[:, None]
    tl.store(out + at, total, is_row[:, None] & is_place[None, :])


@triton.jit
def _gradient_kernel(
    x, grad, sums, num_places, x_client, x_image,
    OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr,
    SIZE_H: tl.constexpr, SIZE_W: tl.constexpr, OUT_H: tl.constexpr, OUT_W: tl.constexpr,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """sums[part, output, k] = Σ of window[k, place] · grad[output, place] over the places of a part; k = DEPTH is the
    sum of the gradient alone, for the bias. A place is a pixel of an output, k = (channel, row, column) in its window.
    """
    NUM_K: tl.constexpr = (DEPTH + BLOCK_K - 1) // BLOCK_K
    AREA: tl.constexpr = OUT_H * OUT_W
    part, client = tl.program_id(0), tl.program_id(2).to(tl.int64)
    k = tl.program_id(1) % NUM_K * BLOCK_K + tl.arange(0, BLOCK_K)
    output = tl.program_id(1) // NUM_K * BLOCK_O + tl.arange(0, BLOCK_O)
    is_k, is_output = k < DEPTH, output < OUTPUTS
    shift = k // (KERNEL_H * KERNEL_W) * (SIZE_H * SIZE_W) + (k // KERNEL_W) % KERNEL_H * SIZE_W + k % KERNEL_W
    x += client * x_client
    grad += client * num_places * OUTPUTS
    total = tl.zeros((BLOCK_K, BLOCK_O), dtype=tl.float32)
    alone = tl.zeros((BLOCK_O,), dtype=tl.float32)
    for start in range(0, PART, BLOCK_P):
        place = part * PART + start + tl.arange(0, BLOCK_P)
        is_place = place < num_places
        image, h, w = place // AREA, (place // OUT_W) % OUT_H, place % OUT_W
        corner = image * x_image + h * (STRIDE_H * SIZE_W) + w * STRIDE_W
        window = tl.load(x + (shift[:, None] + corner[None, :]), is_k[:, None] & is_place[None, :], 0.0)
        at = image * (OUTPUTS * AREA) + h * OUT_W + w
        grads = tl.load(grad + (at[:, None] + output[None, :] * AREA), is_place[:, None] & is_output[None, :], 0.0)
        total = tl.dot(window, grads, total, input_precision=PRECISION)
        alone += tl.sum(grads.to(tl.float32), 0)
    sums += (client * tl.num_programs(0) + part) * ((DEPTH + 1) * OUTPUTS)
    tl.store(sums + (k[:, None] + output[None, :] * (DEPTH + 1)), total, is_k[:, None] & is_output[None, :])
    if tl.program_id(1) % NUM_K == 0:
        tl.store(sums + (output * (DEPTH + 1) + DEPTH), alone, is_output)


@triton.jit
def _sum_kernel(
    sums, of_weight, of_bias,
    OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of the weights of one output of one client: the sums of all parts, in order."""
    output, client = tl.program_id(0), tl.program_id(1).to(tl.int64)
    entry = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in range(PARTS):
        at = ((client * PARTS + part) * OUTPUTS + output) * (DEPTH + 1)
        total += tl.load(sums + at + entry, entry <= DEPTH, 0.0)
    tl.store(of_weight + (client * OUTPUTS + output) * DEPTH + entry, total, entry < DEPTH)
    tl.store(of_bias + client * OUTPUTS + output + 0 * entry, total, entry == DEPTH)
