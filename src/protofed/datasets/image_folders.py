"""Reading sets of images that come as folders. Each published set has its layout in a module of its own."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from protofed.datasets.examples import Examples, Split
from protofed.datasets.images import check_inside, check_memory, composed, contents, images_in, listed, stacked
from protofed.errors import BadInput

LabelledFiles = Sequence[tuple[Path, int]]
"""Image files, and the class of each."""

MAX_TEXT_BYTES = 16 * 2**20
MAX_NAME_LENGTH = 120
"""Of a name in a message, in characters."""


@dataclass(frozen=True)
class DomainFolders:
    """The layout `folder/domain/class/image`, with FPL's split into training and test images."""

    folder: str
    classes: tuple[tuple[str, ...], ...]
    """For each class, the names that its folder may have."""
    counts: Mapping[str, tuple[int, ...]]
    """Number of images of each class in each domain."""
    obtain: str

    def read(self, root: Path, pixels: int) -> Mapping[str, Split]:
        home = set_folder(self.folder, root, self.obtain)
        files = {domain: fpl_split(self._domain(home / domain, domain)) for domain in self.counts}
        return read_splits(files, pixels, self.folder)

    def _domain(self, folder: Path, domain: str) -> LabelledFiles:
        by_class = files_by_class(folder, folder.parent, self.classes, self.obtain)
        wrong = [
            f"{names[0]} has {len(files)} instead of {expected}"
            for names, files, expected in zip(self.classes, by_class, self.counts[domain], strict=True)
            if len(files) != expected
        ]
        if wrong:
            raise BadInput(f"{folder}: wrong numbers of images: {', '.join(wrong)}. {self.obtain}")
        return labelled_files(by_class)

    @property
    def split_counts(self) -> dict[str, tuple[int, int]]:
        """Number of training and test images of each domain."""
        splits = {domain: fpl_split([(Path(), 0)] * sum(counts)) for domain, counts in self.counts.items()}
        return {domain: (len(train), len(test)) for domain, (train, test) in splits.items()}


def fpl_split(files: LabelledFiles) -> tuple[LabelledFiles, LabelledFiles]:
    """The split of FPL's code (Huang et al., CVPR 2023), for sets that are published without one.

    The files of a domain are numbered from 0, in the order of classes and names. Those whose number ends in 8 or 9 are
    for testing.
    """
    train = [file for number, file in enumerate(files) if number % 10 < 8]
    return train, [file for number, file in enumerate(files) if number % 10 >= 8]


def read_splits(files: Mapping[str, tuple[LabelledFiles, LabelledFiles]], pixels: int, where: str) -> dict[str, Split]:
    """The training and test images of each domain, decoded one at a time."""
    check_memory(sum(len(train) + len(test) for train, test in files.values()), pixels, where)
    return {domain: Split(_examples(train, pixels), _examples(test, pixels)) for domain, (train, test) in files.items()}


def _examples(files: LabelledFiles, pixels: int) -> Examples:
    return Examples(stacked([path for path, _ in files], pixels), np.array([label for _, label in files], np.int64))


def labelled_files(by_class: Sequence[Sequence[Path]]) -> LabelledFiles:
    return [(path, label) for label, files in enumerate(by_class) for path in files]


def files_by_class(folder: Path, root: Path, classes: Sequence[tuple[str, ...]], obtain: str) -> list[tuple[Path, ...]]:
    """The images of each class. Each class must have one folder, under one of its names, and no other may exist."""
    listing = listed(folder, root)
    check_class_names(list(listing.classes), classes, folder, obtain)
    return [next(listing.classes[name] for name in names if name in listing.classes) for names in classes]


def check_class_names(names: Sequence[str], classes: Sequence[tuple[str, ...]], where: Path, obtain: str) -> None:
    """Refuses names that are not, one for one, those of the expected classes."""
    expected = {name for variants in classes for name in variants}
    faults = {
        "missing": [" or ".join(variants) for variants in classes if not set(variants) & set(names)],
        "unexpected": sorted(set(names) - expected),
        "duplicate": [" and ".join(variants) for variants in classes if sum(map(names.count, variants)) > 1],
    }
    text = "; ".join(f"{fault}: {shortened(listed_names)}" for fault, listed_names in faults.items() if listed_names)
    if text:
        raise BadInput(f"{where}: not the {len(classes)} expected classes ({text}). {obtain}".rstrip())


def set_folder(name: str, root: Path, obtain: str) -> Path:
    """The folder of a published set."""
    folder = root / name
    if not folder.is_dir():
        raise BadInput(f"{folder}: there is no such folder. {obtain}")
    check_inside(folder, root)
    return folder


def text_lines(path: Path, root: Path) -> list[str]:
    """The lines of a text file without surrounding white space. Empty lines are skipped."""
    check_inside(path, root)
    try:
        text = contents(path, MAX_TEXT_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: not UTF-8 text. Get the file again") from error
    return [line.strip() for line in text.split("\n") if line.strip()]


def named_images(names: Sequence[str], folder: Path, root: Path, source: Path) -> list[Path]:
    """The images of a folder that the list `source` names, in its order."""
    paths = {composed(path.name): path for path in images_in(folder, root)[0]}
    wanted = [composed(name) for name in names]
    check_listed(wanted, paths, source, folder)
    return [paths[name] for name in wanted]


def check_listed(names: Sequence[str], paths: Mapping[str, object], source: Path, folder: Path) -> None:
    """Refuses a list that names an image twice, or an image that is not in the folder."""
    missing = [name for name in names if name not in paths]
    if missing:
        raise BadInput(f"{source} names images that are not in {folder}: {shortened(missing)}")
    duplicates = [name for name, times in Counter(names).items() if times > 1]
    if duplicates:
        raise BadInput(f"{source} names images twice: {shortened(duplicates)}")


def shortened(words: Sequence[str], limit: int = 8) -> str:
    """The first few words, for a message. Long words are cut."""
    more = f" and {len(words) - limit} more" if len(words) > limit else ""
    cut = (word if len(word) <= MAX_NAME_LENGTH else f"{word[:MAX_NAME_LENGTH]}…" for word in words[:limit])
    return ", ".join(cut) + more
