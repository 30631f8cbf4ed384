"""Plans read every example once per epoch, copies leave BatchNorm alone, and transforms do what slow code does."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from doubles import bits
from protofed import tree
from protofed.data.batches import Batch, Data, batch_at, evaluation_plan, training_plan
from protofed.data.transforms import Draws, Transform


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some(n: int) -> Data:
    """Every third row of a larger store, so that positions and rows differ."""
    return Data(torch.arange(3.0 * n)[:, None], torch.arange(3 * n) % 4, torch.arange(n) * 3 + 1)


def images(n: int = 6, height: int = 5, width: int = 7) -> Tensor:
    return torch.rand(n, 3, height, width, generator=seeded(1))


def test_rows_choose_among_the_rows_of_the_client() -> None:
    data = some(5).rows(torch.tensor([4, 0]))
    assert data.index.tolist() == [13, 1]
    assert data.labels.tolist() == [1, 1]
    assert len(data) == 2
    assert some(5).labels.tolist() == [1, 0, 3, 2, 1]


def test_data_of_arrays_has_all_their_rows() -> None:
    data = Data.of(torch.zeros(3, 2), torch.tensor([2, 0, 1]))
    assert data.index.tolist() == [0, 1, 2]
    assert data.labels.tolist() == [2, 0, 1]


SIZES = [(10, 4, 3), (8, 4, 2), (1, 4, 2), (3, 8, 1), (5, 1, 2), (7, 7, 1), (9, 4, 2), (5, 64, 2)]
"""Examples, batch size, epochs."""


@pytest.mark.parametrize(("n", "size", "epochs"), SIZES)
def test_every_epoch_covers_every_row_once_by_weight(n: int, size: int, epochs: int) -> None:
    data, per_epoch = some(n), -(-n // size)
    plan = training_plan(data, size, epochs, Transform(), seeded())
    assert plan.index.shape == plan.weight.shape
    assert len(plan.index) == epochs * per_epoch
    assert set(plan.weight.unique().tolist()) <= {0.0, 1.0}
    for epoch in range(epochs):
        steps = slice(epoch * per_epoch, (epoch + 1) * per_epoch)
        assert sorted(plan.index[steps][plan.weight[steps] == 1].tolist()) == data.index.tolist()
        assert plan.weight[steps].flatten().tolist() == [1.0] * n + [0.0] * (plan.weight[steps].numel() - n)


# Rows of a batch: the batch size, or the next power of two that holds all examples, and never less than four.
SHAPES = {(290, 100_000): 512, (256, 1000): 256, (47, 64): 64, (47, 50): 50, (25, 64): 32, (9, 100): 16}
SHAPES |= {(5, 8): 8, (3, 8): 4, (1, 8): 4, (1, 3): 3, (5, 1): 1, (7, 7): 7, (72, 64): 64}


@pytest.mark.parametrize(("n", "size"), SHAPES)
def test_a_batch_is_no_larger_than_the_data_need(n: int, size: int) -> None:
    plan = training_plan(some(n), size, 2, Transform(pad=1, flip=True, rotation=5), seeded())
    rows = SHAPES[n, size]
    assert plan.index.shape == (2 * -(-n // size), rows)
    # Of each row: its place, its weight, two offsets, a flip and an angle. Of each step: its number, and if it is last.
    assert sum(leaf.numel() for leaf in tree.leaves(plan)) == len(plan.index) * (6 * rows + 2)


# Examples of an epoch, in the order in which they are drawn, and batch size: what the last batch holds.
LAST = {
    (10, 4): [8, 9, 8, 9],
    (11, 4): [8, 9, 10, 8],
    (72, 64): [*range(64, 72)] * 8,
    (3, 8): [0, 1, 2, 0],
    (8, 4): [4, 5, 6, 7],
    (1, 4): [0, 0, 0, 0],
    (9, 4): [8, 0, 1, 2],  # copies of one row would have no variance
    (6, 5): [5, 0, 1, 2, 3],
}


@pytest.mark.parametrize(("n", "size"), LAST)
def test_a_last_batch_is_filled_with_its_own_rows_in_turn(n: int, size: int) -> None:
    plan = training_plan(some(n), size, 2, Transform(), seeded())
    for indices, weights in zip(plan.index.chunk(2), plan.weight.chunk(2), strict=True):
        order = indices[weights == 1]
        assert indices[-1].tolist() == order[LAST[n, size]].tolist()


@pytest.mark.parametrize(("n", "size"), LAST)
def test_a_copy_is_varied_as_its_row_is(n: int, size: int) -> None:
    plan = training_plan(some(n), size, 2, Transform(pad=9, flip=True, rotation=90), seeded())
    per_epoch = len(plan.index) // 2
    for draws in (plan.draws.offset, plan.draws.flip, plan.draws.angle):
        assert draws is not None
        for epoch in draws.split(per_epoch):
            drawn = epoch.flatten(0, 1)
            assert torch.equal(epoch[-1], drawn[LAST[n, size]])
            assert n == 1 or len(drawn[:n].unique(dim=0)) > 1
    assert plan.draws.angle is not None
    assert len(plan.draws.angle.unique()) == 2 * n  # each example of each epoch has its own


def test_full_batches_are_drawn_as_ever() -> None:
    """The order of the draws: shuffles, augmentation, numbers. Rows that count do not depend on those that fill."""
    draws = seeded(4)
    plan = training_plan(some(10), 4, 2, Transform(flip=True), seeded(4))
    orders = torch.stack([torch.randperm(10, generator=draws) for _ in range(2)])
    flip = torch.rand((6, 4), generator=draws) < 0.5
    number = torch.randint(2**62, (6,), generator=draws)
    assert torch.equal(plan.index[plan.weight == 1], 3 * orders.flatten() + 1)
    assert plan.draws.flip is not None
    assert torch.equal(plan.draws.flip[plan.weight == 1], flip[plan.weight == 1])
    assert torch.equal(plan.number, number)


def normalised(values: list[float], size: int) -> tuple[float, float, float]:
    """Mean and variance by which BatchNorm normalises a last batch of these values after one of zeros, and its running
    variance at a momentum of 1."""
    n = size + len(values)
    plan = training_plan(Data.of(torch.zeros(n, 1), torch.zeros(n)), size, 1, Transform(), seeded())
    x = torch.empty(n, 1)
    x[plan.index[plan.weight == 1], 0] = torch.tensor([0.0] * size + values)  # in the order of the epoch
    batch = batch_at(Data.of(x, torch.zeros(n)), plan, 1, Transform())
    norm = nn.BatchNorm1d(1, momentum=1.0)
    norm(batch.x)
    mean, running = norm.running_mean, norm.running_var
    assert mean is not None
    assert running is not None
    return mean.item(), running.item() * (size - 1) / size, running.item()


def test_batchnorm_sees_the_statistics_of_the_rows_that_count_where_these_divide_the_batch() -> None:
    """Of 1 and 5: mean 3, variance 4. Filled from zeros, as it was once, they would be 1.5 and 4.25. The running
    variance has Bessel's correction of four rows, not of two: 4 · 4/3, where torch's short batch has 4 · 2/1."""
    assert normalised([1.0, 5.0], 4) == pytest.approx((3.0, 4.0, 16 / 3), abs=1e-5)


def test_batchnorm_is_off_by_a_known_share_where_they_do_not() -> None:
    """Of 3, 6 and 9 in four places the first counts twice: mean 21/4, not 6; variance (2 · 2.25² + 0.75² + 3.75²) / 4,
    not 6. By the formula of docs/training.md the mean moves by s (r − s) / (r B) = 1 · 2 / (3 · 4) of the gap between 3
    and the mean of 6 and 9."""
    mean, variance, _ = normalised([3.0, 6.0, 9.0], 4)
    assert (mean, variance) == pytest.approx((5.25, 6.1875), abs=1e-5)
    assert 6.0 - mean == pytest.approx(1 * 2 / (3 * 4) * (7.5 - 3.0), abs=1e-5)


def test_a_row_that_is_alone_is_normalised_among_others_of_its_client() -> None:
    """Of 8 and three zeros: mean 2, variance 12."""
    assert normalised([8.0], 4)[:2] == pytest.approx((2.0, 12.0), abs=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 64, 1000])
def test_rows_of_a_batch_count_almost_equally(size: int) -> None:
    """The mean of a batch varies by at most an eighth more than that of the rows that count: r Σ p² ≤ 9/8."""
    for n in range(1, 140):
        plan = training_plan(some(n), size, 1, Transform(), seeded())
        for index, weight in zip(plan.index, plan.weight, strict=True):
            counts = index.unique(return_counts=True)[1]
            assert counts.max() - counts.min() <= 1
            if weight.sum() > 1 or n == 1:
                assert len(counts) == weight.sum()
                assert len(counts) * (counts / counts.sum()).square().sum() <= 9 / 8 + 1e-6


@pytest.mark.parametrize(("n", "size", "epochs"), SIZES)
def test_only_the_steps_of_the_last_epoch_are_marked(n: int, size: int, epochs: int) -> None:
    plan, per_epoch = training_plan(some(n), size, epochs, Transform(), seeded()), -(-n // size)
    assert plan.is_last_epoch.tolist() == [False] * (epochs - 1) * per_epoch + [True] * per_epoch


def test_a_plan_is_decided_by_its_generator() -> None:
    vary = Transform(pad=2, flip=True, rotation=10)
    first, again, other = (training_plan(some(20), 6, 2, vary, seeded(s)) for s in (0, 0, 1))
    assert bits(first) == bits(again)
    assert all(a != b for a, b in zip(*(list(bits((p.index, p.draws)).values()) for p in (first, other)), strict=True))
    assert not torch.equal(first.index[:3], first.index[4:7])  # epochs are shuffled anew


def test_draws_stay_in_their_ranges_and_reach_them() -> None:
    draws = Transform(pad=2, flip=True, rotation=90).draw(seeded(), 50, 40)
    assert draws.offset is not None
    assert draws.flip is not None
    assert draws.angle is not None
    assert draws.offset.unique().tolist() == [0, 1, 2, 3, 4]
    assert draws.flip.float().mean() == pytest.approx(0.5, abs=0.05)
    assert draws.angle.abs().max() == pytest.approx(torch.pi / 2, abs=0.01)
    assert draws.angle.mean() == pytest.approx(0, abs=0.1)
    assert Transform().draw(seeded(), 2, 2) == Draws(None, None, None)


def test_the_mean_of_a_batch_ignores_filler() -> None:
    batch = Batch(
        torch.zeros(4),
        torch.tensor([0, 1, 0, 1]),
        torch.tensor([1.0, 1.0, 0.0, 0.0]),
        torch.arange(4),
        torch.tensor(True),
        torch.tensor(0),
    )
    assert batch.mean(torch.tensor([1.0, 4.0, 100.0, 100.0])) == 2.5
    logits = torch.tensor([[0.0, 0.0], [0.0, 1.0], [9.0, -9.0], [9.0, -9.0]])
    by_hand = (np.log(2) + np.log(1 + np.exp(-1))) / 2
    assert batch.cross_entropy(logits).item() == pytest.approx(by_hand, abs=1e-6)


def test_the_mean_of_filler_alone_is_zero() -> None:
    batch = Batch(torch.zeros(2), torch.zeros(2), torch.zeros(2), torch.arange(2), torch.tensor(True), torch.tensor(0))
    assert batch.mean(torch.tensor([3.0, 4.0])) == 0


@pytest.mark.parametrize(("n", "size"), [(10, 4), (4, 4), (1, 256), (9, 2)])
def test_evaluation_reads_each_row_once_in_order(n: int, size: int) -> None:
    data = some(n)
    plan = evaluation_plan(data, size)
    assert plan.index[plan.weight == 1].tolist() == data.index.tolist()
    assert plan.weight.sum() == n
    assert plan.index.shape[1] == min(size, n)
    assert set(plan.index.flatten().tolist()) == set(data.index.tolist())
    assert plan.draws == Draws(None, None, None)


def test_a_batch_holds_the_rows_of_its_step() -> None:
    data = some(10)
    plan = training_plan(data, 4, 2, Transform(), seeded())
    batch = batch_at(data, plan, 2, Transform())
    assert torch.equal(batch.x[:, 0], plan.index[2].float())
    assert torch.equal(batch.y, plan.index[2] % 4)
    assert batch.weight.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert not batch.is_last_epoch
    assert batch_at(data, plan, 3, Transform()).is_last_epoch


@pytest.mark.parametrize("mode", ["constant", "reflect"])
def test_crops_equal_those_of_numpy(mode: str) -> None:
    x, pad = images(), 3
    transform = Transform(pad=pad, pad_mode=mode)  # type: ignore[arg-type]
    offset = torch.tensor([[0, 0], [6, 6], [3, 3], [0, 5], [2, 1], [6, 0]])
    found = transform.vary(x, Draws(offset, None, None))
    for image, (row, column), crop in zip(x.numpy(), offset.tolist(), found.numpy(), strict=True):
        padded = np.pad(image, ((0, 0), (pad, pad), (pad, pad)), mode=mode)
        assert np.array_equal(crop, padded[:, row : row + 5, column : column + 7])
    assert torch.equal(found[2], x[2])  # the middle window is the image itself


def test_flips_mirror_left_to_right() -> None:
    x = images(2)
    found = Transform(flip=True).vary(x, Draws(None, torch.tensor([True, False]), None))
    assert np.array_equal(found[0].numpy(), x[0].numpy()[:, :, ::-1])
    assert torch.equal(found[1], x[1])


@pytest.mark.parametrize("quarters", [-1, 0, 1, 2])
def test_positive_quarter_turns_are_counterclockwise_as_those_of_rot90(quarters: int) -> None:
    x = images(2, 6, 6)
    found = Transform(rotation=1).vary(x, Draws(None, None, torch.full((2,), quarters * torch.pi / 2)))
    torch.testing.assert_close(found, torch.rot90(x, quarters, (2, 3)), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("height", "width"), [(6, 12), (12, 6)])
def test_turning_does_not_stretch_an_image_that_is_not_square(height: int, width: int) -> None:
    x, side = images(1, height, width), min(height, width)
    middle = (..., slice((height - side) // 2, (height + side) // 2), slice((width - side) // 2, (width + side) // 2))
    expected = torch.zeros_like(x)  # the ends turn out of sight, and what comes in is black
    expected[middle] = torch.rot90(x[middle], 1, (2, 3))
    found = Transform(rotation=1).vary(x, Draws(None, None, torch.tensor([torch.pi / 2])))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_each_image_is_turned_by_its_own_angle() -> None:
    x = images(2, 6, 6)
    found = Transform(rotation=1).vary(x, Draws(None, None, torch.tensor([0.0, torch.pi])))
    torch.testing.assert_close(found, torch.stack([x[0], torch.rot90(x[1], 2, (1, 2))]), atol=1e-5, rtol=0)


def test_bytes_are_scaled_and_normalised_per_channel() -> None:
    x = torch.tensor([0, 255, 51], dtype=torch.uint8).view(1, 3, 1, 1)
    transform = Transform(mean=(0.5, 0.5, 0.1), std=(0.5, 0.25, 0.2))
    torch.testing.assert_close(transform.clean(x).flatten(), torch.tensor([-1.0, 2.0, 0.5]))


@pytest.mark.parametrize("device", ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def test_bytes_may_be_moved_first_and_looked_up_then(device: str) -> None:
    """To the last bit, as on a GPU."""
    draws = torch.Generator().manual_seed(0)
    transform = Transform(mean=(0.48, 0.46, 0.41), std=(0.25, 0.24, 0.26), pad=2, flip=True)
    x = torch.randint(0, 256, (6, 3, 8, 9), dtype=torch.uint8, generator=draws)
    x[0, :, 0, 0] = torch.tensor([0, 127, 255])
    drawn = transform.draw(draws, 1, 6).at(0)
    expected = transform.normalise(transform.vary(transform.scale(x), drawn))
    there = Draws(*(None if d is None else d.to(device) for d in (drawn.offset, drawn.flip, drawn.angle)))
    assert torch.equal(transform.looked_up(transform.vary(x.to(device), there)).cpu(), expected)
    assert torch.equal(transform.varied(x.to(device), there).cpu(), expected)


def test_floats_are_taken_as_they_are() -> None:
    x = torch.tensor([[300.0, -2.0]])
    assert torch.equal(Transform().clean(x), x)


def test_what_is_padded_in_is_black_before_it_is_normalised() -> None:
    x = torch.full((1, 1, 2, 2), 255, dtype=torch.uint8)
    transform = Transform(mean=(0.5,), std=(0.5,), pad=2)
    draws = Draws(torch.zeros(1, 1, 2, dtype=torch.int64), None, None)
    plan = evaluation_plan(Data.of(x, torch.zeros(1, dtype=torch.int64)))
    batch = batch_at(Data.of(x, torch.zeros(1)), replace(plan, draws=draws), 0, transform)
    assert batch.x.unique().tolist() == [-1.0]
