"""What is done to networks for speed that changes no value and no gradient."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

ALLOCATING = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.BatchNorm1d, nn.BatchNorm2d)
OVERWRITABLE = (*ALLOCATING, nn.MaxPool2d)
"""Layers whose gradient does not need what they gave; those of the first kind make something new in any case."""


def fuse(module: nn.Module) -> None:
    """Changes chains of layers, where nobody but the chain itself sees what they give: a ReLU that stands right before
    max pooling goes behind it, since the largest of some numbers stays the largest, and there are fewer of them; and a
    ReLU overwrites what a layer gives that does not need it for its own gradient."""
    covered = _covered(module)
    for chain in [layer._modules for layer in module.modules() if type(layer) is nn.Sequential]:
        for first, second in pairwise(chain):
            relu, pool = chain[first], chain[second]
            is_pool = type(pool) is nn.MaxPool2d and not pool.return_indices
            if type(relu) is nn.ReLU and is_pool and (id(chain), second) in covered:
                chain[first], chain[second] = pool, relu
        for first, second in pairwise(chain):
            if type(chain[second]) is nn.ReLU and type(chain[first]) in OVERWRITABLE:
                chain[second] = nn.ReLU(inplace=True)  # another one: this one may stand elsewhere too


def _covered(module: nn.Module) -> set[tuple[int, str]]:
    """Places whose result nobody overwrites, since a layer behind them makes something new of it. A ReLU's gradient
    needs what it gave, and pooling's does not: so a layer in place behind pooling, or a loss that changes features in
    place, does no harm before the two are swapped, and would after."""
    places = list(_places(module))
    layers = [layer for *_, layer in places]
    makes = [type(layer) in ALLOCATING for layer in layers]
    for layer, is_new in zip(layers, [False, *makes], strict=False):
        if any(getattr(own, "inplace", False) for own in layer.modules()) and not (type(layer) is nn.ReLU and is_new):
            return set()
    last = max((i for i, made in enumerate(makes) if made), default=0)
    found = {(chain, name): i < last for i, (chain, name, _) in enumerate(places)}  # of several visits the last counts
    return {place for place, is_before in found.items() if is_before}


def _places(module: nn.Module) -> Iterator[tuple[int, str, nn.Module]]:
    """The layers of chains within chains, in the order of their work: chain, name there, layer."""
    for name, layer in module._modules.items() if type(module) is nn.Sequential else ():
        if type(layer) is nn.Sequential:
            yield from _places(layer)
        elif layer is not None:
            yield id(module._modules), name, layer


def is_torch_module(module: nn.Module) -> bool:
    """Whether all its layers are torch's own, which work with any layout of their inputs, and none has a hook."""
    layers = list(module.modules())
    return all(type(layer).__module__.startswith("torch.nn.") and not _has_hooks(layer) for layer in layers)


def _has_hooks(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)


def pools(module: nn.Module) -> bool:
    return any(isinstance(layer, nn.MaxPool2d) for layer in module.modules())


def channels_last(x: Any) -> Any:
    """The same images, but on a CPU laid out with the channels of a pixel together, and so are all maps made of them:
    max pooling is much faster then, since it compares many channels at once."""
    is_image = isinstance(x, Tensor) and x.dim() == 4 and x.device.type == "cpu"
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if is_image else x
