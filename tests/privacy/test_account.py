"""The closed form against a numerical accountant, and against itself."""

from math import log, sqrt

import pytest

from protofed.privacy.account import cost, delta_of, epsilon_of, mu_of, multiplier

# (m, releases, δ, ε), by dp-accounting 0.6.0: from_gaussian_mechanism(m, value_discretization_interval = 2e-5, or 1e-4
# for m < 2, use_connect_dots=True).self_compose(releases).get_epsilon_for_delta(δ), of its privacy_loss_distribution.
REFERENCE = [
    (0.7, 1, 1e-05, 6.652487892057906),
    (0.7, 1, 1e-07, 8.02787341394023),
    (0.7, 8, 1e-05, 24.716077872758365),
    (0.7, 8, 1e-07, 28.530932511660037),
    (0.7, 24, 1e-05, 53.55877860191701),
    (0.7, 24, 1e-07, 60.13123989063355),
    (0.7, 100, 1e-05, 162.09357506092405),
    (0.7, 100, 1e-07, 175.46495217225075),
    (1.0, 1, 1e-05, 4.377178100051882),
    (1.0, 1, 1e-07, 5.3493454151485205),
    (1.0, 8, 1e-05, 15.456155839863595),
    (1.0, 8, 1e-07, 18.140517157718396),
    (1.0, 24, 1e-05, 32.176679627207804),
    (1.0, 24, 1e-07, 36.79172729357123),
    (1.0, 100, 1e-05, 91.81728981791781),
    (1.0, 100, 1e-07, 101.18920934339087),
    (2.0, 1, 1e-05, 1.9930914048451347),
    (2.0, 1, 1e-07, 2.49033853050257),
    (2.0, 8, 1e-05, 6.5729700686290045),
    (2.0, 8, 1e-07, 7.934879287603268),
    (2.0, 24, 1e-05, 12.870661787272597),
    (2.0, 24, 1e-07, 15.20129690627598),
    (2.0, 100, 1e-05, 33.10373300677963),
    (2.0, 100, 1e-07, 37.81295151988917),
    (5.0, 1, 1e-05, 0.725521751183733),
    (5.0, 1, 1e-07, 0.9317784086689631),
    (5.0, 8, 1e-05, 2.2883865668448786),
    (5.0, 8, 1e-07, 2.848499448095058),
    (5.0, 24, 1e-05, 4.275023143367613),
    (5.0, 24, 1e-07, 5.228119495486131),
    (5.0, 100, 1e-05, 9.997256287986632),
    (5.0, 100, 1e-07, 11.907867460370376),
    (20.0, 1, 1e-05, 0.1600420357365474),
    (20.0, 1, 1e-07, 0.21510012460173558),
    (20.0, 8, 1e-05, 0.49697537120824925),
    (20.0, 8, 1e-07, 0.6450665462444729),
    (20.0, 24, 1e-05, 0.9058369028203183),
    (20.0, 24, 1e-07, 1.156293150124317),
    (20.0, 100, 1e-05, 1.9930914414832483),
    (20.0, 100, 1e-07, 2.490338568924864),
]


@pytest.mark.parametrize(("m", "releases", "delta", "epsilon"), REFERENCE)
def test_many_releases_have_the_epsilon_of_a_numerical_accountant(
    m: float, releases: int, delta: float, epsilon: float
) -> None:
    """T3."""
    assert epsilon_of(sqrt(releases * cost(m)), delta) == pytest.approx(epsilon, rel=1e-5)


@pytest.mark.parametrize(("m", "releases", "delta", "epsilon"), REFERENCE[::5])
def test_renyi_s_bound_is_a_little_above(m: float, releases: int, delta: float, epsilon: float) -> None:
    """T3: The older way to account: the least αμ²/2 + log(1/δ)/(α − 1) over α, which is μ²/2 + μ √(2 log(1/δ))."""
    mu = sqrt(releases) / m
    assert 1 <= (mu**2 / 2 + mu * sqrt(2 * log(1 / delta))) / epsilon_of(mu, delta) < 1.3


@pytest.mark.parametrize(("epsilon", "mu"), [(1.0, 0.26805), (3.0, 0.71912), (8.0, 1.66603)])
def test_mu_for_a_promise(epsilon: float, mu: float) -> None:
    assert mu_of(epsilon, 1e-5) == pytest.approx(mu, rel=2e-5)


@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 1.0, 8.0, 100.0, 1e4])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 1e-2])
def test_the_three_belong_together(epsilon: float, delta: float) -> None:
    mu = mu_of(epsilon, delta)
    assert epsilon_of(mu, delta) == pytest.approx(epsilon, rel=1e-8)
    assert epsilon_of(mu, delta) <= epsilon, "never more than was promised"
    assert delta_of(epsilon, mu) == pytest.approx(delta, rel=1e-6)


def test_without_releases_nothing_is_told() -> None:
    assert epsilon_of(0.0, 1e-5) == 0.0
    assert delta_of(1.0, 0.0) == 0.0
    assert epsilon_of(1e-6, 1e-5) == 0.0, "at ε = 0, δ is Φ(μ/2) − Φ(−μ/2) ≈ 4e-7 already"


def test_k_releases_of_one_multiplier_have_mu() -> None:
    assert 24 * cost(multiplier(0.719, 24)) == pytest.approx(0.719**2)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 1e-5), (-1.0, 1e-5), (1.0, 0.0), (1.0, 1.0), (1e9, 1e-5)])
def test_promises_that_cannot_be(epsilon: float, delta: float) -> None:
    with pytest.raises(ValueError, match="not"):
        mu_of(epsilon, delta)
