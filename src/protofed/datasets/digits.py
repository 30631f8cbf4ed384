"""Digits: MNIST, USPS and SVHN; and Fashion-MNIST, which has the file format of MNIST.

MNIST: LeCun, Bottou, Bengio and Haffner, Gradient-Based Learning Applied to Document Recognition, 1998 (derived by
Cortes and LeCun from NIST's data; the publisher states no licence). Fashion-MNIST: Xiao, Rasul and Vollgraf, 2017
(MIT licence). USPS: Hull, A Database for Handwritten Text Recognition Research, 1994, in the version of LIBSVM's
collection (no licence is stated). SVHN: Netzer, Wang, Coates, Bissacco, Wu and Ng, Reading Digits in Natural Images
with Unsupervised Feature Learning, 2011 (for non-commercial use only).
"""

from pathlib import Path

import numpy as np

from protofed.datasets.examples import Examples, Split
from protofed.datasets.files import Publication, dataset, warn_if_fewer
from protofed.datasets.formats import Bytes, Labels, check_count, check_labels, idx, libsvm, matlab_images, resized

CLASSES = tuple("0123456789")
CLOTHES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)

MNIST_COUNTS = 60_000, 10_000
USPS_COUNTS = 7_291, 2_007
SVHN_COUNTS = 73_257, 26_032

MNIST_SIDE, USPS_SIDE, SVHN_SIDE = 28, 16, 32

USPS_LINE_BYTES = 4096
"""Upper bound on the length of a line of 256 values."""
SVHN_IMAGE_BYTES = 3 * SVHN_SIDE**2 + 1
SVHN_REST_BYTES = 4096
"""Headers and padding of a MATLAB file."""


def read_idx(publication: Publication, counts: tuple[int, int], root: Path, pixels: int) -> dict[str, Split]:
    """The four files of MNIST, or of a dataset in the same format."""

    def part(prefix: str, count: int) -> Examples:
        def images(data: bytes) -> Bytes:
            array = idx(data, 3)
            check_count(len(array), count)
            return array[:, None]

        def labels(data: bytes) -> Labels:
            array = idx(data, 1)
            check_count(len(array), count)
            check_labels(array, 0, 9)
            return array.astype(np.int64)

        x_limit, y_limit = 16 + count * MNIST_SIDE**2, 8 + count
        x = publication.decoded(root, _plain_or(f"{prefix}-images-idx3-ubyte", ".gz"), x_limit, images)
        y = publication.decoded(root, _plain_or(f"{prefix}-labels-idx1-ubyte", ".gz"), y_limit, labels)
        return Examples(resized(x, pixels), y)

    return {publication.name: Split(part("train", counts[0]), part("t10k", counts[1]))}


def read_usps(publication: Publication, counts: tuple[int, int], root: Path, pixels: int) -> dict[str, Split]:
    def part(name: str, count: int) -> Examples:
        def examples(data: bytes) -> Examples:
            values, labels = libsvm(data, count, USPS_SIDE**2, len(CLASSES))
            grey = np.rint((values + 1) / 2 * 255).astype(np.uint8).reshape(-1, 1, USPS_SIDE, USPS_SIDE)
            return Examples(resized(grey, pixels), labels - 1)

        return publication.decoded(root, _plain_or(name, ".bz2"), count * USPS_LINE_BYTES, examples)

    return {publication.name: Split(part("usps", counts[0]), part("usps.t", counts[1]))}


def read_svhn(publication: Publication, counts: tuple[int, int], root: Path, pixels: int) -> dict[str, Split]:
    """The cropped digits. A file with only the first part of the training images is accepted."""

    def part(name: str, minimum: int, count: int) -> Examples:
        limit = count * SVHN_IMAGE_BYTES + SVHN_REST_BYTES

        def examples(data: bytes) -> Examples:
            images, labels = matlab_images(data, limit)
            check_labels(labels, 1, 10)
            check_count(len(labels), count, minimum)
            return Examples(resized(images, pixels), labels % 10)

        return publication.decoded(root, [name], limit, examples)

    train, test = part("train_32x32.mat", 1, counts[0]), part("test_32x32.mat", counts[1], counts[1])
    warn_if_fewer(f"{publication.name}, training", len(train), counts[0])
    return {publication.name: Split(train, test)}


def _plain_or(name: str, suffix: str) -> tuple[str, str]:
    return name, name + suffix


_IDX_FILES = (
    "put train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz and "
    "t10k-labels-idx1-ubyte.gz, unpacked or not, into $PROTOFED_DATA/"
)
_MNIST = Publication("mnist", f"From https://ossci-datasets.s3.amazonaws.com/mnist/ {_IDX_FILES}mnist/.")
_FASHION = Publication(
    "fashion_mnist", f"From https://github.com/zalandoresearch/fashion-mnist {_IDX_FILES}fashion_mnist/."
)
_USPS = Publication(
    "usps",
    "From https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass.html#usps put usps.bz2 and usps.t.bz2, "
    "unpacked or not, into $PROTOFED_DATA/usps/.",
)
_SVHN = Publication(
    "svhn",
    "From http://ufldl.stanford.edu/housenumbers/ (format 2, cropped digits) put train_32x32.mat and test_32x32.mat "
    "into $PROTOFED_DATA/svhn/.",
)

MNIST = dataset(_MNIST, CLASSES, MNIST_SIDE, MNIST_COUNTS, read_idx)
FASHION_MNIST = dataset(_FASHION, CLOTHES, MNIST_SIDE, MNIST_COUNTS, read_idx)
USPS = dataset(_USPS, CLASSES, USPS_SIDE, USPS_COUNTS, read_usps)
SVHN = dataset(_SVHN, CLASSES, SVHN_SIDE, SVHN_COUNTS, read_svhn)
