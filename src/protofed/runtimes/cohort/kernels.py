"""GPU kernels, in Triton, for a step of many clients at once, each with its own weights.

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

Pair = tuple[int, int]

PART = 512
"""Places that one program sums over for a gradient of weights. It does not depend on the number of clients, so that a
kernel is compiled once for all."""
BLOCK = 1024
"""Numbers that one program of an elementwise kernel writes."""


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
    columns = _columns(outputs, area[1])
    depth = channels * kernel[0] * (kernel[1] + (columns - 1) * stride[1])
    rows, places = outputs * columns, batch * area[0] * area[1] // columns
    block_o, tile, parts = _block(rows, 64), _gradient_tile(depth), ceil(places / PART)
    sums = torch.empty((clients, parts, depth + 1, rows), device=x.device)
    shapes = {"OUTPUTS": outputs, "CHANNELS": channels, "COLUMNS": columns}
    shapes |= _geometry((size[0], size[1]), (area[0], area[1]), kernel, stride)
    _gradient_kernel[parts, ceil(rows / block_o) * ceil(depth / tile["BLOCK_K"]), clients](
        *(x, grad, sums, places, x.stride(0), x.stride(1)),
        **{**shapes, "PART": PART, "PRECISION": _precision(), "BLOCK_O": block_o, **tile},
    )
    of_weight = torch.empty((clients, outputs, channels, *kernel), dtype=x.dtype, device=x.device)
    of_bias = torch.empty((clients, outputs), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(of_weight[0, 0].numel() + 1)
    _sum_kernel[outputs, clients](*(sums, of_weight, of_bias), **{**shapes, "PARTS": parts, "BLOCK": block})
    return of_weight, of_bias


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


# ---- how kernels are started


def _padded(x: Tensor, padding: Pair) -> Tensor:
    """Images (K, B, C, H, W) with zeros around, contiguous but for what all clients share."""
    if len(x) > 1 and x.stride(0) == 0:
        return _padded(x[:1], padding).expand(len(x), *[-1] * 4)
    return F.pad(x, (padding[1],) * 2 + (padding[0],) * 2).contiguous() if any(padding) else x.contiguous()


def _columns(outputs: int, width: int) -> int:
    """Neighbouring pixels of an output that are computed together, as outputs of one wider window: an entry that lies in
    several of their windows is fetched once for all."""
    return next(columns for columns in (4, 2, 1) if width % columns == 0 and (outputs * columns <= 64 or columns == 1))


def _convolution_tile(rows: int, depth: int) -> dict[str, int]:
    return {"BLOCK_P": 128, "BLOCK_K": 32, "num_warps": 4, "num_stages": 3}


def _gradient_tile(depth: int) -> dict[str, int]:
    return {"BLOCK_P": 32, "BLOCK_K": _block(depth, 64), "num_warps": 4, "num_stages": 3}


def _block(size: int, most: int) -> int:
    """A power of two of at least 16, the least that a product of tiles takes."""
    return max(16, min(most, 1 << (size - 1).bit_length()))


def _precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _geometry(before: Pair, after: Pair, kernel: Pair, stride: Pair) -> dict[str, int]:
    pairs = {"SIZE": before, "OUT": after, "KERNEL": kernel, "STRIDE": stride}
    return {f"{name}_{side}": value for name, pair in pairs.items() for side, value in zip("HW", pair, strict=True)}


def _windows(shape: torch.Size, kernel: Pair) -> dict[str, int]:
    """Of pooling that turns images of this shape into smaller ones."""
    height, width = shape[-2:]
    return _geometry((height, width), (height // kernel[0], width // kernel[1]), kernel, kernel)


def _correlated(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, is_transposed: bool) -> Tensor:
    """A convolution without padding; `is_transposed`, with inputs and outputs of the weights exchanged and the kernel
    turned round."""
    weight = weight.contiguous()
    clients, batch, channels, *size = x.shape
    kernel, rows = (weight.shape[3], weight.shape[4]), weight.shape[2 if is_transposed else 1]
    height, width = ((side - reach) // step + 1 for side, reach, step in zip(size, kernel, stride, strict=True))
    out = torch.empty((clients, batch, rows, height, width), dtype=x.dtype, device=x.device)
    columns = _columns(rows, width)
    depth = channels * kernel[0] * (kernel[1] + (columns - 1) * stride[1])
    places, block_r, tile = (
        batch * height * width // columns,
        _block(rows * columns, 64),
        _convolution_tile(rows, depth),
    )
    _correlate_kernel[ceil(places / tile["BLOCK_P"]), ceil(rows * columns / block_r), clients](
        *(x, weight, out if bias is None else bias.contiguous(), out, places, x.stride(0), x.stride(1)),
        ROWS=rows,
        CHANNELS=channels,
        COLUMNS=columns,
        HAS_BIAS=bias is not None,
        **{"TRANSPOSED": is_transposed, "PRECISION": _precision(), "BLOCK_R": block_r, **tile},
        **_geometry((size[0], size[1]), (height, width), kernel, stride),
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
        column = right[None, :] - pixel[:, None] * STRIDE_W
        entry = down[None, :] * KERNEL_W + column
        if TRANSPOSED:
            at = channel[None, :] * (ROWS * WINDOW) + row[:, None] * WINDOW + (WINDOW - 1 - entry)
        else:
            at = row[:, None] * (CHANNELS * WINDOW) + channel[None, :] * WINDOW + entry
        is_weight = is_row[:, None] & is_k[None, :] & (column >= 0) & (column < KERNEL_W)
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
    OUTPUTS: tl.constexpr, CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr,
    SIZE_H: tl.constexpr, SIZE_W: tl.constexpr, OUT_H: tl.constexpr, OUT_W: tl.constexpr,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """sums[part, k, r] = Σ of window[k, place] · grad[r, place] over the places of a part; k = DEPTH is the sum of the
    gradient alone, for the bias. Places, r and k are those of `_correlate_kernel`."""
    GROUPS: tl.constexpr = OUT_W // COLUMNS
    WIDE: tl.constexpr = KERNEL_W + (COLUMNS - 1) * STRIDE_W
    DEPTH: tl.constexpr = CHANNELS * KERNEL_H * WIDE
    NUM_K: tl.constexpr = (DEPTH + BLOCK_K - 1) // BLOCK_K
    AREA: tl.constexpr = OUT_H * OUT_W
    ROWS: tl.constexpr = OUTPUTS * COLUMNS
    part, client = tl.program_id(0), tl.program_id(2).to(tl.int64)
    k = tl.program_id(1) % NUM_K * BLOCK_K + tl.arange(0, BLOCK_K)
    r = tl.program_id(1) // NUM_K * BLOCK_O + tl.arange(0, BLOCK_O)
    is_k, is_r = k < DEPTH, r < ROWS
    shift = k // (KERNEL_H * WIDE) * (SIZE_H * SIZE_W) + (k // WIDE) % KERNEL_H * SIZE_W + k % WIDE
    output = r // COLUMNS * AREA + r % COLUMNS
    x += client * x_client
    grad += client * num_places * ROWS
    total = tl.zeros((BLOCK_K, BLOCK_O), dtype=tl.float32)
    alone = tl.zeros((BLOCK_O,), dtype=tl.float32)
    for start in range(0, PART, BLOCK_P):
        place = part * PART + start + tl.arange(0, BLOCK_P)
        is_place = place < num_places
        image, h, w = place // (OUT_H * GROUPS), (place // GROUPS) % OUT_H, place % GROUPS * COLUMNS
        corner = image * x_image + h * (STRIDE_H * SIZE_W) + w * STRIDE_W
        window = tl.load(x + (shift[:, None] + corner[None, :]), is_k[:, None] & is_place[None, :], 0.0)
        at = image * (OUTPUTS * AREA) + h * OUT_W + w
        grads = tl.load(grad + (at[:, None] + output[None, :]), is_place[:, None] & is_r[None, :], 0.0)
        total = tl.dot(window, grads, total, input_precision=PRECISION)
        alone += tl.sum(grads.to(tl.float32), 0)
    sums += (client * tl.num_programs(0) + part) * ((DEPTH + 1) * ROWS)
    tl.store(sums + (k[:, None] * ROWS + r[None, :]), total, is_k[:, None] & is_r[None, :])
    if tl.program_id(1) % NUM_K == 0:
        tl.store(sums + (DEPTH * ROWS + r), alone, is_r)


@triton.jit
def _sum_kernel(
    sums, of_weight, of_bias,
    OUTPUTS: tl.constexpr, CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    SIZE_H: tl.constexpr, SIZE_W: tl.constexpr, OUT_H: tl.constexpr, OUT_W: tl.constexpr,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of the weights of one output of one client: the sums of all parts and pixels, in order."""
    WIDE: tl.constexpr = KERNEL_W + (COLUMNS - 1) * STRIDE_W
    DEPTH: tl.constexpr = CHANNELS * KERNEL_H * WIDE
    SIZE: tl.constexpr = CHANNELS * KERNEL_H * KERNEL_W
    ROWS: tl.constexpr = OUTPUTS * COLUMNS
    output, client = tl.program_id(0), tl.program_id(1).to(tl.int64)
    entry = tl.arange(0, BLOCK)
    is_bias = entry == SIZE
    k = tl.where(is_bias, DEPTH, entry // KERNEL_W * WIDE + entry % KERNEL_W)
    step = tl.where(is_bias, 0, STRIDE_W)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in range(PARTS):
        at = sums + (client * PARTS + part) * ((DEPTH + 1) * ROWS) + output * COLUMNS
        for pixel in tl.static_range(COLUMNS):
            total += tl.load(at + (k + pixel * step) * ROWS + pixel, entry <= SIZE, 0.0)
    tl.store(of_weight + (client * OUTPUTS + output) * SIZE + entry, total, entry < SIZE)
    tl.store(of_bias + client * OUTPUTS + output + 0 * entry, total, is_bias)


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
