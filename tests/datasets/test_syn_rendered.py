"""The rendered digits: the same bytes at every call, balanced, legible, and drawn as the arithmetic says."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from protofed.datasets import syn_rendered
from protofed.datasets.examples import Examples
from protofed.datasets.formats import resized
from protofed.datasets.syn_rendered import CELL, CHUNK, COUNTS, DATASET, FONTS, GLYPH_HEIGHT, SIDE, draw

NOWHERE = Path("there is no such folder")


@pytest.fixture(scope="module")
def train() -> Examples:
    return draw("train", 2 * CHUNK)


@pytest.fixture(scope="module")
def test() -> Examples:
    return draw("test", CHUNK)


def generator() -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(7))


def test_the_dataset_says_what_it_is() -> None:
    assert DATASET.name == "syn_rendered"
    assert DATASET.classes == ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9")
    assert DATASET.pixels == 32
    assert DATASET.counts == {"syn_rendered": (25_000, 9_000)}
    assert "nothing to obtain" in DATASET.obtain


def test_images_are_bytes_in_three_channels_and_labels_are_digits(train: Examples) -> None:
    assert train.x.dtype == np.uint8
    assert train.x.shape == (2 * CHUNK, 3, 32, 32)
    assert train.y.dtype == np.int64
    assert len(train) == 2 * CHUNK


def test_a_second_drawing_is_equal_and_leaves_the_global_generator_alone(train: Examples) -> None:
    np.random.seed(1)
    syn_rendered._glyphs.cache_clear()
    again = draw("train", 40)
    assert np.random.random() == np.random.RandomState(1).random()
    assert again.x.tobytes() == train.x[:40].tobytes()


@pytest.mark.parametrize("number", [1, CHUNK, CHUNK + 3])
def test_an_image_does_not_depend_on_how_many_are_drawn(train: Examples, number: int) -> None:
    few = draw("train", number)
    assert few.x.shape == (number, 3, 32, 32)
    assert few.x.tobytes() == train.x[:number].tobytes()
    assert few.y.tolist() == train.y[:number].tolist()


@pytest.mark.parametrize("number", [7, 10, 25, CHUNK, CHUNK + 13, 2 * CHUNK])
def test_the_classes_of_any_beginning_are_balanced_to_one_image(train: Examples, number: int) -> None:
    counts = np.bincount(train.y[:number], minlength=10)
    assert counts.max() - counts.min() <= 1


def test_no_image_occurs_twice_neither_between_chunks_nor_between_training_and_test(
    train: Examples, test: Examples
) -> None:
    images = [image.tobytes() for image in (*train.x, *test.x)]
    assert len(set(images)) == len(images)
    assert train.y[:CHUNK].tolist() != train.y[CHUNK:].tolist()
    assert test.y.tolist() != train.y[: len(test)].tolist()


def test_the_reader_draws_all_images_and_opens_no_folder(monkeypatch: pytest.MonkeyPatch, train: Examples) -> None:
    monkeypatch.setitem(COUNTS, "train", 30)
    monkeypatch.setitem(COUNTS, "test", 20)
    domains = DATASET.read(NOWHERE, 32)
    assert list(domains) == ["syn_rendered"]
    split = domains["syn_rendered"]
    assert split.train.x.tobytes() == train.x[:30].tobytes()
    assert split.train.y.tolist() == train.y[:30].tolist()
    assert len(split.test) == 20
    assert split.test.x.tobytes() == draw("test", 20).x.tobytes()


def test_other_sizes_are_what_pillow_makes_of_the_images(monkeypatch: pytest.MonkeyPatch, train: Examples) -> None:
    monkeypatch.setitem(COUNTS, "train", 10)
    monkeypatch.setitem(COUNTS, "test", 10)
    split = DATASET.read(NOWHERE, 28)["syn_rendered"]
    assert split.train.x.shape == split.test.x.shape == (10, 3, 28, 28)
    for channel in range(3):
        expected = Image.fromarray(train.x[3, channel]).resize((28, 28), Image.Resampling.BILINEAR)
        assert split.train.x[3, channel].tolist() == np.asarray(expected).tolist()


def test_images_that_have_the_size_already_are_left_alone(train: Examples) -> None:
    assert resized(train.x, 32) is train.x


def outline(images: NDArray[np.uint8]) -> NDArray[np.float64]:
    """How far the colour of each pixel near the middle is from the commonest one: the shape whatever the colours."""
    inner = images[:, :, 3:-3, 7:-7].astype(float).reshape(len(images), 3, -1)
    distance = np.abs(inner - np.median(inner, axis=2, keepdims=True)).sum(1)
    normed: NDArray[np.float64] = distance / (np.linalg.norm(distance, axis=1, keepdims=True) + 1)
    return normed


def test_the_label_is_the_digit_in_the_middle(train: Examples, test: Examples) -> None:
    nearest = (outline(test.x) @ outline(train.x).T).argmax(1)
    # The wrong labels, or those of a neighbour, would give about 0.1.
    assert np.mean(train.y[nearest] == test.y) > 0.3


def test_colours_vary_in_hue_and_brightness(train: Examples) -> None:
    means = train.x.mean((2, 3))
    assert (means.std(0) > 40).all()
    assert np.mean(np.ptp(means, axis=1) > 50) > 0.4


def test_every_font_has_ten_digits_of_its_own_of_one_height_in_the_middle_of_their_cells() -> None:
    depths, half_widths = syn_rendered._glyphs()
    assert depths.shape == (len(FONTS), 10, CELL, CELL)
    assert len({depth.tobytes() for depth in depths.reshape(-1, CELL, CELL)}) == 10 * len(FONTS)
    inked = depths > 0
    # Strokes are widened by up to 0.7, rims by 1.5 and both softened by 0.5, at most 48 / 15 times as much here: 8.64.
    assert depths[:, :, [0, -1]].max() < -9
    assert depths[:, :, :, [0, -1]].max() < -9
    for font in range(len(FONTS)):
        for digit in range(10):
            rows, columns = inked[font, digit].any(1).nonzero()[0], inked[font, digit].any(0).nonzero()[0]
            assert abs(columns[0] + columns[-1] - (CELL - 1)) <= 2, FONTS[font]
            assert columns[-1] - columns[0] + 1 == pytest.approx(2 * half_widths[font, digit], abs=2)
            if digit == 0:
                assert rows[-1] - rows[0] + 1 == pytest.approx(GLYPH_HEIGHT, abs=2)
                assert abs(rows[0] + rows[-1] - (CELL - 1)) <= 2


def test_depth_is_the_distance_to_the_edge_of_the_ink() -> None:
    depths, _ = syn_rendered._glyphs()
    zero = depths[FONTS.index("DejaVuSans-Bold.ttf"), 0]
    # Along the middle row, outside the zero, every step to the left is a step further from its bulge.
    outside = zero[CELL // 2, :20]
    assert np.diff(outside).tolist() == pytest.approx([1.0] * 19, abs=0.05)
    # Where the ink is widest, it is as deep as half the width of the stroke.
    row = zero[CELL // 2, : CELL // 2]
    assert row.max() == pytest.approx(np.sum(row > 0) / 2, abs=0.6)


def test_values_between_pixels_are_linear_and_points_outside_take_the_border() -> None:
    field = (2 * np.arange(CELL)[:, None] + np.arange(CELL)).astype(np.float32)[None].repeat(2, 0)
    field[1] += 1000
    across = np.array([0.25, -1e4], np.float32)[None, None].repeat(2, 0)
    down = np.array([-0.5, 0.0], np.float32)[None, None].repeat(2, 0)
    found = syn_rendered._sampled(field, across, down)
    # The middle is 47.5: row 47.0 and column 47.75 give 2 · 47 + 47.75; row 47.5 and column 0 give 95.
    assert found.tolist() == [[[141.75, 95.0]], [[1141.75, 1095.0]]]


def test_about_as_many_numbers_go_on_at_either_side_as_have_digits_there() -> None:
    depth = syn_rendered._text(np.ones(CHUNK, np.int64), generator())
    left, right = ((depth[:, 8:-8, edge] > 0).any((1, 2)).mean() for edge in (slice(0, 3), slice(-3, None)))
    # 1/2 of the numbers of two digits and 2/3 of those of three go on at a side: 1/6 + 2/9 = 0.39, if all are in view.
    assert 0.2 < left < 0.45
    assert 0.2 < right < 0.45


def test_the_digit_in_the_middle_is_always_in_view() -> None:
    depth = syn_rendered._text(np.full(CHUNK, 8), generator())
    assert (depth[:, 5:-5, 5:-5] > 0).mean((1, 2)).min() > 0.05


def test_blur_gives_each_neighbour_its_share_three_times_in_both_directions() -> None:
    scene = np.zeros((1, 1, SIDE, SIDE), np.float32)
    scene[0, 0, 16, 16] = 1
    spread = np.full((1, 1, 1, 1), 0.25, np.float32)
    # (1/4, 1/2, 1/4) three times is (1, 6, 15, 20, 15, 6, 1) / 64.
    row = np.zeros(SIDE)
    row[13:20] = np.array([1, 6, 15, 20, 15, 6, 1]) / 64
    assert syn_rendered._blurred(scene, spread)[0, 0] == pytest.approx(np.outer(row, row), abs=1e-6)


def test_blur_keeps_rows_and_columns_apart_and_plain_grounds_plain() -> None:
    columns = np.arange(SIDE, dtype=np.float32).repeat(SIDE).reshape(1, 1, SIDE, SIDE)
    none, some = (np.full((1, 1, 1, 1), share, np.float32) for share in (0, 0.2))
    assert syn_rendered._blurred(columns, none).tolist() == columns.tolist()
    assert (syn_rendered._blurred(np.ones_like(columns), some) == 1).all()


def test_ink_is_unlike_its_ground_and_a_colour() -> None:
    rng = generator()
    ground = syn_rendered._colours(rng)
    ink = syn_rendered._unlike(ground, rng)
    assert np.abs(ink - ground).max(1).min() > 0.349
    assert ink.min() >= 0
    assert ink.max() <= 1


@pytest.mark.parametrize("step", [syn_rendered._ground, lambda rng: syn_rendered._text(np.zeros(CHUNK, int), rng)])
def test_arithmetic_stays_in_single_precision(step: Callable[[np.random.Generator], NDArray[np.float32]]) -> None:
    assert step(generator()).dtype == np.float32


def test_grounds_are_plain_shaded_divided_and_stained() -> None:
    ground = syn_rendered._ground(generator())
    steps = np.abs(np.diff(ground, axis=3)).max((1, 2, 3))
    assert 0.2 < np.mean(steps == 0) < 0.4  # 0.45 plain · 0.62 without stains = 0.28
    assert np.mean((steps > 0) & (steps < 0.03)) > 0.1
    assert np.mean(steps > 0.1) > 0.1
