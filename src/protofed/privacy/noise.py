"""Clipping, rounding, and noise: what makes a sum over records a release that can be accounted for.

Sums are made of whole multiples of a grid that is 2⁻²⁰ of the noise or finer, and noise is a whole multiple of it too.
So a sum is exact in any order, and nothing can be read from the last bits of floating-point numbers (Mironov, CCS
2012). To round a vector of d numbers makes it longer by half a grid in each; noise is widened by as much.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import floor, log2, sqrt
from typing import Protocol

import torch
from torch import Tensor

from protofed.privacy.discrete_gaussian import discrete_gaussian
from protofed.privacy.settings import NoiseKind
from protofed.seeds import generator

FINENESS = 20
"""Bits between the noise and the grid."""
LEAST_MULTIPLIER = 2.0**-10
"""With less noise than this, sums would not be exact; an ε that needs so little promises nothing."""
BELOW_ONE = 1 - 1e-12
"""What a clipped length is multiplied by, so that rounding in floating point cannot make it too long."""


class Noise(Protocol):
    """Where noise comes from."""

    def whole(self, count: int, scale: float) -> Tensor:
        """So many independent whole numbers (int64, on the CPU), normal with this standard deviation."""


@dataclass(frozen=True)
class Simulated:
    """Noise that anyone who knows the run's seed can draw again: it protects nobody."""

    seed: int
    """Of the client and the round."""
    _draws: Iterator[int] = field(default_factory=itertools.count)

    def whole(self, count: int, scale: float) -> Tensor:
        draws = generator(self.seed, "noise", next(self._draws))
        return (torch.randn(count, generator=draws, dtype=torch.float64, device="cpu") * scale).round().long()


@dataclass(frozen=True)
class Secret:
    """Noise that nobody can draw again: from the system's entropy, with the exact discrete distribution."""

    def whole(self, count: int, scale: float) -> Tensor:
        return torch.from_numpy(discrete_gaussian(count, scale))  # guard: secret-noise-from-the-system


def noise_of(kind: NoiseKind, seed: int) -> Noise:
    """`seed` is of the client and the round; secret noise does not look at it."""
    return Secret() if kind == "secret" else Simulated(seed)


@dataclass(frozen=True)
class Query:
    """A sum over records, to each of which a record adds a vector no longer than `most`, and the noise that it gets."""

    size: int
    """Numbers in the sum."""
    most: float
    multiplier: float
    """m: the noise's standard deviation, divided by `most`."""
    is_whole: bool = False
    """Whether only whole numbers are added, which need no rounding."""

    def __post_init__(self) -> None:
        if self.multiplier < LEAST_MULTIPLIER:
            raise ValueError(
                f"a noise multiplier of {self.multiplier:g}: below {LEAST_MULTIPLIER:g} is as good as none"
            )

    @property
    def grid(self) -> float:
        """A power of two."""
        return 2.0 ** min(floor(log2(self.multiplier * self.most)) - FINENESS, 0 if self.is_whole else 1024)

    @property
    def scale(self) -> float:
        """The noise's standard deviation, in grids. Wider by what rounding may add to a record's vector."""
        rounding = 0.0 if self.is_whole else self.grid * sqrt(self.size) / (2 * self.most)
        return self.multiplier * self.most / self.grid * (1 + rounding)

    def clipped(self, rows: Tensor) -> Tensor:
        """Each record's vector (n, ...), in whole grids (float64) and no longer than `most`. One that is not finite
        adds nothing: noise could not hide it."""
        lengths = torch.linalg.vector_norm(rows.flatten(1), dim=1, dtype=torch.float64)
        if not (is_finite := lengths.isfinite()).all():
            rows = torch.where(is_finite.reshape(-1, *[1] * (rows.dim() - 1)), rows, 0.0)
        factor = (self.most * BELOW_ONE / lengths.nan_to_num(1.0).clamp(min=1e-300)).clamp(max=1) / self.grid
        clipped: Tensor = rows * factor.reshape(-1, *[1] * (rows.dim() - 1))  # guard: each-record-clipped
        return clipped.round_()

    def released(self, total: Tensor, noise: Noise) -> Tensor:
        """The sum, of clipped vectors in grids, with noise for every number of it, in its own unit and shape."""
        drawn = noise.whole(self.size, self.scale).to(total.device)
        return (total.double().flatten() + drawn).view(total.shape) * self.grid


@dataclass(frozen=True)
class Release:
    """A query and where its noise comes from."""

    query: Query
    noise: Noise

    def clipped(self, rows: Tensor) -> Tensor:
        return self.query.clipped(rows)

    def released(self, total: Tensor) -> Tensor:
        return self.query.released(total, self.noise)
