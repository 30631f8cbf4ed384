"""VireoFood-172: photos of 172 Chinese dishes.

Chen and Ngo, Deep-based ingredient recognition for cooking recipe retrieval, ACM MM 2016 (on request, for research).
Images are 224 pixels a side by default, as in federated papers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from protofed.datasets.examples import Dataset, Split
from protofed.datasets.image_folders import (
    LabelledFiles,
    check_listed,
    files_by_class,
    labelled_files,
    read_splits,
    set_folder,
    text_lines,
)
from protofed.datasets.images import composed
from protofed.errors import BadInput


@dataclass(frozen=True)
class FoodFolders:
    """A folder of images for each dish, a list of those for training and a list of those for testing."""

    num_classes: int
    counts: tuple[frozenset[int], int]
    """The possible numbers of training images, and the number of test images."""
    obtain: str
    folder: str = "vireofood172"

    def read(self, root: Path, pixels: int) -> Mapping[str, Split]:
        home = set_folder(self.folder, root, self.obtain)
        images = home / "ready_chinese_food"
        classes = [(str(number),) for number in range(1, self.num_classes + 1)]
        by_class = files_by_class(images, home, classes, self.obtain)
        files = {f"/{label + 1}/{composed(path.name)}": (path, label) for path, label in labelled_files(by_class)}
        train = self._part(home, "TR.txt", files, self.counts[0])
        test = self._part(home, "TE.txt", files, frozenset({self.counts[1]}))
        return read_splits({"vireofood172": (train, test)}, pixels, self.folder)

    def _part(
        self, home: Path, name: str, files: Mapping[str, tuple[Path, int]], expected: frozenset[int]
    ) -> LabelledFiles:
        source = home / "SplitAndIngreLabel" / name
        names = [composed(line) for line in text_lines(source, home)]
        if len(names) not in expected:
            numbers = " or ".join(map(str, sorted(expected)))
            raise BadInput(f"{source}: {len(names)} lines instead of {numbers}. {self.obtain}")
        check_listed(names, files, source, home / "ready_chinese_food")
        return [files[line] for line in names]


FOOD_FOLDERS = FoodFolders(
    num_classes=172,
    # For the same list, pFedCSPC reports 68 175 images and others report 66 071. We have not seen the list itself.
    counts=(frozenset({68_175, 66_071}), 33_154),
    obtain="VireoFood-172 is given by its authors on request (VireoFood172.zip and SplitAndIngreLabel.zip); put the "
    "folders ready_chinese_food and SplitAndIngreLabel into vireofood172 below $PROTOFED_DATA.",
)

VIREOFOOD172 = Dataset(
    name="vireofood172",
    classes=tuple(str(number) for number in range(1, 173)),
    pixels=224,
    counts={"vireofood172": (68_175, 33_154)},
    obtain=FOOD_FOLDERS.obtain,
    read=FOOD_FOLDERS.read,
)
