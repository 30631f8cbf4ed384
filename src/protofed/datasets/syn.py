"""Digits made by machine: SYN and MNIST-M.

Both were introduced by Ganin and Lempitsky, Unsupervised domain adaptation by backpropagation, ICML 2015. SYN is met in
three forms: the whole of 479 400 training images, the 25 000 of Digit-Five (Peng et al., Moment matching for
multi-source domain adaptation, ICCV 2019), both as MATLAB files, and a set of 10 000 in the same manner by Roy et al.,
Effects of degradations on deep neural network architectures, 2018, which Kaggle has as "synthetic digits". MNIST-M lies
digits of MNIST over photographs of BSDS500 (Arbelaez et al., 2011). We know of no licence for them.
"""

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from protofed.datasets.examples import Dataset, Examples, Split
from protofed.datasets.files import Publication
from protofed.datasets.folders import (
    Labelled,
    files_by_class,
    found_folder,
    labelled,
    named_images,
    splits_of,
    text_lines,
)
from protofed.datasets.formats import check_labels, matlab_images, resized
from protofed.datasets.images import check_memory
from protofed.errors import BadInput

log = logging.getLogger(__name__)

CLASSES = tuple("0123456789")
SIDE = 32
MATLAB_FILES = "synth_train_32x32.mat", "synth_test_32x32.mat"
IMAGE_FOLDERS = "imgs_train", "imgs_valid"
MATLAB_REST_BYTES = 4096
"""Headers and padding of a MATLAB file."""

LABEL_LINE = re.compile(r"(\S+)\s+([0-9])")


@dataclass(frozen=True)
class SynFiles:
    """SYN as two folders of class folders, or as two MATLAB files."""

    counts: tuple[int, int]
    """How many images the folders hold; MATLAB files may hold any number up to `most`."""
    most: int
    obtain: str
    folder: str = "syn"

    def read(self, root: Path, pixels: int) -> Mapping[str, Split]:
        home = found_folder(self.folder, root, self.obtain)
        is_matlab, is_folders = (
            any(os.path.lexists(home / name) for name in names) for names in (MATLAB_FILES, IMAGE_FOLDERS)
        )
        if is_matlab and is_folders:
            raise BadInput(f"{home}: both MATLAB files and folders of images are there: keep one of the two forms")
        split = self._matlab(root, pixels) if is_matlab else self._folders(root, pixels)
        log.info("%s: %d training and %d test images", home, len(split.train), len(split.test))
        return {"syn": split}

    def _folders(self, root: Path, pixels: int) -> Split:
        home = root / self.folder
        parts = []
        for name, expected in zip(IMAGE_FOLDERS, self.counts, strict=True):
            by_class = files_by_class(home / name, home, [(digit,) for digit in CLASSES], self.obtain)
            if sum(map(len, by_class)) != expected:
                found = ", ".join(f"{len(files)} of {digit}" for digit, files in zip(CLASSES, by_class, strict=True))
                raise BadInput(f"{home / name}: {expected} images expected, not {found}. {self.obtain}")
            parts.append(labelled(by_class))
        return splits_of({"syn": (parts[0], parts[1])}, pixels, self.folder)["syn"]

    def _matlab(self, root: Path, pixels: int) -> Split:
        limit = self.most * (3 * SIDE**2 + 1) + MATLAB_REST_BYTES

        def examples(data: bytes) -> Examples:
            images, labels = matlab_images(data, limit)
            check_labels(labels, 0, 10)
            if not 0 < len(labels) <= self.most:
                raise BadInput(f"it holds {len(labels)} images; 1 to {self.most} are expected")
            return Examples(images, labels % 10)

        publication = Publication(self.folder, self.obtain)
        train, test = (publication.decoded(root, [name], limit, examples) for name in MATLAB_FILES)
        check_memory(len(train) + len(test), pixels, self.folder)
        return Split(*(Examples(resized(part.x, pixels), part.y) for part in (train, test)))


@dataclass(frozen=True)
class MnistMFiles:
    """MNIST-M as two folders of images, each with a list of labels beside it."""

    counts: tuple[frozenset[int], frozenset[int]]
    """How many training and test images there may be."""
    obtain: str
    folder: str = "mnist_m"

    def read(self, root: Path, pixels: int) -> Mapping[str, Split]:
        home = found_folder(self.folder, root, self.obtain)
        train, test = (
            self._part(home, name, expected)
            for name, expected in zip(("mnist_m_train", "mnist_m_test"), self.counts, strict=True)
        )
        return splits_of({"mnist_m": (train, test)}, pixels, self.folder)

    def _part(self, home: Path, name: str, expected: frozenset[int]) -> Labelled:
        source = home / f"{name}_labels.txt"
        lines = text_lines(source, home)
        if len(lines) not in expected:
            numbers = " or ".join(map(str, sorted(expected)))
            raise BadInput(f"{source}: {len(lines)} lines instead of {numbers}. {self.obtain}")
        rows = [LABEL_LINE.fullmatch(line) for line in lines]
        names, labels = [], []
        for number, row in enumerate(rows, 1):
            if row is None:
                raise BadInput(
                    f"{source}, line {number}: expected an image and a digit, not {lines[number - 1][:40]!r}"
                )
            names.append(row[1])
            labels.append(int(row[2]))
        return list(zip(named_images(names, home / name, home, source), labels, strict=True))


SYN_FILES = SynFiles(
    counts=(10_000, 2_000),
    most=479_400,
    obtain="Put either the folders imgs_train and imgs_valid of Kaggle's synthetic digits, or synth_train_32x32.mat "
    "and synth_test_32x32.mat, into syn below $PROTOFED_DATA.",
)

MNIST_M_FILES = MnistMFiles(
    counts=(frozenset({59_001, 60_000}), frozenset({9_001, 10_000})),
    obtain="MNIST-M is mnist_m.tar.gz, linked from http://yaroslav.ganin.net; unpack it below $PROTOFED_DATA, to the "
    "folder mnist_m.",
)

SYN = Dataset(
    name="syn",
    classes=CLASSES,
    pixels=SIDE,
    counts={"syn": SYN_FILES.counts},
    obtain=SYN_FILES.obtain,
    read=SYN_FILES.read,
)

MNIST_M = Dataset(
    name="mnist_m",
    classes=CLASSES,
    pixels=SIDE,
    counts={"mnist_m": (59_001, 9_001)},
    obtain=MNIST_M_FILES.obtain,
    read=MNIST_M_FILES.read,
)
