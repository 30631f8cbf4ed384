"""What a run's noise promises, as a closed form.

All noise here is normal, and every release is of all records: nothing is gained by a secret choice of records. Then a
whole run is one release of a normal mechanism with μ² = Σ 1/m² over its releases, where m is the noise's standard
deviation divided by the most that one record changes (Dong, Roth, Su, 2019). For such a mechanism, ε and δ belong
together exactly (Balle, Wang, ICML 2018):

    δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ)

This also holds if later releases depend on earlier ones, and a run that ends before Σ 1/m² would exceed μ² has spent
μ² at most (Koskela et al., 2022).
"""

from collections.abc import Callable
from math import exp, expm1, inf, log, sqrt

LARGEST = 1e6
"""Nobody asks for an ε, or gets a μ, above it."""


def delta_of(epsilon: float, mu: float) -> float:
    """δ of a mechanism with μ, at ε."""
    return exp(_log_delta(epsilon, mu)) if mu > 0 else 0.0


def epsilon_of(mu: float, delta: float) -> float:
    """The smallest ε that a mechanism with μ has at this δ."""
    _check(delta)
    if mu < 0 or mu > LARGEST:
        raise ValueError(f"μ is {mu}, not from 0 to {LARGEST:g}")
    if mu == 0 or _log_delta(0.0, mu) <= log(delta):
        return 0.0
    most = mu * mu + 100 * mu + 1.0
    return _falling(lambda epsilon: _log_delta(epsilon, mu) - log(delta), most)


def mu_of(epsilon: float, delta: float) -> float:
    """The largest μ that keeps to ε and δ."""
    _check(delta)
    if not 0 < epsilon <= LARGEST:
        raise ValueError(f"ε is {epsilon}, not above 0 and at most {LARGEST:g}")
    # the root comes from above, so the last digit is taken off: never more than what was promised
    root = _falling(lambda mu: log(delta) - (_log_delta(epsilon, mu) if mu else -inf), 10 + 2 * sqrt(epsilon))
    return root * (1 - 1e-12)


def cost(multiplier: float) -> float:
    """1/m²: what a release with this noise adds to μ²."""
    return 1 / (multiplier * multiplier)


def multiplier(mu: float, releases: float) -> float:
    """m = √k / μ: the noise of each of so many equal releases that together have μ."""
    return sqrt(releases) / mu


def _check(delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"δ is {delta}, not between 0 and 1")


def _log_delta(epsilon: float, mu: float) -> float:
    """log δ: both terms are tiny and nearly equal, so their quotient is taken as a difference of logarithms."""
    from scipy.special import log_ndtr  # here, since a handed-over model is used without scipy

    first = float(log_ndtr(mu / 2 - epsilon / mu))
    second = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    return first + log(-expm1(second - first)) if second < first else -inf


def _falling(function: Callable[[float], float], most: float) -> float:
    """Where a falling function has its zero between 0 and `most`, by bisection to the last digit."""
    low, high = 0.0, most
    while True:
        middle = (low + high) / 2
        if middle in (low, high):
            return high
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
