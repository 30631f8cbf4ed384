"""``syn_rendered``: coloured digits drawn from fonts, similar to SYN, for users who do not have SYN.

SYN is the set of synthetic numbers of Y. Ganin and V. Lempitsky, "Unsupervised Domain Adaptation by Backpropagation",
ICML 2015: one to three digits in Windows fonts, with varied position, orientation, blur, and colours of background and
stroke, chosen by hand to resemble SVHN. The images here are our own. They follow that description with the fonts that
ship with matplotlib (DejaVu, Computer Modern and STIX, all free). Results on them are not results on SYN. As in SYN,
training and test images use the same fonts; all other draws differ.

After the random draws, only operations follow whose result IEEE 754 fixes exactly (no sine, logarithm or matrix
product). So all machines with the same versions of NumPy, SciPy, Pillow and matplotlib draw the same bytes.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from protofed.datasets.examples import Dataset, Examples, Split
from protofed.datasets.formats import resized
from protofed.seeds import derive_seed

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Integers = NDArray[np.int64]
Part = Literal["train", "test"]

SIDE = 32
CLASSES = 10
COUNTS: dict[Part, int] = {"train": 25_000, "test": 9_000}
SEED = 2306
CHUNK = 500
"""Number of images drawn together. Each chunk has its own seed, so it does not depend on the number of chunks."""

FONTS = (
    *("DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSans-Oblique.ttf", "DejaVuSans-BoldOblique.ttf"),
    *("DejaVuSansMono.ttf", "DejaVuSansMono-Bold.ttf", "DejaVuSansMono-Oblique.ttf", "DejaVuSansMono-BoldOblique.ttf"),
    *("DejaVuSerif.ttf", "DejaVuSerif-Bold.ttf", "DejaVuSerif-Italic.ttf", "DejaVuSerif-BoldItalic.ttf"),
    *("STIXGeneral.ttf", "STIXGeneralBol.ttf", "STIXGeneralItalic.ttf", "STIXGeneralBolIta.ttf"),
    *("cmr10.ttf", "cmb10.ttf", "cmti10.ttf", "cmss10.ttf", "cmtt10.ttf"),
)
CELL = 96
"""Side of the square that holds a glyph."""
GLYPH_HEIGHT = 48
"""Height of the digit zero in that square."""
OVERSAMPLING = 2
"""Glyphs are drawn larger by this factor and then reduced, so that distances to their edges are accurate."""


def draw(part: Part, number: int) -> Examples:
    """The first `number` images of a part, and their digits."""
    x = np.empty((number, 3, SIDE, SIDE), np.uint8)
    y = np.empty(number, np.int64)
    for start in range(0, number, CHUNK):
        piece = slice(start, min(start + CHUNK, number))
        images, digits = _chunk(derive_seed(SEED, part, start // CHUNK))
        x[piece], y[piece] = images[: piece.stop - start], digits[: piece.stop - start]
    return Examples(x, y)


def _read(root: Path, pixels: int) -> Mapping[str, Split]:
    parts = {part: draw(part, number) for part, number in COUNTS.items()}
    train, test = (Examples(resized(parts[part].x, pixels), parts[part].y) for part in ("train", "test"))
    return {DATASET.name: Split(train, test)}


DATASET = Dataset(
    name="syn_rendered",
    classes=tuple("0123456789"),
    pixels=SIDE,
    counts={"syn_rendered": (COUNTS["train"], COUNTS["test"])},
    obtain="nothing to obtain: protofed draws these images with the fonts of matplotlib",
    read=_read,
)


def _chunk(seed: int) -> tuple[Bytes, Integers]:
    rng = np.random.Generator(np.random.PCG64(seed))
    # Every ten images are a permutation of the digits, so the classes of any prefix are balanced to within one image.
    digits = rng.permuted(np.tile(np.arange(CLASSES), (CHUNK // CLASSES, 1)), axis=1).reshape(-1)
    depth = _text(digits, rng)
    scene = _painted(_ground(rng), depth, rng)
    out_of_focus = _blurred(scene, _between(rng, 0, 0.6, 1, 1, 1) ** 2)
    grain = rng.random(scene.shape, np.float32) + rng.random(scene.shape, np.float32) - 1
    noisy = out_of_focus + grain * _between(rng, 0, 0.4, 1, 1, 1) ** 2
    return np.rint(np.clip(noisy, 0, 1) * 255).astype(np.uint8), digits


def _between(rng: np.random.Generator, low: float, high: float, *shape: int) -> Floats:
    """Uniform draws of the given shape for each image of a chunk."""
    # In Generator.uniform, the compiler may fuse product and sum, which rounds once instead of twice.
    values: Floats = rng.random((CHUNK, *shape), np.float32) * (high - low) + low
    return values


def _turned(rng: np.random.Generator, steepest: float) -> tuple[Floats, Floats, Floats, Floats]:
    """For each image, the cosine and sine of an angle, and pixel coordinates relative to a centre near the middle."""
    tangent = _between(rng, -steepest, steepest, 1, 1)  # of half the angle
    cos, sin = (1 - tangent**2) / (1 + tangent**2), 2 * tangent / (1 + tangent**2)
    along = np.arange(SIDE, dtype=np.float32) - (SIDE - 1) / 2
    columns = along - _between(rng, -2.5, 2.5, 1, 1)
    rows = along[:, None] - _between(rng, -2.5, 2.5, 1, 1)
    return cos, sin, columns, rows


def _text(digits: Integers, rng: np.random.Generator) -> Floats:
    """Signed depth of each pixel inside the ink of one to three digits. The labelled digit is in the middle."""
    glyphs, half_widths = _glyphs()
    font = rng.integers(len(FONTS), size=CHUNK)
    scale = _between(rng, 15 / GLYPH_HEIGHT, 27 / GLYPH_HEIGHT, 1, 1)
    cos, sin, columns, rows = _turned(rng, 0.22)
    across, down = cos * columns + sin * rows, cos * rows - sin * columns
    across /= scale * _between(rng, 0.75, 1.15, 1, 1)
    down /= scale
    across += _between(rng, -0.3, 0.3, 1, 1) * down
    depth = _sampled(glyphs[font, digits], across, down)
    length = rng.integers(1, 4, size=CHUNK)
    place = rng.integers(0, length)
    for side, is_there in ((-1, place > 0), (1, place < length - 1)):
        other = rng.integers(CLASSES, size=CHUNK)
        step = (half_widths[font, digits] + half_widths[font, other])[:, None, None] + _between(rng, 3, 12, 1, 1)
        neighbour = _sampled(glyphs[font, other], across - side * step, down)
        depth = np.where(is_there[:, None, None], np.maximum(depth, neighbour), depth)
    return depth * scale


def _sampled(fields: Floats, across: Floats, down: Floats) -> Floats:
    """Bilinear interpolation of each field (N, CELL, CELL) at points relative to its middle."""
    highest = CELL - 1.01  # interpolation needs one more row below and one more column to the right
    x, y = (np.clip(points + (CELL - 1) / 2, 0, highest) for points in np.broadcast_arrays(across, down))
    column, row = x.astype(np.int64), y.astype(np.int64)
    right, below = x - column.astype(np.float32), y - row.astype(np.float32)
    corner = (np.arange(len(fields))[:, None, None] * CELL + row) * CELL + column
    flat = fields.reshape(-1)
    upper = flat[corner] * (1 - right) + flat[corner + 1] * right
    lower = flat[corner + CELL] * (1 - right) + flat[corner + CELL + 1] * right
    values: Floats = upper * (1 - below) + lower * below
    return values


@functools.cache
def _glyphs() -> tuple[Floats, Floats]:
    """Signed depth inside each font's digits, (F, 10, CELL, CELL), and half their widths, (F, 10)."""
    import matplotlib  # a slow import that only drawing needs

    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    depths = np.empty((len(FONTS), CLASSES, CELL, CELL), np.float32)
    half_widths = np.empty((len(FONTS), CLASSES), np.float32)
    for k, file in enumerate(FONTS):
        # The basic layout engine is always available; the default depends on how Pillow was built.
        trial = ImageFont.truetype(str(folder / file), 100, layout_engine=ImageFont.Layout.BASIC)
        _, top, _, bottom = trial.getbbox("0")
        font = trial.font_variant(size=round(100 * OVERSAMPLING * GLYPH_HEIGHT / (bottom - top)))
        for digit in range(CLASSES):
            depths[k, digit], half_widths[k, digit] = _glyph(font, str(digit))
    return depths, half_widths


