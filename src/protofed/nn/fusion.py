"""Changes to networks for speed. They change no value and no gradient."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from protofed.nn.pooling import AdaptiveMean2d

ALLOCATING = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.BatchNorm1d, nn.BatchNorm2d)
OVERWRITABLE = (*ALLOCATING, nn.MaxPool2d)
"""Layers whose gradient does not need their output, so that it may be overwritten. The ALLOCATING ones allocate a new
output anyway."""


def fuse(module: nn.Module) -> None:
    """Changes chains of layers (nn.Sequential), whose intermediate outputs nobody else sees. ReLU before max pooling is
    moved behind it: the maximum is the same, and ReLU has less to do. ReLU works in place where the layer before it
    does not need its output for its gradient."""
    protected = _protected(module)
    for chain in [layer._modules for layer in module.modules() if type(layer) is nn.Sequential]:
        for first, second in pairwise(chain):
            relu, pool = chain[first], chain[second]
            is_pool = type(pool) is nn.MaxPool2d and not pool.return_indices
            if type(relu) is nn.ReLU and is_pool and (id(chain), second) in protected:
                chain[first], chain[second] = pool, relu
        for first, second in pairwise(chain):
            if type(chain[second]) is nn.ReLU and type(chain[first]) in OVERWRITABLE:
                chain[second] = nn.ReLU(inplace=True)  # a new one, since the old one may be used elsewhere too


def _protected(module: nn.Module) -> set[tuple[int, str]]:
    """Positions whose output nobody overwrites, since a later layer allocates a new one. ReLU's gradient needs its
    output, and max pooling's does not. So an in-place layer after pooling, or a loss that changes features in place,
    does no harm before the two are swapped, but would after."""
    places = list(_places(module))
    layers = [layer for *_, layer in places]
    allocates = [type(layer) in ALLOCATING for layer in layers]
    for layer, is_new in zip(layers, [False, *allocates], strict=False):
        is_in_place = any(getattr(inner, "inplace", False) for inner in layer.modules())
        if is_in_place and not (type(layer) is nn.ReLU and is_new):
            return set()
    last = max((i for i, does in enumerate(allocates) if does), default=0)
    is_before = {(chain, name): i < last for i, (chain, name, _) in enumerate(places)}  # the last visit counts
    return {place for place, is_protected in is_before.items() if is_protected}


def _places(module: nn.Module) -> Iterator[tuple[int, str, nn.Module]]:
    """The layers of nested chains in the order of execution: id of the chain, name in it, layer."""
    for name, layer in module._modules.items() if type(module) is nn.Sequential else ():
        if type(layer) is nn.Sequential:
            yield from _places(layer)
        elif layer is not None:
            yield id(module._modules), name, layer


def is_torch_module(module: nn.Module) -> bool:
    """Whether all layers are torch's own or AdaptiveMean2d, which accept any memory layout, and none has a hook."""
    return all(_is_known(type(layer)) and not _has_hooks(layer) for layer in module.modules())


def _is_known(kind: type[nn.Module]) -> bool:
    return kind is AdaptiveMean2d or kind.__module__.startswith("torch.nn.")


def _has_hooks(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)


def pools(module: nn.Module) -> bool:
    return any(isinstance(layer, nn.MaxPool2d) for layer in module.modules())


def channels_last(x: Any) -> Any:
    """The same images, on a CPU in channels-last layout, which the feature maps inherit. Max pooling is much faster
    then, since it compares many channels at once."""
    is_image = isinstance(x, Tensor) and x.dim() == 4 and x.device.type == "cpu"
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if is_image else x
