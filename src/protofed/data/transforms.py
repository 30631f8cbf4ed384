"""How stored examples become inputs, and how training varies them."""

from dataclasses import dataclass
from functools import cache
from math import radians
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.errors import BadInput
from protofed.tree import record


@record
class Draws:
    """The random choices of an augmentation, for each row of each batch; None for what is off."""

    offset: Tensor | None  # (S, B, 2), where the crop starts in the padded image
    flip: Tensor | None  # (S, B), bool
    angle: Tensor | None  # (S, B), radians

    def at(self, step: int) -> "Draws":
        return Draws(*(d if d is None else d[step] for d in (self.offset, self.flip, self.angle)))

    def copied(self, source: Tensor, n: int) -> "Draws":
        """With the draws of place `source[p]` at each place p of an epoch, so that copies of a row are equal. Its first
        n places are no copies."""

        def copied(d: Tensor) -> Tensor:
            by_epoch = d.view(-1, len(source), *d.shape[2:])
            by_epoch[:, n:] = by_epoch[:, source[n:]]
            return d

        if n == len(source):
            return self
        return Draws(*(d if d is None else copied(d) for d in (self.offset, self.flip, self.angle)))


@dataclass(frozen=True)
class Transform:
    """How stored examples become inputs, and how training varies them: pad and crop, flip, turn, normalise."""

    mean: tuple[float, ...] = ()
    """Per channel, subtracted after scaling to [0, 1]; none by default."""
    std: tuple[float, ...] = ()
    """Per channel, divided by."""
    pad: int = 0
    """Pixels added on each side before a random crop of the original size."""
    pad_mode: Literal["constant", "reflect"] = "constant"
    flip: bool = False
    """Whether each image is mirrored left to right with probability one half."""
    rotation: float = 0.0
    """Each image is turned by an angle drawn from ± this many degrees."""

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std):
            raise BadInput(f"a transform needs as many means as standard deviations, not {self.mean} and {self.std}")

    def check(self, x: Tensor, where: str) -> None:
        """Refuses examples that this transform cannot work on."""
        is_image, is_identity = x.dim() == 4, not (self.mean or self.pad or self.flip or self.rotation)
        if x.dtype in (torch.int32, torch.int64) and not is_identity:
            raise BadInput(f"{where}: the transform is for images, not for tokens of type {x.dtype}; leave it out")
        if not is_identity and not is_image:
            raise BadInput(f"{where}: the transform is for images (N, C, H, W), not for examples {tuple(x.shape)}")
        if self.mean and x.shape[1] != len(self.mean):
            raise BadInput(f"{where}: the transform has {len(self.mean)} means for images of {x.shape[1]} channels")

    def draw(self, generator: torch.Generator, steps: int, size: int) -> Draws:
        shape = (steps, size)
        offset = torch.randint(0, 2 * self.pad + 1, (*shape, 2), generator=generator) if self.pad else None
        flip = torch.rand(shape, generator=generator) < 0.5 if self.flip else None
        turn = radians(self.rotation) * (2 * torch.rand(shape, generator=generator) - 1) if self.rotation else None
        return Draws(offset, flip, turn)

    def varied(self, x: Tensor, draws: Draws) -> Tensor:
        """Stored examples as inputs, augmented by these draws."""
        if x.is_cuda and self.is_lookup(x, draws):
            return self.looked_up(self.vary(x, draws))  # bytes need a fourth of the memory traffic
        return self.normalise(self.vary(self.scale(x), draws))

    def vary(self, x: Tensor, draws: Draws) -> Tensor:
        """The batch (B, C, H, W), augmented by these draws; images in [0, 1], or bytes if they are not turned."""
        if draws.offset is not None:
            x = _crop(F.pad(x, (self.pad,) * 4, mode=self.pad_mode), draws.offset, x.shape[-2], x.shape[-1])
        if draws.flip is not None:
            x = torch.where(draws.flip[:, None, None, None], x.flip(-1), x)
        if draws.angle is not None:
            x = _turn(x, draws.angle)
        return x

    def scale(self, x: Tensor) -> Tensor:
        """uint8 to [0, 1]; float and tokens as they are."""
        return x.float() / 255 if x.dtype == torch.uint8 else x

    def normalise(self, x: Tensor) -> Tensor:
        if not self.mean:
            return x
        return (x - _constant(self.mean, x.device)) / _constant(self.std, x.device)

    def clean(self, x: Tensor) -> Tensor:
        """Stored examples as inputs, without augmentation."""
        return self.normalise(self.scale(x))

    def is_lookup(self, x: Tensor, draws: Draws) -> bool:
        """Whether inputs are stored bytes, moved and then looked up in a table."""
        moves_only = draws.angle is None and self.pad_mode == "constant"
        return bool(self.mean) and moves_only and x.dtype == torch.uint8

    def table(self, device: torch.device) -> Tensor:
        """The normalised value of each byte of each channel, (C · 256,)."""
        return _table(self, device)[0]

    def looked_up(self, x: Tensor) -> Tensor:
        """Normalise uint8 through a 256-entry lookup table per channel."""
        table, start = _table(self, x.device)
        return table[x + start]


@cache
def _constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """One number per channel (C, 1, 1), made once: a recorded step must not copy from the CPU."""
    return torch.tensor(values, device=device)[:, None, None]


@cache
def _table(transform: Transform, device: torch.device) -> tuple[Tensor, Tensor]:
    """The normalised value of each byte of each channel, (C · 256,), and where a channel begins, (C, 1, 1). Computed on
    the CPU, so that it is equal on every device."""
    channels = len(transform.mean)
    byte = torch.arange(256, dtype=torch.uint8, device="cpu").expand(1, channels, 1, 256)
    start = 256 * torch.arange(channels, device="cpu")[:, None, None]
    return transform.clean(byte).flatten().to(device), start.to(device)


def _crop(x: Tensor, offset: Tensor, height: int, width: int) -> Tensor:
    """One window per image, starting at `offset` (B, 2)."""
    windows = x.unfold(2, height, 1).unfold(3, width, 1)  # (B, C, rows, columns, height, width), without a copy
    return windows[torch.arange(len(x), device=x.device), :, offset[:, 0], offset[:, 1]]


def _turn(x: Tensor, angle: Tensor) -> Tensor:
    """Each image turned about its centre; the corners are filled with black."""
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    ratio = x.shape[-2] / x.shape[-1]  # grid_sample's coordinates are relative to each side
    rows = [torch.stack([cos, -sin * ratio, zero], -1), torch.stack([sin / ratio, cos, zero], -1)]
    grid = F.affine_grid(torch.stack(rows, 1), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)
