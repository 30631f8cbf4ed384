"""Whole numbers with the discrete normal distribution, drawn exactly from the system's entropy.

P(n) ∝ e^(−n² / 2σ²). The algorithm is that of Canonne, Kamath, Steinke (The Discrete Gaussian for Differential Privacy,
NeurIPS 2020): candidates from a discrete Laplace distribution, which is made of coins that show heads with probability
e^(−γ), are kept with such a coin. A coin compares 64 random bits with e^(−γ). Floating point decides where its error
cannot matter. For the few others more bits are drawn, and e^(−γ) is computed to as many digits as it takes.
"""

import os
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction
from math import floor, isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

Whole = NDArray[np.int64]
Exact = Callable[[int], Fraction]
Entropy = Callable[[int], bytes]

MARGIN = 2.0**-36
"""More than the error of e^(−γ) in floating point, for every γ that is not hopeless."""
LARGEST_SCALE = 2.0**40


def discrete_gaussian(count: int, scale: float, entropy: Entropy = os.urandom) -> Whole:
    """So many independent draws with σ = `scale`, taken as the exact value of this floating-point number."""
    if not (isfinite(scale) and 0 < scale <= LARGEST_SCALE):
        raise ValueError(f"a scale of {scale}: it must be above 0 and at most {LARGEST_SCALE:g}")
    coins, variance, t = _Coins(entropy), Fraction(scale) ** 2, floor(scale) + 1
    found: list[Whole] = []
    missing = count
    while missing:
        candidates = _discrete_laplace(missing + missing // 2 + 16, t, coins)
        sizes = np.abs(candidates).astype(np.float64)
        gamma = (sizes - float(variance / t)) ** 2 / float(2 * variance)

        def exact(i: int, candidates: Whole = candidates) -> Fraction:
            return (abs(int(candidates[i])) - variance / t) ** 2 / (2 * variance)

        kept = candidates[coins.heads(gamma, exact)][:missing]
        found.append(kept)
        missing -= len(kept)
    return np.concatenate(found) if found else np.empty(0, dtype=np.int64)


def _discrete_laplace(count: int, t: int, coins: "_Coins") -> Whole:
    """At most so many draws with P(n) ∝ e^(−|n|/t)."""
    tried = coins.below(t, count)
    below = tried[coins.heads(tried / t, lambda i: Fraction(int(tried[i]), t))]
    whole = np.zeros(len(below), dtype=np.int64)
    going = np.arange(len(below))
    while len(going):
        going = going[coins.heads(np.ones(len(going)), lambda i: Fraction(1))]
        whole[going] += 1
    sizes = below + t * whole
    is_negative = coins.below(2, len(sizes)) == 1
    signed: Whole = np.where(is_negative, -sizes, sizes)
    kept: Whole = signed[~(is_negative & (sizes == 0))]  # zero once, not twice
    return kept


class _Coins:
    """Random decisions with exact probabilities."""

    def __init__(self, entropy: Entropy) -> None:
        self._entropy = entropy

    def _words(self, count: int) -> NDArray[np.uint64]:
        return np.frombuffer(self._entropy(8 * count), dtype="<u8")

    def below(self, n: int, count: int) -> Whole:
        """So many whole numbers from 0 to n − 1, all equally likely."""
        most = 2**64 // n * n - 1  # above it some remainders would be missing
        words = self._words(count)
        while (late := np.flatnonzero(words > np.uint64(most))).size:
            words = words.copy()
            words[late] = self._words(len(late))
        return (words % np.uint64(n)).astype(np.int64)

    def heads(self, gamma: NDArray[Any], exact: Exact, margin: float = MARGIN) -> NDArray[np.bool_]:
        """True with probability e^(−γ) for each γ; `exact(i)` is the γ that `gamma[i]` is rounded from."""
        words = self._words(len(gamma))
        drawn, chance = words * 2.0**-64, np.exp(-gamma)
        shown = drawn < chance
        for i in np.flatnonzero(np.abs(drawn - chance) <= margin):
            shown[i] = self._compared(int(words[i]), exact(int(i)))
        return np.asarray(shown)

    def _compared(self, word: int, gamma: Fraction) -> bool:
        """Whether a number between 0 and 1 with these first bits is below e^(−γ); more bits as long as that is open."""
        bits = 64
        while True:
            with localcontext() as context:
                context.prec = bits // 2
                chance = (-Decimal(gamma.numerator) / gamma.denominator).exp()
                error = chance * Decimal(10) ** (8 - context.prec)
                low, width = Decimal(word), Decimal(1)
                context.prec = bits
                whole = Decimal(2) ** bits
                if low + width <= (chance - error) * whole:
                    return True
                if low >= (chance + error) * whole:
                    return False
            word, bits = (word << 64) | int(self._words(1)[0]), bits + 64
