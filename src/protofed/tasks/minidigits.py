"""The embedded federation ``minidigits``: four domains of digits, twelve clients, nothing to download.

Three domains show real handwriting from scikit-learn's ``load_digits``; the fourth renders the fonts that
ship with matplotlib. No handwritten source image is used twice, neither across domains nor across train and
test, and the printed test set contains font families that the printed training set does not.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import scipy  # loads its modules when they are asked for
import torch
from annotated_types import Ge
from numpy.typing import NDArray

from protofed.api.method import Positive
from protofed.api.task import Task
from protofed.data.batches import Data
from protofed.data.transforms import Transform
from protofed.tasks.models import small_cnn
from protofed.tasks.partition import dirichlet

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

SIDE = 28
CLASSES = 10
TEST_PER_CLASS = 15
PRINT_TRAIN_PER_CLASS = 60
PUBLIC_PER_CLASS = 20
SEEDS = {"split": 2301, "pen": 2302, "ink": 2303, "street": 2304, "print": 2305, "public": 2306}

ALLOTMENT: dict[str, tuple[int, ...]] = {
    "pen": (200, 140, 90, 50),
    "ink": (150, 90),
    "street": (290, 200, 137),
    "print": (290, 190, 120),
}

# Printed sources are FIRST_PRINT_SOURCE * (1 + font) + draw, so that an id alone says which font it shows.
FIRST_PRINT_SOURCE = 10_000
SEEN_FAMILIES: dict[str, tuple[str, ...]] = {
    "DejaVu Sans": (
        "DejaVuSans.ttf",
        "DejaVuSans-Bold.ttf",
        "DejaVuSans-Oblique.ttf",
        "DejaVuSans-BoldOblique.ttf",
    ),
    "DejaVu Sans Mono": (
        "DejaVuSansMono.ttf",
        "DejaVuSansMono-Bold.ttf",
        "DejaVuSansMono-Oblique.ttf",
        "DejaVuSansMono-BoldOblique.ttf",
    ),
    "DejaVu Serif": (
        "DejaVuSerif.ttf",
        "DejaVuSerif-Bold.ttf",
        "DejaVuSerif-Italic.ttf",
        "DejaVuSerif-BoldItalic.ttf",
    ),
    "Computer Modern Roman": ("cmr10.ttf", "cmb10.ttf"),
    "Computer Modern Typewriter": ("cmtt10.ttf",),
}
UNSEEN_FAMILIES: dict[str, tuple[str, ...]] = {
    "STIX General": (
        "STIXGeneral.ttf",
        "STIXGeneralBol.ttf",
        "STIXGeneralItalic.ttf",
        "STIXGeneralBolIta.ttf",
    ),
    "Computer Modern Sans": ("cmss10.ttf",),
}
FONTS: tuple[tuple[str, str], ...] = tuple(
    (family, file)
    for families in (SEEN_FAMILIES, UNSEEN_FAMILIES)
    for family, files in families.items()
    for file in files
)
SEEN_FONTS = sum(len(files) for files in SEEN_FAMILIES.values())

# Glyphs are drawn at twice the final size and averaged down, which is what antialiases the warped edges.
OVERSAMPLING = 2
GLYPH_POINTS = 52
CLUTTER = "0123456789ABEHKMNRSWXZ&%#"


@dataclass(frozen=True)
class Domain:
    """One look of the ten digits: images are uint8 (N, 3, 28, 28), labels and sources int64 (N,).

    A source is an index into ``load_digits``, or for ``print`` an id that :func:`print_font` decodes.
    """

    train_x: Bytes
    train_y: Integers
    test_x: Bytes
    test_y: Integers
    train_source: Integers
    test_source: Integers


@functools.cache
def domains() -> dict[str, Domain]:
    """The four domains in the order pen, ink, street, print; the same bytes at every call."""
    return build()


def build() -> dict[str, Domain]:
    """Draw the four domains afresh."""
    from sklearn.datasets import load_digits  # a slow import that only a build needs

    images, labels = load_digits(return_X_y=True)
    strokes = images.reshape(-1, 8, 8) / 16.0
    labels = labels.astype(np.int64)
    painters = {"pen": _paint_pen, "ink": _paint_ink, "street": _paint_street}
    built = {}
    for name, (train, test) in _split_handwriting(labels).items():
        painted = painters[name](strokes[np.concatenate([train, test])], _generator(name))
        cut = len(train)
        built[name] = Domain(painted[:cut], labels[train], painted[cut:], labels[test], train, test)
    built["print"] = _print_domain()
    return built


def client_rows() -> dict[str, tuple[str, Integers]]:
    """Client id to its domain and its rows of that domain's training arrays; the rows are disjoint."""
    clients = {}
    for name, sizes in ALLOTMENT.items():
        order = _interleaved(domains()[name].train_y)
        pieces = np.split(order, np.cumsum(sizes)[:-1])
        clients.update({f"{name}-{k}": (name, np.sort(rows)) for k, rows in enumerate(pieces)})
    return clients


