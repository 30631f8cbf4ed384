"""Networks by name, as parts: `features` maps an input to a feature vector, `classifier` maps features to scores.

If a paper has layers between the two, they are the part `projection`. All layers have PyTorch's default
initialisation.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from itertools import pairwise
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from protofed.api.task import ClientId
from protofed.errors import BadInput
from protofed.nn.networks import Parts
from protofed.nn.pooling import AdaptiveMean2d

WIDTHS = (64, 128, 256, 512)
"""Channels of the four stages of a ResNet."""


def small_cnn(channels: int, num_classes: int, projected: bool = False, norm: str = "batch") -> Parts:
    """Two convolutions with BatchNorm and a linear layer, for images of 28 × 28; 64 non-negative features. With
    `projected`, a projection 64 → 64 → 64 with a ReLU comes before the classifier. With the norm "group" there is
    GroupNorm of four channels each in the place of BatchNorm."""
    normed: Callable[[int], nn.Module] = nn.BatchNorm2d if norm == "batch" else lambda n: nn.GroupNorm(n // 4, n)
    features = nn.Sequential(
        *(nn.Conv2d(channels, 16, 5, stride=2, padding=2), normed(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 5, stride=2, padding=2), normed(32), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU()),
    )
    if not projected:
        return {"features": features, "classifier": nn.Linear(64, num_classes)}
    projection = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    return {"features": features, "projection": projection, "classifier": nn.Linear(64, num_classes)}


def mlp(inputs: int, num_classes: int, width: int = 64) -> Parts:
    """One hidden layer for vectors; `width` non-negative features."""
    features = nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.ReLU())
    return {"features": features, "classifier": nn.Linear(width, num_classes)}


def mlp_norm(inputs: int, num_classes: int, width: int = 64) -> Parts:
    """The same with BatchNorm before the activation."""
    features = nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.ReLU())
    return {"features": features, "classifier": nn.Linear(width, num_classes)}


def cnn_norm(channels: int, num_classes: int) -> Parts:
    """Four convolutions with BatchNorm, each of which halves the image, and a global mean, for images of any size and a
    few thousand examples; 128 non-negative features."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise((channels, 32, 64, 128, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return {"features": nn.Sequential(*layers), "classifier": nn.Linear(128, num_classes)}


def resnet10(channels: int, num_classes: int) -> Parts:
    """FPL's network for images of 32 × 32: four stages of one block each; 512 non-negative features."""
    return {"features": _resnet(channels, blocks=1, stem_stride=1), "classifier": nn.Linear(512, num_classes)}


def resnet18(
    channels: int, num_classes: int, stem: Literal["cifar", "imagenet64"] = "cifar", projected: bool = False
) -> Parts:
    """pFedCSPC's network for images of 32 × 32 (stem `cifar`) or 64 × 64 (`imagenet64`); 512 non-negative features.

    With `projected`, the paper's projection comes before the classifier: 512 → 512 → 256 with a ReLU for the stem
    `cifar`; 512 → 512 → 512 without an activation, as in the authors' code, for `imagenet64`.
    """
    features = _resnet(channels, blocks=2, stem_stride={"cifar": 1, "imagenet64": 2}[stem])
    if not projected:
        return {"features": features, "classifier": nn.Linear(512, num_classes)}
    if stem == "cifar":
        projection = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 256))
    else:
        projection = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    width = 256 if stem == "cifar" else 512
    return {"features": features, "projection": projection, "classifier": nn.Linear(width, num_classes)}


def cnn3(channels: int, num_classes: int) -> Parts:
    """FedSeProto's general encoder, three convolutions, for images of any size; 512 non-negative features."""
    return _pooled_cnn(channels, num_classes, (32, 64, 128))


def cnn2(channels: int, num_classes: int) -> Parts:
    """The encoder of FedSeProto's other clients, two convolutions; 512 non-negative features, as in `cnn3`."""
    return _pooled_cnn(channels, num_classes, (32, 64))


def conv2(channels: int, num_classes: int, pixels: int = 32) -> Parts:
    """FedPC's network for images of 28 × 28 or 32 × 32; 192 non-negative features, a classifier without bias."""
    features = nn.Sequential(
        *(nn.Conv2d(channels, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * _side_after_two(pixels) ** 2, 384), nn.ReLU()),
        *(nn.Linear(384, 192), nn.ReLU()),
    )
    return {"features": features, "classifier": nn.Linear(192, num_classes, bias=False)}


def lenet_projected(channels: int, num_classes: int, pixels: int = 32) -> Parts:
    """pFedCSPC's network for CIFAR-10: 84 non-negative features, and a projection to 256 numbers."""
    features = nn.Sequential(
        *(nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * _side_after_two(pixels) ** 2, 120), nn.ReLU()),
        *(nn.Linear(120, 84), nn.ReLU()),
    )
    projection = nn.Sequential(nn.Linear(84, 84), nn.ReLU(), nn.Linear(84, 256))
    return {"features": features, "projection": projection, "classifier": nn.Linear(256, num_classes)}


