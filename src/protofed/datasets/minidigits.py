"""The images of ``minidigits``: four domains of digits, with nothing to download.

Three domains show real handwriting from scikit-learn's ``load_digits``. The fourth shows digits in the fonts that ship
with matplotlib. No handwritten image is used twice, neither across domains nor across training and test sets. The
printed test set contains font families that the printed training set lacks.
"""

import functools
from dataclasses import dataclass

import numpy as np

from protofed.datasets.minidigits_drawing import (
    SIDE,
    Bytes,
    Floats,
    Integers,
    draw_glyphs,
    package_folder,
    paint_ink,
    paint_pen,
    paint_print,
    paint_street,
)

__all__ = ["CLASSES", "SIDE", "Domain", "build", "domains", "print_font", "public_images"]

CLASSES = 10
TEST_PER_CLASS = 15
TRAIN_PER_CLASS = {"pen": 48, "ink": 24, "print": 60}
"""Street has all handwritten images that are left over: 627 in all."""
PUBLIC_PER_CLASS = 20
SEEDS = {"split": 2301, "pen": 2302, "ink": 2303, "street": 2304, "print": 2305, "public": 2306}

FIRST_PRINT_SOURCE = 10_000
"""The source id of a printed image is FIRST_PRINT_SOURCE * (1 + font) + draw, so that the id tells its font."""
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
FONT_FILES = tuple(file for _, file in FONTS)
NUM_SEEN_FONTS = sum(len(files) for files in SEEN_FAMILIES.values())


@dataclass(frozen=True)
class Domain:
    """The ten digits in one style. Images are uint8 (N, 3, 28, 28); labels and sources are int64 (N,).

    A source is an index into ``load_digits``; for ``print`` it is an id that :func:`print_font` decodes.
    """

    train_x: Bytes
    train_y: Integers
    test_x: Bytes
    test_y: Integers
    train_source: Integers
    test_source: Integers


@functools.cache
def domains() -> dict[str, Domain]:
    """The four domains in the order pen, ink, street, print. The bytes are always the same."""
    return build()


def build() -> dict[str, Domain]:
    """Draws the four domains, without a cache."""
    pixels, labels = _handwriting()
    strokes = pixels.reshape(-1, 8, 8) / 16.0
    painters = {"pen": paint_pen, "ink": paint_ink, "street": paint_street}
    built = {}
    for name, (train, test) in _split_handwriting(labels).items():
        painted = painters[name](strokes[np.concatenate([train, test])], _generator(name))
        cut = len(train)
        built[name] = Domain(painted[:cut], labels[train], painted[cut:], labels[test], train, test)
    built["print"] = _print_domain()
    return built


def _handwriting() -> tuple[Floats, Integers]:
    """Pixels (N, 64) and labels of ``load_digits``, from its file if that is where it always was: importing
    scikit-learn takes longer than everything else here."""
    file = package_folder("sklearn") / "datasets" / "data" / "digits.csv.gz"
    if file.exists():
        table = np.loadtxt(file, delimiter=",")
        return table[:, :-1], table[:, -1].astype(np.int64)
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return pixels, labels.astype(np.int64)


def print_font(source: int) -> tuple[str, str]:
    """Font family and font file of a source id of the ``print`` domain."""
    return FONTS[source // FIRST_PRINT_SOURCE - 1]


def _generator(purpose: str) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(SEEDS[purpose]))


def _split_handwriting(labels: Integers) -> dict[str, tuple[Integers, Integers]]:
    """Training and test indices of each handwritten domain. They partition all indices, class by class."""
    names = ("pen", "ink", "street")
    # Street gets what is left over, so that every source image is used exactly once.
    sizes = [TEST_PER_CLASS] * 3 + [TRAIN_PER_CLASS[name] for name in ("pen", "ink")]
    rng = _generator("split")
    parts: list[list[Integers]] = [[] for _ in range(6)]
    for digit in range(CLASSES):
        members = rng.permutation(np.flatnonzero(labels == digit))
        for part, piece in zip(parts, np.split(members, np.cumsum(sizes)), strict=True):
            part.append(piece)
    shuffled = [rng.permutation(np.concatenate(part)) for part in parts]
    return {name: (shuffled[3 + k], shuffled[k]) for k, name in enumerate(names)}


def _print_domain() -> Domain:
    """Printed digits. Half of the test set is in font families that the training set lacks."""
    rng = _generator("print")
    train_y = rng.permutation(np.repeat(np.arange(CLASSES), TRAIN_PER_CLASS["print"]))
    test_y = rng.permutation(np.repeat(np.arange(CLASSES), TEST_PER_CLASS))
    seen = rng.integers(NUM_SEEN_FONTS, size=len(train_y) + len(test_y))
    unseen = rng.integers(NUM_SEEN_FONTS, len(FONTS), size=len(seen))
    fonts = np.where(np.arange(len(seen)) < len(train_y) + len(test_y) // 2, seen, unseen)
    source = FIRST_PRINT_SOURCE * (1 + fonts) + np.arange(len(fonts))
    painted = paint_print(draw_glyphs(np.concatenate([train_y, test_y]), FONT_FILES, fonts, rng), rng)
    cut = len(train_y)
    return Domain(painted[:cut], train_y, painted[cut:], test_y, source[:cut], source[cut:])


@functools.cache
def public_images() -> tuple[Bytes, Integers]:
    """Printed digits and their labels, for methods that need public examples. No client and no test set has them."""
    rng = _generator("public")
    digits = rng.permutation(np.repeat(np.arange(CLASSES), PUBLIC_PER_CLASS))
    fonts = rng.integers(NUM_SEEN_FONTS, size=len(digits))
    return paint_print(draw_glyphs(digits, FONT_FILES, fonts, rng), rng), digits
