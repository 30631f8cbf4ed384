"""How a client trains what is its own, where that differs from what is configured for all."""

from typing import Literal

from protofed.api.method import SettingErrors
from protofed.errors import BadInput
from protofed.optim.optimizers import Adam, Asam, HasRate, Optimizer, Sam, Sgd, rate_of

OwnOptimizer = Literal["configured", "sgd"]
"""The configured optimiser, or gradient descent without momentum and weight decay."""


def own_optimizer(configured: Optimizer, lr: float, choice: OwnOptimizer, halvings: int = 0) -> Optimizer:
    """What a client trains its own with; a rate of 0 is the configured one. Clipping stays as configured, and a rate
    that falls from round to round falls here too. A rate of its own is halved so often; the configured one has been."""
    lr /= 2**halvings
    optimizer = _plain(configured, lr) if choice == "sgd" else configured
    if not lr:
        return optimizer
    if not isinstance(optimizer, HasRate):
        raise BadInput(f"{optimizer!r} has no learning rate that could be set: take one that has, or leave this at 0")
    return optimizer.with_lr(lr)


def own_optimizer_errors(setting: str, configured: Optimizer, lr: float, choice: OwnOptimizer) -> SettingErrors:
    """The error for an optimiser without a rate, where one is needed."""
    try:
        own_optimizer(configured, lr, choice)
    except BadInput as error:
        yield setting, str(error)


def _plain(configured: Optimizer, lr: float) -> Sgd:
    base = configured.base if isinstance(configured, Sam | Asam) else configured
    if isinstance(base, Sgd | Adam):
        return Sgd(lr=base.lr, clip_norm=base.clip_norm, lr_decay=base.lr_decay)
    rate = lr or rate_of(base)
    if not rate:
        raise BadInput(f"{configured!r} has no learning rate that sgd could take over: set one here")
    return Sgd(lr=rate)
