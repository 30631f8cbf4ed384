"""VLCS: five classes of photos from four collections.

Fang, Xu and Rockmore, Unbiased metric learning, ICCV 2013. We know of no licence. No federated paper states a size of
images; 64 pixels a side is our choice.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from protofed.datasets.examples import Dataset, Split
from protofed.datasets.image_folders import LabelledFiles, files_by_class, labelled_files, read_splits, set_folder
from protofed.errors import BadInput


@dataclass(frozen=True)
class SplitFolders:
    """The layout `folder/DOMAIN/part/class/image`. The parts train and crossval are for training."""

    folder: str
    num_classes: int
    counts: Mapping[str, tuple[int, int]]
    obtain: str

    def read(self, root: Path, pixels: int) -> Mapping[str, Split]:
        home = set_folder(self.folder, root, self.obtain)
        files = {}
        for domain, (num_train, num_test) in self.counts.items():
            train = [*self._part(home, domain, "train"), *self._part(home, domain, "crossval")]
            test = self._part(home, domain, "test")
            self._check(train, num_train, f"{home / domain.upper()}, train and crossval")
            self._check(test, num_test, f"{home / domain.upper()}, test")
            files[domain] = train, test
        return read_splits(files, pixels, self.folder)

    def _part(self, home: Path, domain: str, part: str) -> LabelledFiles:
        classes = [(str(label),) for label in range(self.num_classes)]
        return labelled_files(files_by_class(home / domain.upper() / part, home, classes, self.obtain))

    def _check(self, files: LabelledFiles, expected: int, where: str) -> None:
        if len(files) != expected:
            counts = np.bincount([label for _, label in files], minlength=self.num_classes)
            by_class = ", ".join(f"{count} of class {label}" for label, count in enumerate(counts))
            raise BadInput(f"{where}: {len(files)} images ({by_class}) instead of {expected}. {self.obtain}")


VLCS_FOLDERS = SplitFolders(
    folder="vlcs",
    num_classes=5,
    counts={"caltech": (991, 424), "labelme": (1859, 797), "pascal": (2363, 1013), "sun": (2297, 985)},
    obtain="VLCS is published as four folders, CALTECH, LABELME, PASCAL and SUN, each with train, crossval, test and "
    "full; put them into vlcs below $PROTOFED_DATA.",
)

VLCS = Dataset(
    name="vlcs",
    classes=("bird", "car", "chair", "dog", "person"),
    pixels=64,
    counts=VLCS_FOLDERS.counts,
    obtain=VLCS_FOLDERS.obtain,
    read=VLCS_FOLDERS.read,
)
