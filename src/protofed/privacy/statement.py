"""What a run says of its differential privacy, to people."""

from collections.abc import Sequence

from protofed.privacy.account import epsilon_of
from protofed.privacy.settings import PrivacySettings

SIMULATED = "SIMULATED"

NOT_COVERED = (
    "metrics and whatever else is computed on test examples",
    "which classes a client has, and how many records it enrolled with",
    "what the preparation of own data shares: means, deviations and words of columns",
    "who takes part, when, and whose step fails",
    "settings that were chosen by looking at other runs on the same records",
    "what clients keep, which stays with them, and figures drawn from their examples",
)


def promise(settings: PrivacySettings) -> str:
    """What is promised before the first round."""
    return (
        f"Differential privacy of every {unit(settings)}, for the whole run: ε = {settings.epsilon:g}, δ = "
        f"{settings.delta:g}. {noise(settings)}"
    )


def unit(settings: PrivacySettings) -> str:
    """Whose presence is hidden."""
    return "client, with all its records" if settings.level == "client" else "record of a client"


def noise(settings: PrivacySettings) -> str:
    if settings.noise == "simulated":
        return f"{SIMULATED} noise, from the run's seed: whoever knows it can take it off, so nobody is protected."
    return "Secret noise, from the system's entropy."


def spent(settings: PrivacySettings, most: float) -> str:
    """What was released; `most` is μ² of the client that has released most."""
    epsilon = epsilon_of(most**0.5, settings.delta)
    mark = f" ({SIMULATED})" if settings.noise == "simulated" else ""
    return f"Released so far: ε = {epsilon:.4g} of {settings.epsilon:g} at δ = {settings.delta:g}{mark}"


def lines(settings: PrivacySettings, most: float) -> Sequence[str]:
    """All that is said at the end."""
    return (promise(settings), f"{spent(settings, most)}.", f"Not covered: {'; '.join(NOT_COVERED)}.")


def facts(settings: PrivacySettings, most: float) -> dict[str, object]:
    """The same for programs."""
    return {
        "unit": settings.level,
        "epsilon": settings.epsilon,
        "delta": settings.delta,
        "released": epsilon_of(most**0.5, settings.delta),
        "noise": SIMULATED if settings.noise == "simulated" else settings.noise,
        "not_covered": list(NOT_COVERED),
    }