MODELS: dict[str, Callable[..., Parts]] = {
    "small_cnn": small_cnn,
    "mlp": mlp,
    "mlp_norm": mlp_norm,
    "cnn_norm": cnn_norm,
    "resnet10": resnet10,
    "resnet18": resnet18,
    "cnn3": cnn3,
    "cnn2": cnn2,
    "conv2": conv2,
    "lenet_projected": lenet_projected,
}
"""All networks by name. Arguments are the number of channels (of inputs for `mlp` and `mlp_norm`), of classes, and
settings."""


@dataclass(frozen=True)
class Network:
    """A network by name, which a run writes down: it can be built again where the task's data are not."""

    name: str
    """One of MODELS, or `module:function` for one of the user's own."""
    settings: Mapping[str, int | float | str | bool]
    build: Callable[..., Parts] | None = field(default=None, compare=False, repr=False)
    """The function itself, if it is the user's own."""

    def __call__(self, client: ClientId = "") -> Parts:
        build = self.build or MODELS.get(self.name)
        if build is None:
            raise BadInput(f"there is no network {self.name!r}; there are {', '.join(MODELS)}")
        return build(**self.settings)


@dataclass(frozen=True)
class NetworkOfClient:
    """Networks by name where those of clients differ."""

    networks: Mapping[ClientId, Network]

    def __call__(self, client: ClientId) -> Parts:
        return self.networks[client]()


def network(build: Callable[..., Parts], *arguments: int | float | str | bool) -> Network:
    """The network that `build(*arguments)` gives, by name."""
    given: dict[str, int | float | str | bool] = {}
    while isinstance(build, partial):
        arguments, given, build = (*build.args, *arguments), {**build.keywords, **given}, build.func
    settings = signature(build).bind(*arguments, **given).arguments
    own = f"{build.__module__}:{build.__qualname__}"
    name = next((name for name, one in MODELS.items() if one is build), "")
    return Network(name or own, settings, None if name else build)


_OWN: ContextVar[Mapping[str, Callable[..., Parts]]] = ContextVar("_OWN", default={})  # noqa: B039, never changed


@contextmanager
def known_networks(networks: Mapping[str, Callable[..., Parts]]) -> Iterator[None]:
    """Tasks that are built inside may name these networks of the user's own."""
    token = _OWN.set(networks)
    try:
        yield
    finally:
        _OWN.reset(token)


def own_network(name: str) -> Callable[..., Parts]:
    """A network of the user's own, by `module:function`."""
    if name not in _OWN.get():
        raise BadInput(f"the network {name!r} is only known where an experiment file names it")
    return _OWN.get()[name]


ImageModel = Literal["resnet10", "resnet18", "resnet18_projected", "cnn3", "cnn2", "conv2", "lenet_projected"]


def image_model(name: ImageModel, channels: int, num_classes: int, pixels: int) -> Parts:
    """The parts of a network by name, for square images of `pixels` a side."""
    return image_network(name, channels, num_classes, pixels)()


def image_network(name: ImageModel, channels: int, num_classes: int, pixels: int) -> Network:
    """A network by name, for square images of `pixels` a side."""
    match name:
        case "resnet18" | "resnet18_projected":
            stem: Literal["cifar", "imagenet64"] = "cifar" if pixels <= 32 else "imagenet64"
            return network(resnet18, channels, num_classes, stem, name == "resnet18_projected")
        case "conv2" | "lenet_projected":
            if _side_after_two(pixels) < 1:
                raise BadInput(f"{name} needs images of at least 16 pixels a side, not {pixels}")
            return network(MODELS[name], channels, num_classes, pixels)
    return network(MODELS[name], channels, num_classes)


class Block(nn.Module):
    """Two 3 × 3 convolutions and a shortcut, which is a 1 × 1 convolution if the shape changes. Feature maps that no
    gradient needs are changed in place, to save memory."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)), inplace=True)))
        inner += self.shortcut(x)
        return F.relu(inner, inplace=True)


def _resnet(channels: int, blocks: int, stem_stride: int) -> nn.Sequential:
    """The features of a ResNet without max-pooling: a stem, four stages of `blocks` blocks each, and a global mean."""
    stem = nn.Conv2d(channels, WIDTHS[0], 3, stride=stem_stride, padding=1, bias=False)
    layers: list[nn.Module] = [stem, nn.BatchNorm2d(WIDTHS[0]), nn.ReLU(inplace=True)]
    width = WIDTHS[0]
    for stage, outputs in enumerate(WIDTHS):
        for k in range(blocks):
            layers.append(Block(width, outputs, stride=2 if stage > 0 and k == 0 else 1))
            width = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def _pooled_cnn(channels: int, num_classes: int, widths: tuple[int, ...]) -> Parts:
    layers: list[nn.Module] = []
    for inputs, outputs in zip((channels, *widths), widths, strict=False):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [AdaptiveMean2d(4), nn.Flatten(), nn.Linear(widths[-1] * 4 * 4, 512), nn.ReLU()]
    return {"features": nn.Sequential(*layers), "classifier": nn.Linear(512, num_classes)}


def _side_after_two(pixels: int) -> int:
    """The side of the map after two 5 × 5 convolutions without padding, each with 2 × 2 pooling."""
    return ((pixels - 4) // 2 - 4) // 2
