"""Shares of noise: together they are enough after drop-outs, and on the grid of the fixed point."""

from math import sqrt

import pytest
import torch

from protofed.privacy.fixed_point import FixedPoint
from protofed.privacy.settings import NoiseKind
from protofed.privacy.shares import Clipping, NoiseShare

CLIENTS, HONEST, NUMBERS = 10, 7, 20_000


def share(kind: NoiseKind = "simulated", whole_client: bool = True, most: float = 2.0) -> NoiseShare:
    return NoiseShare(most, 1.5, HONEST, kind, whole_client)


@pytest.mark.parametrize("kind", ["simulated", "secret"])
def test_the_noise_of_a_sum_is_enough_with_as_many_drop_outs_as_there_may_be(kind: NoiseKind) -> None:
    """σ = 1.5 · 2 = 3, wider by rounding. With all ten clients the variance is 10/7 of it, and with seven all of it.
    The standard error of a variance of 20 000 numbers is 1 %."""
    nothing = torch.zeros(NUMBERS, dtype=torch.float64)
    shares = [share(kind).added(nothing, seed) for seed in range(CLIENTS)]
    query = share().query(NUMBERS)
    variance = (query.scale * query.grid) ** 2
    assert variance == pytest.approx(9, rel=1e-2)
    for gone in range(4):
        total = torch.stack(shares[gone:]).sum(0)
        assert total.square().mean().item() == pytest.approx(variance * (CLIENTS - gone) / HONEST, rel=0.05)
        assert abs(total.mean().item()) < 5 * sqrt(variance * CLIENTS / HONEST / NUMBERS)
    assert torch.stack(shares[4:]).sum(0).square().mean() < 0.93 * variance, "with six there is too little"


def test_what_is_added_is_whole_and_fits_into_the_fixed_point_exactly() -> None:
    point, draws = FixedPoint(CLIENTS), torch.Generator().manual_seed(0)
    vectors = torch.randn(CLIENTS, 50, generator=draws, dtype=torch.float64)
    added = [share().added(v, seed) for seed, v in enumerate(vectors)]
    grid = share().query(50).grid
    assert all(torch.equal(a / grid, (a / grid).round()) for a in added)
    assert all(torch.equal(point.decoded(point.encoded(a)), a) for a in added)
    forwards = torch.stack([point.encoded(a) for a in added]).sum(0)
    assert torch.equal(point.decoded(forwards), torch.stack(added[::-1]).sum(0))
    assert share().scale(50) >= 2**10
    assert share().scale(50) == pytest.approx(1.5 * 2 / grid / sqrt(7), rel=1e-3)


def test_a_client_changes_the_sum_by_no_more_than_the_noise_is_made_for() -> None:
    nothing = torch.zeros(40, dtype=torch.float64)
    for length in (0.5, 2.0, 1e6):
        vector = torch.ones(40, dtype=torch.float64) * length / sqrt(40)
        change = share().added(vector, 3) - share().added(nothing, 3)
        assert change.norm() <= 2.0 + 1e-5
        torch.testing.assert_close(change, vector * min(1, 2 / length), atol=1e-5, rtol=0)


def test_records_are_clipped_one_by_one_and_their_sum_is_not() -> None:
    of_records = share(whole_client=False)
    rows = torch.tensor([[3.0, 4.0], [0.6, 0.8], [30.0, 40.0]])  # 2 long each, but for the second: (1.2, 1.6) twice
    clips = Clipping(of_records)
    total = clips.released(clips.clipped(rows).sum(0))
    torch.testing.assert_close(total, torch.tensor([3.0, 4.0], dtype=torch.float64), atol=1e-5, rtol=0)
    nothing = torch.zeros(2, dtype=torch.float64)
    assert torch.equal(of_records.added(total, 0) - of_records.added(nothing, 0), total)


def test_a_share_below_the_grid_is_refused() -> None:
    with pytest.raises(ValueError, match="too narrow"):
        NoiseShare(1.0, 1.0, 2**24, "simulated", True).scale(10)


def test_simulated_shares_differ_between_clients_and_secret_ones_between_calls() -> None:
    nothing = torch.zeros(20, dtype=torch.float64)
    assert torch.equal(share().added(nothing, 0), share().added(nothing, 0))
    assert not torch.equal(share().added(nothing, 0), share().added(nothing, 1))
    assert not torch.equal(share("secret").added(nothing, 0), share("secret").added(nothing, 0))
