"""Means of vectors of which some may be anything: one value for K vectors, of which f may come from bad clients.

Each rule is given the vectors one by one, and needs more than 2f of them. Krum, which returns one of the
vectors, is not here: where clients differ, that is the model of a single domain, which is bad without any attack.
"""

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor

CentreRule = Literal["trimmed", "median", "geometric", "nnm_trimmed"]

MOST_STEPS = 50
"""Of Weiszfeld's iteration."""
LEAST_DISTANCE = 1e-6
"""A vector that is nearer than this to the median counts as if it were so far, so that nothing is divided by 0."""
SETTLED = 1e-10
"""A step of this part of the median's length ends the iteration."""
BLOCK = 2**20
"""Coordinates that are sorted at once."""


class Centre(ABC):
    """What K vectors (P,) have in common."""

    def __init__(self, faulty: int) -> None:
        self.faulty = faulty
        self.count = 0

    @property
    def is_protected(self) -> bool:
        """Whether there are enough vectors for so many bad ones."""
        return self.count > 2 * self.faulty

    def add(self, vector: Tensor) -> None:
        self.count += 1
        self.take(vector)

    def value(self) -> Tensor:
        if not self.is_protected:  # guard: more-than-twice-the-faulty
            raise ValueError(f"{self.count} vectors are too few for {self.faulty} bad ones")
        return self.centre()

    @abstractmethod
    def take(self, vector: Tensor) -> None:
        """Takes in one more vector."""

    @abstractmethod
    def centre(self) -> Tensor:
        """The result, (P,), float64."""


class TrimmedMean(Centre):
    """The mean of each coordinate without its f smallest and f largest values.

    It holds these extremes and a sum, (2f + 1) · P numbers, however many vectors there are. Subtracting the extremes
    from the sum of all would lose the digits of the rest where an extreme is large; here no extreme enters the sum.
    """

    def __init__(self, faulty: int) -> None:
        super().__init__(faulty)
        self._low: list[Tensor] = []
        self._high: list[Tensor] = []
        self._sum = torch.zeros(0, dtype=torch.float64)

    def take(self, vector: Tensor) -> None:
        rest = vector.double()
        if self.count == 1:
            self._sum = torch.zeros_like(rest)
            self._low = [torch.full_like(rest, torch.inf) for _ in range(self.faulty)]
            self._high = [torch.full_like(rest, -torch.inf) for _ in range(self.faulty)]
        for place in self._low:
            larger = torch.maximum(place, rest)
            torch.minimum(place, rest, out=place)
            rest = larger
        rest = rest.masked_fill(rest == torch.inf, -torch.inf)  # an empty place
        for place in self._high:
            smaller = torch.minimum(place, rest)
            torch.maximum(place, rest, out=place)
            rest = smaller
        self._sum += rest.masked_fill(rest == -torch.inf, 0)

    def centre(self) -> Tensor:
        return self._sum / (self.count - 2 * self.faulty)


class _Collected(Centre):
    """A rule that needs all vectors at once: K · P numbers."""

    def __init__(self, faulty: int) -> None:
        super().__init__(faulty)
        self.vectors: list[Tensor] = []

    def take(self, vector: Tensor) -> None:
        self.vectors.append(vector)


class Median(_Collected):
    """The median of each coordinate; of an even number, the mean of the two in the middle."""

    def centre(self) -> Tensor:
        return coordinate_median(self.vectors)


class GeometricMedian(_Collected):
    """The point with the least sum of distances to all vectors (RFA)."""

    def centre(self) -> Tensor:
        return geometric_median(self.vectors)


class NearestTrimmed(_Collected):
    """Each vector becomes the mean of its K − f nearest, itself included; of these the trimmed mean (NNM)."""

    def centre(self) -> Tensor:
        distances = torch.stack([distances_to(vector, self.vectors) for vector in self.vectors])  # (K, K)
        nearest = distances.argsort(stable=True)[:, : self.count - self.faulty].tolist()
        trimmed = TrimmedMean(self.faulty)
        for row in nearest:
            trimmed.add(_mean([self.vectors[k] for k in sorted(row)]))
        return trimmed.value()


CENTRES: dict[CentreRule, type[Centre]] = {
    "trimmed": TrimmedMean,
    "median": Median,
    "geometric": GeometricMedian,
    "nnm_trimmed": NearestTrimmed,
}


def coordinate_median(vectors: list[Tensor]) -> Tensor:
    """The median of each coordinate, (P,), float64."""
    middle = slice((len(vectors) - 1) // 2, len(vectors) // 2 + 1)
    blocks = range(0, max(1, vectors[0].numel()), BLOCK)
    return torch.cat(
        [torch.stack([v[a : a + BLOCK] for v in vectors]).sort(0).values[middle].double().mean(0) for a in blocks]
    )


def geometric_median(vectors: list[Tensor]) -> Tensor:
    """The point with the least sum of distances to all vectors, by Weiszfeld's iteration, (P,), float64.

    It begins at the median of the coordinates: from the mean, one vector that is far enough away makes it too slow."""
    point = coordinate_median(vectors)
    for _ in range(MOST_STEPS):
        weights = 1 / distances_to(point, vectors).clamp(min=LEAST_DISTANCE)
        weights = weights / weights.sum()
        total = torch.zeros_like(point)
        for vector, weight in zip(vectors, weights.tolist(), strict=True):
            total.add_(vector.double(), alpha=weight)
        step, point = (total - point).norm(), total
        if step <= SETTLED * max(1.0, point.norm().item()):
            break
    return point


def distances_to(point: Tensor, vectors: list[Tensor]) -> Tensor:
    """How far the vectors are from a point, (K,), float64: from differences, which keep their digits where a product of
    large vectors would lose them."""
    return torch.stack([(vector.double() - point.double()).norm() for vector in vectors])


def _mean(vectors: list[Tensor]) -> Tensor:
    total = torch.zeros_like(vectors[0], dtype=torch.float64)
    for vector in vectors:
        total += vector.double()
    return total / len(vectors)
