"""Settings of a federation that cannot go together."""

from typing import TYPE_CHECKING

from protofed.api.method import validate
from protofed.engine.around import unwrapped
from protofed.engine.private import refusals
from protofed.optim.optimizers import rate_of
from protofed.optim.schedules import ConstantRate

if TYPE_CHECKING:
    from protofed.engine.federation import Federation


def problems_of(federation: "Federation") -> list[str]:
    """What of the settings cannot be, with the method and the task that there are."""
    t, method = federation.training, unwrapped(federation.method)
    problems = [f"{key}: {why}" for key, why in validate(method, t.optimizer, t.batch_size, federation.spec)]
    if t.on_divergence == "retry_half_lr" and rate_of(t.optimizer) is None:
        problems.append(f'training.on_divergence = "retry_half_lr": {t.optimizer!r} has no learning rate to be halved')
    if t.schedule != ConstantRate() and rate_of(t.optimizer) is None:
        problems.append(f"training.schedule: {t.optimizer!r} has no learning rate to be changed")
    if t.minimum_replies > (sampled := len(federation.sampled(0))):
        problems.append(
            f"training.minimum_replies is {t.minimum_replies}, but only {sampled} clients take part in a round"
        )
    conflicts = federation.uploads.robust.conflicts(method, t.weighting, t.minimum_replies)
    problems += (f"{key} {why}" for key, why, _ in conflicts)
    if federation.private is not None:
        problems += refusals(federation)
        if federation.private.settings.level == "client" and federation.secure is None:
            problems.append('privacy.level = "client" and secure.sums: only a sum can hide a client; set it to true')
    if federation.noised_sums is not None and method.sums:
        problems += federation.noised_sums.refusals()
    return [*problems, *(federation.secure.refusals(federation) if federation.secure is not None else ())]
