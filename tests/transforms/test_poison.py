"""What robust rules are worth on minidigits, under attacks that no check of a single upload can see."""

import pytest

from faults.poison import accuracy
from protofed import RobustSettings


def robust(faulty: int, weights: str = "trimmed", prototypes: str = "mean") -> RobustSettings:
    return RobustSettings(faulty, weights, prototypes)  # type: ignore[arg-type]


@pytest.mark.slow
def test_robust_means_bear_attacks_that_the_mean_does_not() -> None:
    """T15. The controls: the mean under the strongest attack, and Krum without any, which is why there is no Krum."""
    plain = RobustSettings()
    clean = accuracy("fedavg", "none", 1, robust(1))
    assert clean is not None
    assert clean > 75
    for attack, attackers, rule in (
        ("-10 x update", 1, "trimmed"),
        ("-10 x update", 2, "nnm_trimmed"),
        ("labels + 1", 2, "trimmed"),
    ):
        under = accuracy("fedavg", attack, attackers, robust(attackers, rule))
        assert under is not None, (attack, attackers)
        assert under >= clean - 10, (attack, attackers)
    ruined = accuracy("fedavg", "-10 x update", 1, plain)
    assert ruined is None or ruined <= 30
    one_clients_model = accuracy("fedavg", "none", 1, plain, krum=True)
    assert one_clients_model is not None
    assert one_clients_model <= 60


@pytest.mark.slow
def test_the_gate_and_the_rules_bear_prototypes_that_are_too_long() -> None:
    """T16. The control is FPL without either."""
    clean = accuracy("fpl", "none", 1, RobustSettings())
    assert clean is not None
    for rule, ratio in (("gate", 10.0), ("clip", 0.0), ("filter", 0.0)):
        given = RobustSettings() if rule == "gate" else robust(1, "mean", rule)
        under = accuracy("fpl", "prototypes x 100", 1, given, ratio=ratio)
        assert under is not None, rule
        assert under >= clean - 5, rule
    ruined = accuracy("fpl", "prototypes x 100", 1, RobustSettings(), ratio=0.0)
    assert ruined is None or ruined <= 30
