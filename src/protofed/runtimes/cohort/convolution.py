"""Convolutions of many clients at once, each with its own weights, as one batched matrix product.

vmap turns them into a grouped convolution, for which cuDNN has slow kernels: several for each client. Where the windows
of the images fit into memory, they are laid out as the rows of a matrix instead (im2col), and one product serves all.
"""

from math import ceil
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

MOST_BYTES = 2**30
"""Of the windows of one layer for all clients together; beyond that the grouped convolution is used."""


TILES = 512
"""Blocks that a product should be cut into, so that all parts of a large GPU are at work."""
TILE = 64
"""The rows and columns of such a block."""


class BatchedConvolutions(TorchFunctionMode):
    """Within this, `conv2d` is a batched product where it can be. For code that vmap maps over `width` clients."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.conv2d:
            call = _Call.of(*args, **(kwargs or {}))
            if call is not None and self._width * call.num_bytes <= MOST_BYTES:
                return call.convolved(self._width)
        return func(*args, **(kwargs or {}))


class _Call:
    """The arguments of a convolution without groups and dilation."""

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, int], padding: tuple[int, int]
    ) -> None:
        if torch.is_autocast_enabled(x.device.type):
            kind = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(kind), weight.to(kind), None if bias is None else bias.to(kind)
        self._x, self._weight, self._bias = x, weight, bias
        self._stride, self._padding = stride, padding

    @classmethod
    def of(
        cls,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> "_Call | None":
        """None for a kind of convolution that is not handled here."""
        if x.dim() != 4 or groups != 1 or isinstance(padding, str) or _pair(dilation) != (1, 1):
            return None
        return cls(x, weight, bias, _pair(stride), _pair(padding))

    @property
    def num_bytes(self) -> int:
        """Of the windows of one client."""
        height, width = self._output_size()
        return len(self._x) * height * width * self._weight[0].numel() * self._x.element_size()

    def _output_size(self) -> tuple[int, int]:
        sizes = zip(self._x.shape[2:], self._weight.shape[2:], self._stride, self._padding, strict=True)
        height, width = ((size + 2 * pad - kernel) // step + 1 for size, kernel, step, pad in sizes)
        return height, width

    def convolved(self, clients: int) -> Tensor:
        x, (height, width) = self._x, self._output_size()
        if any(self._padding):
            x = F.pad(x, (self._padding[1],) * 2 + (self._padding[0],) * 2)
        parts = _parts(len(x), clients * ceil(len(self._weight) / TILE) * ceil(self._weight[0].numel() / TILE))
        rows: Tensor
        rows, _ = _Product.apply(x, self._weight, self._stride, parts)  # type: ignore[no-untyped-call]
        if self._bias is not None:
            rows = rows + self._bias
        return rows.view(len(x), height, width, -1).permute(0, 3, 1, 2)


class _Product(torch.autograd.Function):
    """(B · height · width, O), a row for each window, and the windows themselves, which the gradient needs again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, stride: tuple[int, int], parts: int) -> tuple[Tensor, Tensor]:
        kernel, images = weight.shape[2:], x.permute(0, 2, 3, 1).contiguous()  # (B, H, W, C)
        windows = images.unfold(1, kernel[0], stride[0]).unfold(2, kernel[1], stride[1])  # (B, h, w, C, kernel)
        rows = windows.permute(0, 1, 2, 4, 5, 3).reshape(-1, weight[0].numel())
        return rows @ _flat(weight).T, rows

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, ctx.stride, ctx.parts = inputs
        _, rows = output
        ctx.mark_non_differentiable(rows)
        ctx.save_for_backward(weight, rows)
        ctx.shape = x.shape

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        weight, rows = ctx.saved_tensors
        grad = grads[0]  # (B · h · w, O)
        pieces = (piece.view(ctx.parts, -1, piece.shape[-1]) for piece in (grad, rows))
        (outputs, channels), kernel = weight.shape[:2], weight.shape[2:]
        of_weight = _summed_product(*pieces).view(outputs, *kernel, channels).permute(0, 3, 1, 2)
        if not ctx.needs_input_grad[0]:
            return None, of_weight, None, None
        windows = grad @ _flat(weight)  # (B · h · w, kernel · C)
        return _folded(windows, ctx.shape, kernel, ctx.stride), of_weight, None, None


def _summed_product(a: Tensor, b: Tensor) -> Tensor:
    """Σ_p a_pᵀ b_p for a (P, n, O) and b (P, n, D): (O, D). One product of all rows would keep few multiprocessors of a
    GPU busy, since its result is small."""
    return (a.mT @ b).sum(0) if len(a) > 1 else a[0].T @ b[0]


def _flat(weight: Tensor) -> Tensor:
    """(O, kernel · C): channels come last, as in memory, so that windows are copied in long pieces."""
    return weight.permute(0, 2, 3, 1).flatten(1)


def _folded(windows: Tensor, shape: torch.Size, kernel: tuple[int, ...], stride: tuple[int, int]) -> Tensor:
    """Images (B, C, H, W), each pixel the sum of what the windows (B · h · w, kernel · C) hold of it."""
    batch, channels, height, width = shape
    rows, columns = (height - kernel[0]) // stride[0] + 1, (width - kernel[1]) // stride[1] + 1
    parts = windows.view(batch, rows, columns, *kernel, channels)
    if stride != (1, 1):
        laid_out = parts.permute(0, 5, 3, 4, 1, 2).reshape(batch, -1, rows * columns)
        return F.fold(laid_out, (height, width), kernel, stride=stride)
    lines = _skewed_sum(parts.permute(0, 3, 1, 4, 2, 5))  # (B, kernel height, h, W, C)
    return _skewed_sum(lines.flatten(-2)).view(batch, height, width, channels).permute(0, 3, 1, 2)


def _skewed_sum(parts: Tensor) -> Tensor:
    """Σ_i of part i shifted by i places: (..., k, n, r) to (..., n + k − 1, r). Each part is padded to n + k places and
    read back in rows of n + k − 1 places. So row i begins i places early, which shifts its part by i."""
    *outer, k, n, inner = parts.shape
    padded = F.pad(parts, (0, 0, 0, k)).flatten(-3)
    size = (n + k - 1) * inner
    return padded[..., : k * size].view(*outer, k, n + k - 1, inner).sum(-3)


def _parts(batch: int, tiles: int) -> int:
    """How many parts a batch is cut into, so that there are enough blocks."""
    parts = 1
    while parts * tiles < TILES and batch % (2 * parts) == 0:
        parts *= 2
    return parts


def _pair(value: Any) -> tuple[int, int]:
    first, second = (value, value) if isinstance(value, int) else value
    return first, second
