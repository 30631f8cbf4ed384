"""CIFAR-10 and CIFAR-100, in the binary version.

Krizhevsky, Learning Multiple Layers of Features from Tiny Images, technical report, University of Toronto, 2009. The
publisher states no licence and asks for that citation.
"""

from pathlib import Path

import numpy as np

from protofed.datasets.examples import Examples, Split
from protofed.datasets.files import Publication, dataset
from protofed.datasets.formats import CIFAR_SIDE, check_count, cifar, resized
from protofed.errors import BadInput

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR100_CLASSES = tuple(
    """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
    flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
    motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
    poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
    squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
    wardrobe whale willow_tree wolf woman worm
    """.split()  # noqa: SIM905
)
SUPERCLASSES = 20
"""Number of coarse classes of CIFAR-100. The byte of the coarse class is checked and then dropped."""

BATCHES = tuple(f"data_batch_{k}.bin" for k in range(1, 6))
COUNTS = 50_000, 10_000

NAMES_LIMIT = 1 << 16


def read_cifar10(publication: Publication, counts: tuple[int, int], root: Path, pixels: int) -> dict[str, Split]:
    _check_names(publication, root, "batches.meta.txt", CIFAR10_CLASSES)
    size = counts[0] // len(BATCHES)
    parts = [_part(publication, root, name, size, (len(CIFAR10_CLASSES),), pixels) for name in BATCHES]
    train = Examples(np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts]))
    test = _part(publication, root, "test_batch.bin", counts[1], (len(CIFAR10_CLASSES),), pixels)
    return {publication.name: Split(train, test)}


def read_cifar100(publication: Publication, counts: tuple[int, int], root: Path, pixels: int) -> dict[str, Split]:
    """With the fine labels."""
    _check_names(publication, root, "fine_label_names.txt", CIFAR100_CLASSES)
    classes = SUPERCLASSES, len(CIFAR100_CLASSES)
    train = _part(publication, root, "train.bin", counts[0], classes, pixels)
    test = _part(publication, root, "test.bin", counts[1], classes, pixels)
    return {publication.name: Split(train, test)}


def _part(
    publication: Publication, root: Path, name: str, count: int, classes: tuple[int, ...], pixels: int
) -> Examples:
    def examples(data: bytes) -> Examples:
        images, labels = cifar(data, classes)
        check_count(len(labels), count)
        return Examples(resized(images, pixels), labels)

    return publication.decoded(root, [name], count * (len(classes) + 3 * CIFAR_SIDE**2), examples)


def _check_names(publication: Publication, root: Path, name: str, expected: tuple[str, ...]) -> None:
    """Refuses files whose list of class names differs from ours. The list may be missing."""

    def check(data: bytes) -> None:
        names = data.decode("ascii", "replace").split()
        if names != list(expected):
            raise BadInput(f"it should name {', '.join(expected)}, one on each line, but names {', '.join(names)}")

    if publication.path_if_any(root, [name]) is not None:
        publication.decoded(root, [name], NAMES_LIMIT, check)


_CIFAR10 = Publication(
    "cifar10",
    "From https://www.cs.toronto.edu/~kriz/cifar.html unpack cifar-10-binary.tar.gz (the binary version) below "
    "$PROTOFED_DATA, and leave its folder cifar-10-batches-bin as it is or call it cifar10.",
)
_CIFAR100 = Publication(
    "cifar100",
    "From https://www.cs.toronto.edu/~kriz/cifar.html unpack cifar-100-binary.tar.gz (the binary version) below "
    "$PROTOFED_DATA, and leave its folder cifar-100-binary as it is or call it cifar100.",
)

CIFAR10 = dataset(_CIFAR10, CIFAR10_CLASSES, CIFAR_SIDE, COUNTS, read_cifar10)
CIFAR100 = dataset(_CIFAR100, CIFAR100_CLASSES, CIFAR_SIDE, COUNTS, read_cifar100)