def _glyph(font: ImageFont.FreeTypeFont, digit: str) -> tuple[Floats, float]:
    """Signed depth inside a digit that is centred in its cell, and half its width."""
    import scipy  # many who import this module read other datasets

    side = OVERSAMPLING * CELL
    _, top, _, bottom = font.getbbox("0")
    canvas = Image.new("L", (side, side))
    ImageDraw.Draw(canvas).text((side // 4, round((side - top - bottom) / 2)), digit, font=font, fill=255)
    ink = np.asarray(canvas) >= 128
    # Pillow's bounding box includes the space around a digit, so measure the ink itself.
    columns = np.flatnonzero(ink.any(axis=0))
    ink = np.roll(ink, (side - 1 - columns[0] - columns[-1]) // 2, axis=1)
    depth = scipy.ndimage.distance_transform_edt(ink) - scipy.ndimage.distance_transform_edt(~ink)
    reduced = depth[OVERSAMPLING // 2 :: OVERSAMPLING, OVERSAMPLING // 2 :: OVERSAMPLING] / OVERSAMPLING
    return reduced.astype(np.float32), len(columns) / (2 * OVERSAMPLING)


def _ground(rng: np.random.Generator) -> Floats:
    """Backgrounds: plain, with a gradient, of two colours with an edge between, or stained."""
    first = _colours(rng)
    second = first + _between(rng, -0.4, 0.4, 3, 1, 1)
    cos, sin, columns, rows = _turned(rng, 1.0)
    kind = _between(rng, 0, 1, 1, 1)
    steepness = np.select([kind < 0.45, kind < 0.8], [np.float32(0), np.float32(1 / SIDE)], np.float32(1))
    share = np.clip(0.5 + steepness * (cos * columns + sin * rows), 0, 1)[:, None]
    strength = np.maximum(_between(rng, -0.4, 0.25, 1, 1, 1), 0)
    stains = (_between(rng, -1, 1, 3, 8, 8) * strength).repeat(4, axis=2).repeat(4, axis=3)
    wall = first + share * (second - first)
    stained: Floats = np.clip(wall + _blurred(stains, _between(rng, 0.05, 0.33, 1, 1, 1)), 0, 1)
    return stained


def _painted(ground: Floats, depth: Floats, rng: np.random.Generator) -> Floats:
    """The digits on their background. A third of them have a rim of another colour."""
    # Some fonts have hairlines at this size, so strokes are more often widened than narrowed.
    depth = (depth + _between(rng, -0.1, 0.7, 1, 1))[:, None]
    ink = _unlike(ground[:, :, SIDE // 2, SIDE // 2, None, None], rng)
    rim = _unlike(ink, rng)
    rim_width = np.maximum(_between(rng, -3, 1.5, 1, 1, 1), 0)
    with_rim = ground + np.clip(depth + rim_width + 0.5, 0, 1) * (rim_width > 0) * (rim - ground)
    full = with_rim + np.clip(depth + 0.5, 0, 1) * (ink - with_rim)
    faintness = _between(rng, -0.6, 0.45, 1, 1, 1)
    faded: Floats = full + np.maximum(faintness, 0) * (ground - full)
    return faded


def _colours(rng: np.random.Generator) -> Floats:
    colours: Floats = np.clip(_between(rng, 0, 1, 1, 1, 1) + _between(rng, -0.4, 0.4, 3, 1, 1), 0, 1)
    return colours


def _unlike(colours: Floats, rng: np.random.Generator) -> Floats:
    """Random colours that differ from the given ones by at least 0.35 in some channel."""
    drawn, distance = _colours(rng), _between(rng, 0.35, 0.5, 1, 1, 1)
    is_near = (np.abs(drawn - colours) < 0.35).all(axis=1, keepdims=True)
    away: Floats = np.where(colours < 0.5, colours + distance, colours - distance)
    return np.where(is_near, away, drawn)


def _blurred(scene: Floats, spread: Floats) -> Floats:
    """Blurs three times in each direction: every pixel gives the share `spread` to each of its two neighbours."""
    for _ in range(6):
        padded = np.pad(scene, ((0, 0), (0, 0), (1, 1), (0, 0)), mode="edge")
        scene = (scene + spread * (padded[:, :, :-2] + padded[:, :, 2:] - 2 * scene)).swapaxes(2, 3)
    return scene
