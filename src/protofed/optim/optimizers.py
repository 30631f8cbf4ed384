"""The optimisers, and the names that configurations call them by."""

from protofed.optim.adam import Adam
from protofed.optim.base import Gradient, HasRate, Optimizer, halved, in_place_step, rate_of
from protofed.optim.sam import Asam, Sam
from protofed.optim.sgd import Sgd

__all__ = [
    "OPTIMIZERS",
    "Adam",
    "Asam",
    "Gradient",
    "HasRate",
    "Optimizer",
    "Sam",
    "Sgd",
    "halved",
    "in_place_step",
    "rate_of",
]

OPTIMIZERS: dict[str, type[Sgd | Adam | Sam | Asam]] = {"sgd": Sgd, "adam": Adam, "sam": Sam, "asam": Asam}
