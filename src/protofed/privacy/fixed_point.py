"""Sums in fixed point: whole numbers, whose sum is exact and the same in any order, and which masks can hide.

A number x becomes round(2ˢ · x), a whole number of 64 bits. No sum of K such numbers overflows as long as none is
larger than `LARGEST`, and a larger one is refused where it is made: at the client.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from protofed.api.sums import Summands, Totals
from protofed.tree import Mean, Tree, named_leaves

LARGEST_BITS = 24
LARGEST = float(2**LARGEST_BITS)
"""No number that a client adds is larger; a weight in a network times a client's number of examples is one."""


class TooLarge(ValueError):
    """A client's number does not fit, or is none."""


@dataclass(frozen=True)
class FixedPoint:
    """Numbers of which at most so many clients add one each."""

    clients: int

    @property
    def bits(self) -> int:
        """s, behind the point: all that 62 bits leave."""
        return 62 - LARGEST_BITS - (self.clients - 1).bit_length()

    @property
    def error(self) -> float:
        """The most by which a client's number is off."""
        return 2.0 ** -(self.bits + 1)

    def encoded(self, values: Tensor) -> Tensor:
        """The numbers as int64."""
        values = values.double()
        if not bool((values.abs() <= LARGEST).all()):  # guard: sums-clipped-at-client
            largest = values.abs().max().item()
            raise TooLarge(f"{largest:g} cannot be added: the numbers of a secure sum are at most {LARGEST:g}")
        return (values * 2.0**self.bits).round().to(torch.int64)

    def decoded(self, total: Tensor) -> Tensor:
        """The sum, in float64."""
        return total.double() / 2.0**self.bits

    def is_sum_of(self, total: Tensor, count: int) -> bool:
        """Whether so many clients can have added up to this; what is left of a mask hardly ever can."""
        return bool((total.double().abs() <= count * LARGEST * 2.0**self.bits).all())


def flat(summands: Summands) -> Tensor:
    """All that a client adds, (P,), float64: of each summand its weight, then weight · leaf for every leaf, by name."""
    parts = [torch.zeros(0, dtype=torch.float64, device="cpu")]
    for _, (value, weight) in sorted(summands.items()):
        parts.append(torch.tensor([weight], dtype=torch.float64, device="cpu"))
        parts += [weight * leaf.detach().double().flatten().cpu() for _, leaf in by_name(value)]
    return torch.cat(parts)


def weight_places(summands: Summands) -> Tensor:
    """Which of the numbers of `flat` are weights, (P,)."""
    sizes = [sum(leaf.numel() for _, leaf in by_name(value)) for _, (value, _) in sorted(summands.items())]
    places = [torch.tensor([True] + [False] * size, device="cpu") for size in sizes]
    return torch.cat([torch.zeros(0, dtype=torch.bool, device="cpu"), *places])


def places(summands: Summands) -> Iterator[tuple[str, Tensor, float, Tensor]]:
    """Where the leaves of summands are among the numbers of `flat`: name, leaf, weight, and places (p,)."""
    start = 0
    for name, (value, weight) in sorted(summands.items()):
        start += 1
        for path, leaf in by_name(value):
            yield f"{name}/{path}", leaf, weight, torch.arange(start, start + leaf.numel(), device="cpu")
            start += leaf.numel()


def totals_of(flat_sum: Tensor, like: Summands) -> Totals:
    """The sums of summands like these, from the sum of what `flat` makes of them."""
    totals, start = {}, 0
    for name, (value, _) in sorted(like.items()):
        weight, sums, start = flat_sum[start].item(), dict[str, Tensor](), start + 1
        for path, leaf in by_name(value):
            sums[path] = flat_sum[start : start + leaf.numel()].reshape(leaf.shape).to(leaf.device)
            start += leaf.numel()
        totals[name] = Mean.of_sums(value, sums, weight)
    if start != len(flat_sum):
        raise ValueError(f"{len(flat_sum)} numbers are not the {start} of these summands")
    return totals


def by_name(value: Tree) -> list[tuple[str, Tensor]]:
    """The leaves in an order that does not depend on the order of a client's dicts."""
    return sorted(named_leaves(value).items())
