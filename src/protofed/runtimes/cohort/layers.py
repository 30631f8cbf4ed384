"""Layers of many clients at once, each with its own weights, in few kernels.

vmap turns a convolution into a grouped one, for which cuDNN has slow kernels, several for each client; and what is one
kernel for one client, such as the cross-entropy, into a dozen. On a GPU these are done by kernels of our own instead.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from protofed.runtimes.cohort import convolution, kernels
from protofed.runtimes.cohort.kernels import Pair

MOST_POOLED = 255
"""Numbers in a window of max pooling: a place in it is one byte."""
CROSS_ENTROPY = {"weight": None, "size_average": None, "ignore_index": -100, "reduce": None, "reduction": "none"}
"""Of the options of a cross-entropy, those that it must have to be done here."""


class StackedLayers(TorchFunctionMode):
    """Within this, convolutions, linear layers and cross-entropies are those of many clients. For code that vmap maps
    over clients on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        layer = LAYERS.get(func)
        done = None if layer is None else layer(*args, **kwargs)
        return func(*args, **kwargs) if done is None else done


def _convolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """None, like all of these, for a kind of layer that is not handled here."""
    if x.dim() != 4 or groups != 1 or isinstance(padding, str) or _pair(dilation) != (1, 1):
        return None
    if any(pad >= reach for pad, reach in zip(_pair(padding), weight.shape[2:], strict=True)):
        return None
    x, weight, bias = _cast(x, weight, bias)
    found: Tensor = _Convolution.apply(x, weight, bias, _pair(stride), _pair(padding))  # type: ignore[no-untyped-call]
    return found


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As two kernels; vmap's own rule multiplies the bias by one first."""
    return x @ weight.mT if bias is None else x @ weight.mT + bias


def _pooled(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    kernel = _pair(kernel_size)
    is_plain = _pair(padding) == (0, 0) and _pair(dilation) == (1, 1) and not ceil_mode and not return_indices
    if x.dim() != 4 or not is_plain or (stride and _pair(stride) != kernel) or kernel[0] * kernel[1] > MOST_POOLED:
        return None
    found: Tensor = _MaxPool.apply(x, kernel)[0]  # type: ignore[no-untyped-call]
    return found


def _cross_entropy(logits: Tensor, y: Tensor, label_smoothing: float = 0.0, **options: Any) -> Tensor | None:
    if logits.dim() != 2 or y.dim() != 1 or label_smoothing or options != CROSS_ENTROPY:
        return None
    found: Tensor = _CrossEntropy.apply(logits, y)[0]  # type: ignore[no-untyped-call]
    return found


LAYERS: dict[Any, Callable[..., Tensor | None]] = {
    torch.conv2d: _convolved,
    F.linear: _linear,
    F.max_pool2d: _pooled,
    F.cross_entropy: _cross_entropy,
}


def _cast(*tensors: Tensor | None) -> list[Any]:
    """In the precision of autocast, where it is on."""
    device = next(leaf.device.type for leaf in tensors if leaf is not None)
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    kind = torch.get_autocast_dtype(device)
    return [leaf if leaf is None else leaf.to(kind) for leaf in tensors]


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
        one = None if bias is None else bias[None]
        return convolution.convolution(x[None], weight[None], one, stride, padding)[0]

    @staticmethod
    def vmap(info: Any, dims: Any, x: Any, weight: Any, bias: Any, stride: Pair, padding: Pair) -> tuple[Tensor, int]:
        x, weight, bias = _in_front(info, dims, x, weight, bias)
        return convolution.convolution(x, weight, bias, stride, padding), 0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, _, ctx.stride, ctx.padding = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        settings = ctx.stride, ctx.padding
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = _InputGradient.apply(grad, weight, tuple(x.shape[-2:]), *settings)  # type: ignore[no-untyped-call]
        kernel = tuple(weight.shape[-2:])
        of_weight, of_bias = _WeightGradient.apply(x, grad, kernel, *settings)  # type: ignore[no-untyped-call]
        return of_x, of_weight, of_bias if ctx.needs_input_grad[2] else None, None, None


class _InputGradient(torch.autograd.Function):
    @staticmethod
    def forward(grad: Tensor, weight: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
        return convolution.input_gradient(grad[None], weight[None], size, stride, padding)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, dims: Any, grad: Any, weight: Any, *settings: Any) -> tuple[Tensor, int]:
        grad, weight = _in_front(info, dims, grad, weight)
        return convolution.input_gradient(grad, weight, *settings), 0


class _WeightGradient(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, grad: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> tuple[Tensor, Tensor]:
        of_weight, of_bias = convolution.weight_gradient(x[None], grad[None], kernel, stride, padding)
        return of_weight[0], of_bias[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, dims: Any, x: Any, grad: Any, *settings: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        x, grad = _in_front(info, dims, x, grad)
        return convolution.weight_gradient(x, grad, *settings), (0, 0)


class _MaxPool(torch.autograd.Function):
    """The largest numbers, and their places in their windows."""

    @staticmethod
    def forward(x: Tensor, kernel: Pair) -> tuple[Tensor, Tensor]:
        return kernels.max_pool(x, kernel)

    @staticmethod
    def vmap(info: Any, dims: Any, x: Any, kernel: Pair) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        (x,) = _in_front(info, dims, x)
        return kernels.max_pool(x, kernel), (0, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        (x, ctx.kernel), (_, place) = inputs, output
        ctx.size = tuple(x.shape[-2:])
        ctx.mark_non_differentiable(place)
        ctx.set_materialize_grads(False)  # else zeros are made for the places
        ctx.save_for_backward(place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (place,) = ctx.saved_tensors
        return _MaxPoolGradient.apply(grads[0], place, ctx.size, ctx.kernel), None  # type: ignore[no-untyped-call]


class _MaxPoolGradient(torch.autograd.Function):
    @staticmethod
    def forward(grad: Tensor, place: Tensor, size: Pair, kernel: Pair) -> Tensor:
        return kernels.max_pool_gradient(grad, place, size, kernel)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, dims: Any, grad: Any, place: Any, *settings: Any) -> tuple[Tensor, int]:
        return kernels.max_pool_gradient(*_in_front(info, dims, grad, place), *settings), 0


class _CrossEntropy(torch.autograd.Function):
    """Of each row, and its gradient at the logits."""

    @staticmethod
    def forward(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.cross_entropy(logits, y)

    @staticmethod
    def vmap(info: Any, dims: Any, logits: Any, y: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        return kernels.cross_entropy(*_in_front(info, dims, logits, y)), (0, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, slope = output
        ctx.mark_non_differentiable(slope)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(slope)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (slope,) = ctx.saved_tensors
        return grads[0][..., None] * slope, None


def _in_front(info: Any, dims: Any, *tensors: Any) -> list[Any]:
    """Tensors with the clients in front; what all share is expanded."""
    pairs = zip(tensors, dims, strict=False)
    return [
        leaf if leaf is None else leaf.expand(info.batch_size, *leaf.shape) if dim is None else leaf.movedim(dim, 0)
        for leaf, dim in pairs
    ]


def _pair(value: Any) -> Pair:
    first, second = (value, value) if isinstance(value, int) else value
    return first, second
