"""Noise of a secure sum, of which each client adds a share: nobody knows all of it, and the sum has enough of it even
if some of the clients that stay work with the server.

Shares and what they are added to are whole multiples of one grid, which is one of the fixed point's too. So a sum is
exact, and its noise is a sum of discrete normal numbers, which is as good as one of them where shares are wide
(Kairouz, Liu, Steinke: The Distributed Discrete Gaussian Mechanism, ICML 2021).
"""

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from protofed import tree
from protofed.api.private import NotPrivate, Unreleased
from protofed.api.sums import Summands
from protofed.privacy.class_sums import class_queries, whole_sums
from protofed.privacy.fixed_point import flat, places
from protofed.privacy.noise import Query, noise_of
from protofed.privacy.settings import NoiseKind
from protofed.seeds import derive_seed
from protofed.tree import Params, Tree

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
    is_whole: bool = False
    """Whether only whole numbers are added."""

    def query(self, size: int) -> Query:
        return Query(size, self.most, self.multiplier, self.is_whole)

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


@dataclass(frozen=True)
class RecordNoise:
    """The noise of all sums over records that clients add in a round."""

    gradients: NoiseShare
    class_multiplier: float = 0.0
    """m of class sums; 0 in a round in which none are released."""
    clip_features: float = 1.0

    def queries(self, num_classes: int, dim: int, longest: float | None) -> tuple[Query, Query]:
        """Of class sums and of counts."""
        most = min(self.clip_features, longest or self.clip_features)
        return class_queries(self.class_multiplier, most, num_classes, dim)

    def share_of(self, query: Query) -> NoiseShare:
        g = self.gradients
        return NoiseShare(query.most, query.multiplier, g.honest, g.kind, False, query.is_whole)


class OwnSums:
    """The sums over its records that one client makes in a step. It knows the tensors that it made: to each comes the
    noise that it needs, once, and a client that adds any other is refused."""

    def __init__(self, noise: RecordNoise, *sent: Tree) -> None:
        """`sent` is all that sums may be taken at."""
        self._noise = noise
        self._sent = {id(leaf): leaf for one in sent for leaf in tree.leaves(one)}
        self._shares: dict[str, NoiseShare | None] = {}
        self._made: dict[int, tuple[Tensor, str]] = {}

    @property
    def releases_class_sums(self) -> bool:
        return self._noise.class_multiplier > 0

    def gradients(self, *known: Tree) -> Clipping:
        self._check(*known)
        return Clipping(self._noise.gradients)

    def noted(self, gradients: Params) -> Params:
        self._note("gradients", self._noise.gradients, *gradients.values())
        return gradients

    def class_sums(
        self, z: Tensor, y: Tensor, num_classes: int, longest: float | None, *known: Tree
    ) -> tuple[Tensor, Tensor]:
        self._check(*known)
        total = torch.zeros(num_classes, z.shape[1], dtype=torch.float64, device=z.device)
        count = total.new_zeros(num_classes)
        if not self.releases_class_sums:
            self._note("class sums", None, total, count)
            return total, count
        queries = self._noise.queries(num_classes, z.shape[1], longest)
        whole = whole_sums(z, y, *queries)
        for what, query, made in zip(("class sums", "counts"), queries, whole, strict=True):
            self._note(what, self._noise.share_of(query), made.mul_(query.grid))
        return whole

    def _check(self, *trees: Tree) -> None:
        for path, leaf in ((p, x) for one in trees for p, x in tree.named_leaves(one).items()):
            if id(leaf) not in self._sent:  # guard: sums-taken-at-what-was-sent
                raise Unreleased(f"a sum over records is taken at {path or 'a tensor'}, which the client was not sent")

    def _note(self, what: str, share: NoiseShare | None, *tensors: Tensor) -> None:
        if what in self._shares:  # guard: one-sum-of-a-kind
            raise NotPrivate(f"a step makes its {what} once: noise is made for one")
        self._shares[what] = share
        self._made |= {id(leaf): (leaf, what) for leaf in tensors}

    def with_noise(self, summands: Summands, seed: int) -> Tensor:
        """The numbers that the client adds (P,), as `flat` makes them, with its shares of noise."""
        numbers, taken = flat(summands), dict[str, list[Tensor]]()
        for path, leaf, weight, place in places(summands):
            _, what = self._made.pop(id(leaf), (leaf, ""))
            if not what or weight != 1:  # guard: only-sums-over-records-added
                raise Unreleased(f"what a client adds holds {path}, which is no sum over clipped records, or twice one")
            taken.setdefault(what, []).append(place)
        for what, own in taken.items():
            share, at = self._shares[what], torch.cat(own)
            if share is not None:
                drawn = seed if what == "gradients" else derive_seed(seed, what)
                numbers[at] = share.added(numbers[at], drawn)  # guard: shares-of-each-kind
        return numbers
