"""Noise of a secure sum, of which each client adds a share: nobody knows all of it, and the sum has enough of it even
if some of the clients that stay work with the server.

Shares and what they are added to are whole multiples of one grid, which is one of the fixed point's too. So a sum is
exact, and its noise is a sum of discrete normal numbers, which is as good as one of them where shares are wide
(Kairouz, Liu, Steinke: The Distributed Discrete Gaussian Mechanism, ICML 2021).
"""

from dataclasses import dataclass
from math import sqrt

from torch import Tensor

from protofed.privacy.noise import Query, noise_of
from protofed.privacy.settings import NoiseKind

LEAST_SCALE = 2.0**10
"""Of a share, in grids: far above what the sum of discrete normal numbers needs to be one."""


@dataclass(frozen=True)
class NoiseShare:
    """What one client does to the numbers that it adds to a secure sum."""

    most: float
    """How long the vector is, at most, by which the one whose presence is hidden changes the sum."""
    multiplier: float
    """m: the standard deviation of the sum's noise, divided by `most`."""
    honest: int
    """h: at least so many clients' shares stay in the sum, and are not known to the server."""
    kind: NoiseKind
    whole_client: bool
    """Whether the client's own vector is clipped; if not, it is a sum of records that are clipped already."""

    def query(self, size: int) -> Query:
        return Query(size, self.most, self.multiplier)

    def scale(self, size: int) -> float:
        """The standard deviation of a share, in grids: that of h shares together is the sum's."""
        scale = self.query(size).scale / sqrt(self.honest)
        if scale < LEAST_SCALE:
            raise ValueError(f"{self.honest} shares of noise are too narrow for the grid")
        return scale

    def added(self, numbers: Tensor, seed: int) -> Tensor:
        """The numbers (P,) clipped, on the grid, with a share of noise for each, float64. `seed` is of the client, the
        round and the sum; secret noise does not look at it."""
        query = self.query(len(numbers))
        # guard: clients-clipped
        whole = query.clipped(numbers[None])[0] if self.whole_client else (numbers / query.grid).round()
        drawn = noise_of(self.kind, seed).whole(len(numbers), self.scale(len(numbers)))
        return (whole.double() + drawn.double()) * query.grid  # guard: shares-added


@dataclass(frozen=True)
class Clipping:
    """Clips gradients of single records for a sum whose noise comes later."""

    share: NoiseShare

    def clipped(self, rows: Tensor) -> Tensor:
        return self.share.query(rows.shape[1]).clipped(rows)

    def released(self, total: Tensor) -> Tensor:
        """Exact, in float64. Nothing is released yet."""
        return total.double() * self.share.query(total.numel()).grid
