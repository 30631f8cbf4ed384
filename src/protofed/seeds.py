"""Seeds derived from a path, so that every draw depends on where it is made and on nothing else."""

import hashlib
from math import pi, prod

import torch
from torch import Tensor


def derive_seed(root: int, *path: str | int) -> int:
    """A 63-bit seed for this place: the same on every machine, unrelated between places."""
    text = "\0".join(f"{type(word).__name__}:{word!r}" for word in (root, *path))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(root: int, *path: str | int) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(root, *path))


def normal(number: Tensor, *shape: int) -> Tensor:
    """Standard normal draws that are a function of a whole number: for losses, which must be pure.

    A counter is hashed by SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), and pairs of the results are turned into normal
    numbers by Box and Muller's rule.
    """
    counter = torch.arange(2 * prod(shape), device=number.device) + _hashed(number)
    uniform = (_shifted(_hashed(counter), 40).float() + 0.5) / 2**24  # 24 bits, never 0 or 1
    radius, turn = uniform.chunk(2)
    return ((-2 * radius.log()).sqrt() * (2 * pi * turn).cos()).view(shape)


def _hashed(number: Tensor) -> Tensor:
    """SplitMix64, in whole numbers that wrap around."""
    number = number * -7046029254386353131  # 0x9E3779B97F4A7C15 with a sign, as are those below
    number = (number ^ _shifted(number, 30)) * -4658895280553007687
    number = (number ^ _shifted(number, 27)) * -7723592293110705685
    return number ^ _shifted(number, 31)


def _shifted(number: Tensor, bits: int) -> Tensor:
    """To the right, with zeros coming in."""
    return (number >> bits) & ((1 << (64 - bits)) - 1)