def print_font(source: int) -> tuple[str, str]:
    """Font family and font file behind a source id of the ``print`` domain."""
    return FONTS[source // FIRST_PRINT_SOURCE - 1]


def _generator(purpose: str) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(SEEDS[purpose]))


def _split_handwriting(labels: Integers) -> dict[str, tuple[Integers, Integers]]:
    """Train and test indices of each handwritten domain: a partition of all indices, class by class."""
    names = ("pen", "ink", "street")
    # Street takes what the class sizes leave over, so that every source image is used exactly once.
    sizes = [TEST_PER_CLASS] * 3 + [sum(ALLOTMENT[name]) // CLASSES for name in ("pen", "ink")]
    rng = _generator("split")
    parts: list[list[Integers]] = [[] for _ in range(6)]
    for digit in range(CLASSES):
        members = rng.permutation(np.flatnonzero(labels == digit))
        for part, piece in zip(parts, np.split(members, np.cumsum(sizes)), strict=True):
            part.append(piece)
    shuffled = [rng.permutation(np.concatenate(part)) for part in parts]
    return {name: (shuffled[3 + k], shuffled[k]) for k, name in enumerate(names)}


def _interleaved(labels: Integers) -> Integers:
    """Rows ordered 0, 1, ..., 9, 0, 1, ... so that every stretch of them holds every class."""
    rank = np.zeros_like(labels)
    for digit in range(CLASSES):
        rank[labels == digit] = np.arange(np.sum(labels == digit))
    return np.lexsort((labels, rank)).astype(np.int64)


def _paint_pen(strokes: Floats, rng: np.random.Generator) -> Bytes:
    """A light, clean stroke on a near-black ground."""
    n = len(strokes)
    maps = _linear_maps(rng.uniform(2.6, 2.85, n), rng.uniform(-0.06, 0.06, n), rng.uniform(-0.05, 0.1, n))
    mask = _ramp(_warp(strokes, maps, rng.uniform(-0.7, 0.7, (n, 2)), SIDE, order=3), 0.3, 0.6)
    ground = np.array([0.05, 0.06, 0.09]) + rng.uniform(0, 0.03, (n, 1))
    light = np.array([0.93, 0.95, 0.96]) + rng.uniform(-0.05, 0.03, (n, 3))
    return _to_bytes(_blend(_flat(ground), _flat(light), mask))


def _paint_ink(strokes: Floats, rng: np.random.Generator) -> Bytes:
    """A thin, slanted stroke of coloured ink on ruled, paper-coloured ground."""
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


def _paint_street(strokes: Floats, rng: np.random.Generator) -> Bytes:
    """A stroke of any colour, lighter or darker than its textured ground, out of focus."""
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
    """Coloured stains, planks at a random angle and speckle, around zero."""
    stains = scipy.ndimage.zoom(rng.uniform(-0.15, 0.15, (n, 3, 4, 4)), (1, 1, SIDE / 4, SIDE / 4), order=1)
    speckle = scipy.ndimage.zoom(rng.uniform(-0.12, 0.12, (n, 1, 14, 14)), (1, 1, 2, 2), order=1)
    row, column = np.mgrid[:SIDE, :SIDE]
    angle, wave, phase = (rng.uniform(0, top, (n, 1, 1)) for top in (np.pi, 0.7, 2 * np.pi))
    planks = 0.08 * np.sin((0.5 + wave) * (np.cos(angle) * row + np.sin(angle) * column) + phase)
    texture: Floats = stains + speckle + planks[:, None]
    return texture


def _print_domain() -> Domain:
    """Printed digits; the test set takes half of its glyphs from font families the training set lacks."""
    rng = _generator("print")
    train_y = rng.permutation(np.repeat(np.arange(CLASSES), PRINT_TRAIN_PER_CLASS))
    test_y = rng.permutation(np.repeat(np.arange(CLASSES), TEST_PER_CLASS))
    seen = rng.integers(SEEN_FONTS, size=len(train_y) + len(test_y))
    unseen = rng.integers(SEEN_FONTS, len(FONTS), size=len(seen))
    fonts = np.where(np.arange(len(seen)) < len(train_y) + len(test_y) // 2, seen, unseen)
    source = FIRST_PRINT_SOURCE * (1 + fonts) + np.arange(len(fonts))
    painted = _paint_print(_glyphs(np.concatenate([train_y, test_y]), fonts, rng), rng)
    cut = len(train_y)
    return Domain(painted[:cut], train_y, painted[cut:], test_y, source[:cut], source[cut:])


@functools.cache
def public() -> Data:
    """Printed digits that nobody trains or is tested on, for methods that need examples which all may see."""
    rng = _generator("public")
    digits = rng.permutation(np.repeat(np.arange(CLASSES), PUBLIC_PER_CLASS))
    painted = _paint_print(_glyphs(digits, rng.integers(SEEN_FONTS, size=len(digits)), rng), rng)
    return Data.of(torch.from_numpy(painted), torch.from_numpy(digits))


def _glyphs(digits: Integers, fonts: Integers, rng: np.random.Generator) -> Floats:
    """One digit per image, centred, with fragments of two other glyphs cut off by the border."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    # The basic layout is always there; the default one depends on how Pillow was built.
    layout = ImageFont.Layout.BASIC
    loaded = [ImageFont.truetype(str(folder / file), GLYPH_POINTS, layout_engine=layout) for _, file in FONTS]
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


def _fragments(rng: np.random.Generator) -> list[tuple[str, float]]:
    return [(str(rng.choice(list(CLUTTER))), side * rng.uniform(42, 50)) for side in (-1, 1)]


def _paint_print(glyphs: Floats, rng: np.random.Generator) -> Bytes:
    """Flat, saturated colours of either polarity."""
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
    """(N, 2, 2) maps of (row, column): slant to the right, then turn, then scale."""
    cos, sin = np.cos(angle), np.sin(angle)
    turn = np.array([[cos, -sin], [sin, cos]])
    lean = np.array([[np.ones_like(slant), np.zeros_like(slant)], [-slant, np.ones_like(slant)]])
    maps: Floats = scale[:, None, None] * np.einsum("ijn,jkn->nik", turn, lean)
    return maps


def _warp(images: Floats, maps: Floats, shifts: Floats, side: int, order: Literal[1, 3]) -> Floats:
    """Each image under its own map about the centre, moved by its shift, on a canvas of the given side."""
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
    """Zero up to low, one from high, smooth between: the level decides how wide a stroke becomes."""
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


TRANSFORM = Transform(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


@dataclass(frozen=True)
class Minidigits:
    """Four domains of digits at 28 × 28 × 3 that need no download, twelve clients of unequal domains and sizes."""

    projected: bool = False
    """Whether the network has a projection before its classifier, as pFedCSPC's networks do."""

    def build(self) -> Task:
        stores = {name: _stores(domain) for name, domain in domains().items()}
        rows = client_rows()
        return Task(
            name="minidigits",
            clients={c: stores[domain][0].rows(torch.from_numpy(own)) for c, (domain, own) in rows.items()},
            tests={name: test for name, (_, test) in stores.items()},
            num_classes=CLASSES,
            model=lambda client: small_cnn(channels=3, num_classes=CLASSES, projected=self.projected),
            domain_of={client: domain for client, (domain, _) in rows.items()},
            transform=TRANSFORM,
            public=public(),
        )


@dataclass(frozen=True)
class MinidigitsSkewed:
    """The digits of minidigits, all domains mixed, among clients that have different classes: label skew."""

    num_clients: Annotated[int, Ge(1)] = 20
    concentration: Positive = 0.3
    """β of the Dirichlet distribution that divides each class among the clients; the lower, the more skewed."""
    seed: Annotated[int, Ge(0)] = 0
    """Of the division."""
    projected: bool = False
    """Whether the network has a projection before its classifier, as pFedCSPC's networks do."""

    def build(self) -> Task:
        stores = [_stores(domain) for domain in domains().values()]
        everything = Data.of(torch.cat([train.x for train, _ in stores]), torch.cat([train.y for train, _ in stores]))
        rows = dirichlet(everything.y, self.num_clients, self.concentration, self.seed)
        return Task(
            name="minidigits_skewed",
            clients={f"client-{k:02d}": everything.rows(own) for k, own in enumerate(rows)},
            tests={name: test for name, (_, test) in zip(domains(), stores, strict=True)},
            num_classes=CLASSES,
            model=lambda client: small_cnn(channels=3, num_classes=CLASSES, projected=self.projected),
            transform=TRANSFORM,
            public=public(),
        )


def _stores(domain: Domain) -> tuple[Data, Data]:
    """Training and test examples."""
    return (
        Data.of(torch.from_numpy(domain.train_x), torch.from_numpy(domain.train_y)),
        Data.of(torch.from_numpy(domain.test_x), torch.from_numpy(domain.test_y)),
    )
