"""Schedules of the learning rate, on numbers that are worked out by hand."""

from math import sqrt

import pytest
import torch

from protofed.optim.optimizers import Adam, Asam, Sgd
from protofed.optim.schedules import SCHEDULES, ConstantRate, CosineRate, Schedule, StepRate, scheduled


def shares(schedule: Schedule, num_rounds: int) -> list[float]:
    return [schedule.share(t, num_rounds) for t in range(num_rounds)]


def test_without_a_schedule_the_rate_stays() -> None:
    assert shares(ConstantRate(), 4) == [1, 1, 1, 1]


def test_a_warm_up_is_linear_and_reaches_lr_in_its_last_round() -> None:
    assert shares(ConstantRate(warmup=4), 6) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert shares(ConstantRate(warmup=1), 3) == [1, 1, 1]


def test_half_a_cosine_from_lr_to_its_final_value() -> None:
    # Angles are 0, 45, 90 and 135 degrees: (1 + cos) / 2 of each.
    expected = [1, (1 + sqrt(0.5)) / 2, 0.5, (1 - sqrt(0.5)) / 2]
    assert shares(CosineRate(), 4) == pytest.approx(expected)
    # Of the 0.8 above the final 0.2, the same shares; 0.2 itself is reached when the last round has ended.
    assert shares(CosineRate(final=0.2), 4) == pytest.approx([0.2 + 0.8 * share for share in expected])
    assert CosineRate(final=0.2).share(4, 4) == CosineRate(final=0.2).share(9, 4) == pytest.approx(0.2)


def test_a_cosine_starts_at_the_peak_of_the_warm_up() -> None:
    # The peak is the third of six rounds, and the cosine has the four from there on.
    expected = [1 / 3, 2 / 3, 1, (1 + sqrt(0.5)) / 2, 0.5, (1 - sqrt(0.5)) / 2]
    assert shares(CosineRate(warmup=3), 6) == pytest.approx(expected)
    assert shares(CosineRate(warmup=6), 6) == pytest.approx([t / 6 for t in range(1, 7)])


def test_a_cosine_is_that_of_torch() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.3)
    curve = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=0.3 * 0.1)
    for share in shares(CosineRate(final=0.1), 20):
        assert 0.3 * share == pytest.approx(curve.get_last_lr()[0])
        optimizer.step()
        curve.step()


def test_a_step_multiplies_after_every_so_many_rounds() -> None:
    assert shares(StepRate(every=2, factor=0.5), 7) == [1, 1, 0.5, 0.5, 0.25, 0.25, 0.125]
    # The rounds are counted from the peak, the second round.
    assert shares(StepRate(every=2, factor=0.5, warmup=2), 7) == [0.5, 1, 1, 0.5, 0.5, 0.25, 0.25]


@pytest.mark.parametrize("kind", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 7, 20])
def test_no_round_trains_with_a_rate_of_zero_or_above_lr(kind: type[ConstantRate], warmup: int) -> None:
    assert all(0 < share <= 1 for share in shares(kind(warmup=warmup), 20))


def test_a_share_of_the_rate_leaves_all_else() -> None:
    assert scheduled(Adam(lr=0.4, beta1=0.5), 0.25) == Adam(lr=0.1, beta1=0.5)
    assert scheduled(Asam(Sgd(lr=0.4), rho=0.3), 0.5) == Asam(Sgd(lr=0.2), rho=0.3)
    sgd = Sgd(lr=0.1)
    assert scheduled(sgd, 1.0) is sgd
