"""The networks that FedSeProto adds to a client's: two encoders of features, and a decoder back to the input."""

from math import prod

import torch.nn.functional as F
from torch import Tensor, nn

from protofed.api.task import TaskSpec
from protofed.methods._shared.models import embedding_dim
from protofed.nn.networks import Parts

SIDE = 32
"""The height and width that the transposed convolutions end in."""


class ImageDecoder(nn.Module):
    """From vectors to images: 4×4, doubled three times, and resized where the images are not 32×32."""

    def __init__(self, dim: int, channels: int, height: int, width: int) -> None:
        super().__init__()
        self.size = (height, width)
        self.grown = nn.Sequential(
            nn.Linear(dim, 128 * 4 * 4),
            nn.ReLU(),
            nn.Unflatten(1, (128, 4, 4)),
            nn.ConvTranspose2d(128, 64, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(32, channels, 4, stride=2, padding=1),
        )

    def forward(self, z: Tensor) -> Tensor:
        image: Tensor = self.grown(z)  # (B, channels, 32, 32)
        return image if self.size == (SIDE, SIDE) else F.interpolate(image, self.size, mode="bilinear")


def decoder(dim: int, shape: tuple[int, ...]) -> nn.Module:
    """A decoder from (B, dim) to inputs of this shape: images (channels, height, width), or anything else as a vector.

    The last layer is linear, since what it has to meet is normalised.
    """
    if len(shape) == 3:
        return ImageDecoder(dim, *shape)
    return nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, prod(shape)), nn.Unflatten(1, shape))


def with_decoupling(spec: TaskSpec, parts: Parts) -> Parts:
    """The parts, and those that take their features apart. The task's own come first and so start as without them."""
    dim = embedding_dim(spec, parts)
    return {
        **parts,
        "semantic": nn.Linear(dim, dim),
        "domain": nn.Linear(dim, dim),
        "decoder": decoder(2 * dim, tuple(spec.input.blank().shape[1:])),
    }
