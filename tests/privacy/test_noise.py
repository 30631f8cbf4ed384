"""What a release may tell of one record, and that its noise is as large as was said."""

from math import log

import pytest
import torch
from scipy.stats import beta
from torch import Tensor

from protofed.privacy.account import mu_of
from protofed.privacy.noise import Noise, Query, Secret, Simulated, noise_of

DRAWS = 1_000_000


@pytest.mark.parametrize("multiplier", [0.5, 5.0])
def test_one_record_moves_a_sum_by_no_more_than_the_noise_is_made_for(multiplier: float) -> None:
    """T1."""
    query = Query(size=64, most=4.0, multiplier=multiplier)
    rows = torch.randn(20_000, 64) * torch.logspace(-3, 6, 20_000)[:, None]
    rows[0], rows[1], rows[2, 0], rows[3, 1] = 0.0, 1e30, torch.inf, torch.nan
    moved = query.clipped(rows).norm(dim=1)
    assert moved.max() / query.scale <= 1 / multiplier
    assert moved.max() / query.scale == pytest.approx(1 / multiplier, rel=0.01)
    assert moved[2] == moved[3] == 0


def test_short_vectors_are_left_alone_and_long_ones_keep_their_direction() -> None:
    query = Query(size=2, most=5.0, multiplier=1.0)
    clipped = query.clipped(torch.tensor([[3.0, -1.0], [30.0, 40.0]])) * query.grid
    assert clipped == pytest.approx(torch.tensor([[3.0, -1.0], [3.0, 4.0]]).double(), abs=1e-5)


def test_sums_are_exact_in_any_order() -> None:
    query = Query(size=8, most=1.0, multiplier=3.0)
    rows = query.clipped(torch.randn(1000, 8))
    assert torch.equal(rows.sum(0), rows[torch.randperm(1000)].view(10, 100, 8).sum(1).sum(0))


@pytest.mark.parametrize("noise", [Simulated(1), Secret()], ids=["simulated", "secret"])
def test_noise_has_mean_variance_and_kurtosis_of_what_was_said(noise: Noise) -> None:
    """T2."""
    query = Query(size=DRAWS, most=2.0, multiplier=3.0)
    drawn = query.released(torch.zeros(1000, 1000, dtype=torch.float64), noise)
    assert drawn.shape == (1000, 1000)
    drawn = drawn.flatten() / (query.scale * query.grid)
    assert abs(drawn.mean()) < 0.005
    assert drawn.var() == pytest.approx(1, abs=0.01)
    assert (drawn**4).mean() / drawn.var() ** 2 == pytest.approx(3, abs=0.05)
    assert query.scale * query.grid == pytest.approx(6.0, rel=0.002)


def test_counts_need_no_rounding() -> None:
    query = Query(size=10, most=1.0, multiplier=5e6, is_whole=True)
    assert query.grid == 1.0
    assert query.scale == 5e6
    assert Query(size=10, most=1.0, multiplier=2.0, is_whole=True).scale * 2.0**-19 == 2.0


def lower_bound(with_record: Tensor, without: Tensor, delta: float) -> float:
    """An ε that the draws prove, wrong in 1 of 10⁴ tests: half of them choose a threshold, by which the others are told
    apart. The numbers of right and wrong guesses have exact bounds (Clopper, Pearson, 1934)."""
    half = len(without) // 2
    thresholds = without[:half].sort().values[(half * (1 - torch.logspace(-0.3, -5.5, 60))).long()]

    def bound(a: Tensor, b: Tensor, at: Tensor) -> float:
        right, wrong, count = int((a > at).sum()), int((b > at).sum()), len(a)
        low, high = beta.ppf(1e-4 / 2, right, count - right + 1), beta.ppf(1 - 1e-4 / 2, wrong + 1, count - wrong)
        return log(max(low - delta, 1e-12) / high)

    best = max(thresholds, key=lambda at: bound(with_record[:half], without[:half], at))
    return bound(with_record[half:], without[half:], best)


@pytest.mark.parametrize("epsilon", [1.0, 3.0, 8.0])
def test_a_million_draws_prove_no_more_than_was_promised_and_more_if_noise_is_halved(epsilon: float) -> None:
    """T4."""
    query = Query(size=1, most=1.0, multiplier=1 / mu_of(epsilon, 1e-5))
    record = query.clipped(torch.tensor([[1.0]])).item()
    noise = Simulated(5)
    drawn = [noise.whole(DRAWS, query.scale).double() for _ in range(2)]
    right = lower_bound(drawn[0] + record, drawn[1], 1e-5)
    assert 0.4 * epsilon < right <= epsilon
    assert lower_bound(drawn[0] / 2 + record, drawn[1] / 2, 1e-5) > epsilon


def test_simulated_noise_can_be_drawn_again_and_secret_noise_cannot() -> None:
    query = Query(size=100, most=1.0, multiplier=1.0)
    zero = torch.zeros(100)
    first, again = noise_of("simulated", 7), noise_of("simulated", 7)
    drawn = query.released(zero, first)
    assert torch.equal(drawn, query.released(zero, again))
    assert not torch.equal(drawn, query.released(zero, first)), "every draw is another one"
    assert not torch.equal(drawn, query.released(zero, noise_of("simulated", 8)))
    torch.manual_seed(0)
    secret = query.released(zero, noise_of("secret", 7))
    torch.manual_seed(0)
    assert not torch.equal(secret, query.released(zero, noise_of("secret", 7)))


def test_noise_of_no_size_is_refused() -> None:
    with pytest.raises(ValueError, match="as good as none"):
        Query(size=1, most=1.0, multiplier=1e-4)
