"""Synthetic digits: SYN and MNIST-M.

Both were introduced by Ganin and Lempitsky, Unsupervised domain adaptation by backpropagation, ICML 2015. SYN exists
in three forms. The full set has 479 400 training images. Digit-Five (Peng et al., Moment matching for multi-source
domain adaptation, ICCV 2019) has 25 000. Both are MATLAB files. A similar set of 10 000 images by Roy et al., Effects
of degradations on deep neural network architectures, 2018, is on Kaggle as "synthetic digits". MNIST-M blends digits of
MNIST with photographs of BSDS500 (Arbelaez et al., 2011). We know of no licence for these sets.
"""

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from protofed.datasets.examples import Dataset, Examples, Split
from protofed.datasets.files import Publication
from protofed.datasets.formats import check_labels, matlab_images, resized
from protofed.datasets.image_folders import (
    LabelledFiles,
    files_by_class,
    labelled_files,
    named_images,
    read_splits,
    set_folder,
    text_lines,
)
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
    """Number of training and test images in the folders. MATLAB files may hold any number up to `max_images`."""
    max_images: int
    obtain: str
    folder: str = "syn"

    def read(self, root: Path, pixels: int) -> Mapping[str, Split]:
        home = set_folder(self.folder, root, self.obtain)
        is_matlab, is_folders = (
            any(os.path.lexists(home / name) for name in names) for names in (MATLAB_FILES, IMAGE_FOLDERS)
        )
        if is_matlab and is_folders:
            raise BadInput(f"{home}: there are both MATLAB files and folders of images; keep one of the two")
        split = self._matlab(root, pixels) if is_matlab else self._folders(root, pixels)
        log.info("%s: %d training and %d test images", home, len(split.train), len(split.test))
        return {"syn": split}

    def _folders(self, root: Path, pixels: int) -> Split:
        home = root / self.folder
        parts = []
        for name, expected in zip(IMAGE_FOLDERS, self.counts, strict=True):
            by_class = files_by_class(home / name, home, [(digit,) for digit in CLASSES], self.obtain)
            if sum(map(len, by_class)) != expected:
                counts = ", ".join(f"{len(files)} of {digit}" for digit, files in zip(CLASSES, by_class, strict=True))
                raise BadInput(f"{home / name}: {expected} images expected, but found {counts}. {self.obtain}")
            parts.append(labelled_files(by_class))
        return read_splits({"syn": (parts[0], parts[1])}, pixels, self.folder)["syn"]

    def _matlab(self, root: Path, pixels: int) -> Split:
        limit = self.max_images * (3 * SIDE**2 + 1) + MATLAB_REST_BYTES

        def examples(data: bytes) -> Examples:
            images, labels = matlab_images(data, limit)
            check_labels(labels, 0, 10)
            if not 0 < len(labels) <= self.max_images:
                raise BadInput(f"it contains {len(labels)} images; 1 to {self.max_images} are expected")
            return Examples(images, labels % 10)

        publication = Publication(self.folder, self.obtain)
        train, test = (publication.decoded(root, [name], limit, examples) for name in MATLAB_FILES)
        check_memory(len(train) + len(test), pixels, self.folder)
        return Split(*(Examples(resized(part.x, pixels), part.y) for part in (train, test)))


@dataclass(frozen=True)
class MnistMFiles:
    """MNIST-M as two folders of images, each with a file of labels beside it."""

    counts: tuple[frozenset[int], frozenset[int]]
    """The possible numbers of training images and of test images."""
    obtain: str
    folder: str = "mnist_m"

    def read(self, root: Path, pixels: int) -> Mapping[str, Split]:
        home = set_folder(self.folder, root, self.obtain)
        train, test = (
            self._part(home, name, expected)
            for name, expected in zip(("mnist_m_train", "mnist_m_test"), self.counts, strict=True)
        )
        return read_splits({"mnist_m": (train, test)}, pixels, self.folder)

    def _part(self, home: Path, name: str, expected: frozenset[int]) -> LabelledFiles:
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
                    f"{source}, line {number}: expected an image and a digit, but found {lines[number - 1][:40]!r}"
                )
            names.append(row[1])
            labels.append(int(row[2]))
        return list(zip(named_images(names, home / name, home, source), labels, strict=True))


SYN_FILES = SynFiles(
    counts=(10_000, 2_000),
    max_images=479_400,
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
