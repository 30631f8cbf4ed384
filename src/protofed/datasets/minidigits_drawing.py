"""Drawing the images of ``minidigits``: strokes and glyphs are warped, coloured and blended with a background.

The order of the random draws fixes the bytes of the images. Do not reorder calls of the generator.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
import scipy  # loads its submodules on first use
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

SIDE = 28
OVERSAMPLING = 2
"""Glyphs are drawn larger by this factor and averaged down, which antialiases their warped edges."""
GLYPH_POINTS = 52
CLUTTER = "0123456789ABEHKMNRSWXZ&%#"


def paint_pen(strokes: Floats, rng: np.random.Generator) -> Bytes:
    """A light, clean stroke on a nearly black background."""
    n = len(strokes)
    maps = _linear_maps(rng.uniform(2.6, 2.85, n), rng.uniform(-0.06, 0.06, n), rng.uniform(-0.05, 0.1, n))
    mask = _ramp(_warp(strokes, maps, rng.uniform(-0.7, 0.7, (n, 2)), SIDE, order=3), 0.3, 0.6)
    ground = np.array([0.05, 0.06, 0.09]) + rng.uniform(0, 0.03, (n, 1))
    light = np.array([0.93, 0.95, 0.96]) + rng.uniform(-0.05, 0.03, (n, 3))
    return _to_bytes(_blend(_flat(ground), _flat(light), mask))


def paint_ink(strokes: Floats, rng: np.random.Generator) -> Bytes:
    """A thin, slanted stroke of coloured ink on ruled paper."""
    n = len(strokes)
    maps = _linear_maps(rng.uniform(2.3, 2.7, n), rng.uniform(-0.08, 0.08, n), rng.uniform(0.25, 0.5, n))
    level = rng.uniform(0.36, 0.48, (n, 1, 1))
    mask = _ramp(_warp(strokes, maps, rng.uniform(-1, 1, (n, 2)), SIDE, order=3), level, level + 0.25)
    inks = np.array([[0.07, 0.1, 0.42], [0.12, 0.1, 0.1], [0.05, 0.27, 0.25], [0.42, 0.08, 0.16]])
    ink = inks[rng.integers(len(inks), size=n)] + rng.uniform(-0.04, 0.08, (n, 3))
    return _to_bytes(_blend(_paper(n, rng), _flat(ink), mask * rng.uniform(0.75, 1.0, (n, 1, 1))))


def _paper(n: int, rng: np.random.Generator) -> Floats:
    """Cream paper with a fine grain and faint blue rules."""
    cream = _flat(np.array([0.96, 0.92, 0.8]) + rng.uniform(-0.05, 0.03, (n, 3)))
    grain = rng.normal(0, 0.018, (n, 1, SIDE, SIDE))
    rows = np.arange(SIDE)
    phase = rng.integers(9, size=(n, 1))
    rules = 0.35 * ((rows + phase) % 9 == 0)[:, :, None] * np.ones(SIDE)
    return _blend(cream + grain, _flat(np.array([[0.55, 0.68, 0.85]])), rules)


def paint_street(strokes: Floats, rng: np.random.Generator) -> Bytes:
    """A blurred stroke of any colour, lighter or darker than its textured background."""
    n = len(strokes)
    maps = _linear_maps(rng.uniform(2.4, 2.8, n), rng.uniform(-0.1, 0.1, n), rng.uniform(-0.1, 0.15, n))
    mask = _ramp(_warp(strokes, maps, rng.uniform(-1, 1, (n, 2)), SIDE, order=3), 0.2, 0.5)
    darker = rng.random(n) < 0.5
    low, gap = rng.uniform(0.12, 0.28, n), rng.uniform(0.42, 0.6, n)
    wall = _coloured(np.where(darker, low + gap, low), rng)
    paint = _coloured(np.where(darker, low, low + gap), rng)
    scene = _blend(_flat(wall) + _texture(n, rng), _flat(paint), mask)
    blurred = scipy.ndimage.gaussian_filter(scene, (0, 0, 1.0, 1.0))
    focus = rng.uniform(0.0, 0.6, (n, 1, 1, 1))
    return _to_bytes(focus * scene + (1 - focus) * blurred + rng.normal(0, 0.02, scene.shape))


def _texture(n: int, rng: np.random.Generator) -> Floats:
    """Coloured stains, planks at a random angle, and speckle, with mean zero."""
    stains = scipy.ndimage.zoom(rng.uniform(-0.15, 0.15, (n, 3, 4, 4)), (1, 1, SIDE / 4, SIDE / 4), order=1)
    speckle = scipy.ndimage.zoom(rng.uniform(-0.12, 0.12, (n, 1, 14, 14)), (1, 1, 2, 2), order=1)
    row, column = np.mgrid[:SIDE, :SIDE]
    angle, wave, phase = (rng.uniform(0, top, (n, 1, 1)) for top in (np.pi, 0.7, 2 * np.pi))
    planks = 0.08 * np.sin((0.5 + wave) * (np.cos(angle) * row + np.sin(angle) * column) + phase)
    texture: Floats = stains + speckle + planks[:, None]
    return texture


def draw_glyphs(digits: Integers, files: Sequence[str], fonts: Integers, rng: np.random.Generator) -> Floats:
    """One centred digit per image, and fragments of two other glyphs at the border. `fonts` are indices of `files`."""
    from PIL import Image, ImageDraw, ImageFont

    folder = _font_folder()
    # The basic layout engine is always available; the default depends on how Pillow was built.
    layout = ImageFont.Layout.BASIC
    loaded = [ImageFont.truetype(str(folder / file), GLYPH_POINTS, layout_engine=layout) for file in files]
    side = 2 * OVERSAMPLING * SIDE
    masks = np.zeros((len(digits), side, side))
    for k, (digit, font) in enumerate(zip(digits, fonts, strict=True)):
        canvas = Image.new("L", (side, side))
        brush = ImageDraw.Draw(canvas)
        turn = rng.uniform(0, 2 * np.pi)
        for text, reach in ((str(digit), 0.0), *_fragments(rng)):
            left, top, right, bottom = loaded[font].getbbox(text)
            x = side / 2 + reach * np.cos(turn) - (left + right) / 2
            y = side / 2 + reach * np.sin(turn) - (top + bottom) / 2
            brush.text((round(x), round(y)), text, font=loaded[font], fill=255)
        masks[k] = np.asarray(canvas) / 255.0
    return masks


def _font_folder() -> Path:
    """The fonts of matplotlib, which is imported only if they are not where they always were."""
    folder = package_folder("matplotlib") / "mpl-data" / "fonts" / "ttf"
    if not folder.is_dir():
        import matplotlib

        folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    return folder


def package_folder(name: str) -> Path:
    """The folder of an installed package, which is not imported."""
    spec = find_spec(name)
    assert spec, f"{name} is not installed"
    return Path(spec.origin or "").parent


def _fragments(rng: np.random.Generator) -> list[tuple[str, float]]:
    return [(str(rng.choice(list(CLUTTER))), side * rng.uniform(42, 50)) for side in (-1, 1)]


def paint_print(glyphs: Floats, rng: np.random.Generator) -> Bytes:
    """Flat, saturated colours; the digit is lighter or darker than its background."""
    n = len(glyphs)
    maps = _linear_maps(rng.uniform(0.85, 1.1, n), rng.uniform(-0.3, 0.3, n), rng.uniform(-0.25, 0.25, n))
    large = _warp(glyphs, maps, rng.uniform(-3, 3, (n, 2)), OVERSAMPLING * SIDE, order=1)
    mask = large.reshape(n, SIDE, OVERSAMPLING, SIDE, OVERSAMPLING).mean((2, 4))
    darker = rng.random(n) < 0.5
    low, high = rng.uniform(0.05, 0.25, n), rng.uniform(0.7, 0.95, n)
    sheet = _coloured(np.where(darker, high, low), rng)
    letter = _coloured(np.where(darker, low, high), rng)
    return _to_bytes(_blend(_flat(sheet), _flat(letter), mask))


def _linear_maps(scale: Floats, angle: Floats, slant: Floats) -> Floats:
    """(N, 2, 2) maps of (row, column): slant to the right, then rotate, then scale."""
    cos, sin = np.cos(angle), np.sin(angle)
    turn = np.array([[cos, -sin], [sin, cos]])
    lean = np.array([[np.ones_like(slant), np.zeros_like(slant)], [-slant, np.ones_like(slant)]])
    maps: Floats = scale[:, None, None] * np.einsum("ijn,jkn->nik", turn, lean)
    return maps


def _warp(images: Floats, maps: Floats, shifts: Floats, side: int, order: Literal[1, 3]) -> Floats:
    """Applies to each image its own map about the centre and its own shift, on a canvas of the given side."""
    inverses = np.linalg.inv(maps)
    middle_in, middle_out = (images.shape[1] - 1) / 2, (side - 1) / 2
    offsets = middle_in - np.einsum("nij,nj->ni", inverses, middle_out + shifts)
    warped = np.empty((len(images), side, side))
    for k, image in enumerate(images):
        warped[k] = scipy.ndimage.affine_transform(
            image, inverses[k], offsets[k], (side, side), order=order, mode="grid-constant"
        )
    return warped


def _ramp(values: Floats, low: Floats | float, high: Floats | float) -> Floats:
    """0 below `low`, 1 above `high`, smooth between. Lower limits make wider strokes."""
    t = np.clip((values - low) / (high - low), 0, 1)
    ramp: Floats = t * t * (3 - 2 * t)
    return ramp


def _coloured(luminance: Floats, rng: np.random.Generator) -> Floats:
    """Random colours of about the given luminance."""
    chroma = rng.uniform(-0.4, 0.4, (len(luminance), 3))
    chroma -= (chroma @ np.array([0.299, 0.587, 0.114]))[:, None]
    return np.clip(luminance[:, None] + chroma, 0, 1)


def _flat(colours: Floats) -> Floats:
    return colours[:, :, None, None]


def _blend(ground: Floats, paint: Floats, mask: Floats) -> Floats:
    blended: Floats = ground + mask[:, None] * (paint - ground)
    return blended


def _to_bytes(scene: Floats) -> Bytes:
    return np.rint(np.clip(scene, 0, 1) * 255).astype(np.uint8)
