"""The optimisers, and the names that configurations call them by."""

from protofed.optim.adam import Adam
from protofed.optim.adamw import AdamW
from protofed.optim.rmsprop import RmsProp
from protofed.optim.sam import Asam, Plain, Sam
from protofed.optim.sgd import Sgd
from protofed.optim.steps import Gradient, HasRate, Optimizer, halved, in_place_step, rate_of

__all__ = [
    "OPTIMIZERS",
    "PLAIN",
    "Adam",
    "AdamW",
    "Asam",
    "Gradient",
    "HasRate",
    "Optimizer",
    "Plain",
    "RmsProp",
    "Sam",
    "Sgd",
    "halved",
    "in_place_step",
    "rate_of",
]

PLAIN: dict[str, type[Plain]] = {"sgd": Sgd, "adam": Adam, "adamw": AdamW, "rmsprop": RmsProp}
"""Those that a sharpness-aware one can go around."""

OPTIMIZERS: dict[str, type[Plain | Sam | Asam]] = {**PLAIN, "sam": Sam, "asam": Asam}
