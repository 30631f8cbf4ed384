"""Tiny ImageNet: 200 classes of ImageNet at 64 × 64 pixels.

Stanford CS231n, 2015, from ImageNet (Deng et al., CVPR 2009; for non-commercial research).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from protofed.datasets.examples import Dataset, Split
from protofed.datasets.image_folders import (
    LabelledFiles,
    check_class_names,
    labelled_files,
    named_images,
    read_splits,
    set_folder,
    shortened,
    text_lines,
)
from protofed.datasets.images import images_in, listed
from protofed.errors import BadInput


@dataclass(frozen=True)
class TinyFolders:
    """A folder of training images for each class. The validation images serve for testing: the test images have no
    labels."""

    classes: tuple[str, ...]
    per_class: tuple[int, int]
    obtain: str
    folder: str = "tiny_imagenet/tiny-imagenet-200"

    def read(self, root: Path, pixels: int) -> Mapping[str, Split]:
        home = set_folder(self.folder, root, self.obtain)
        expected_names = [(name,) for name in self.classes]
        check_class_names(text_lines(home / "wnids.txt", home), expected_names, home / "wnids.txt", "")
        check_class_names(list(listed(home / "train", home).classes), expected_names, home / "train", self.obtain)
        train = labelled_files([images_in(home / "train" / name / "images", home)[0] for name in self.classes])
        test = self._validation(home)
        for part, files, expected in (("train", train, self.per_class[0]), ("val", test, self.per_class[1])):
            self._check(files, expected, home / part)
        return read_splits({"tiny_imagenet": (train, test)}, pixels, self.folder)

    def _validation(self, home: Path) -> LabelledFiles:
        source = home / "val" / "val_annotations.txt"
        rows = [tuple(line.split("\t")[:2]) for line in text_lines(source, home)]
        label_of = {name: label for label, name in enumerate(self.classes)}
        for number, row in enumerate(rows, 1):
            if len(row) != 2 or row[1] not in label_of:
                raise BadInput(
                    f"{source}, line {number}: expected an image, a tab and a class from wnids.txt, but found {row}"
                )
        paths = named_images([row[0] for row in rows], home / "val" / "images", home, source)
        return [(path, label_of[row[1]]) for path, row in zip(paths, rows, strict=True)]

    def _check(self, files: LabelledFiles, expected: int, where: Path) -> None:
        counts = np.bincount([label for _, label in files], minlength=len(self.classes))
        wrong = [f"{self.classes[label]} has {counts[label]}" for label in np.flatnonzero(counts != expected)]
        if wrong:
            raise BadInput(f"{where}: each class should have {expected} images, but {shortened(wrong)}. {self.obtain}")


WNIDS = """
n01443537 n01629819 n01641577 n01644900 n01698640 n01742172 n01768244 n01770393 n01774384 n01774750 n01784675 n01855672
n01882714 n01910747 n01917289 n01944390 n01945685 n01950731 n01983481 n01984695 n02002724 n02056570 n02058221 n02074367
n02085620 n02094433 n02099601 n02099712 n02106662 n02113799 n02123045 n02123394 n02124075 n02125311 n02129165 n02132136
n02165456 n02190166 n02206856 n02226429 n02231487 n02233338 n02236044 n02268443 n02279972 n02281406 n02321529 n02364673
n02395406 n02403003 n02410509 n02415577 n02423022 n02437312 n02480495 n02481823 n02486410 n02504458 n02509815 n02666196
n02669723 n02699494 n02730930 n02769748 n02788148 n02791270 n02793495 n02795169 n02802426 n02808440 n02814533 n02814860
n02815834 n02823428 n02837789 n02841315 n02843684 n02883205 n02892201 n02906734 n02909870 n02917067 n02927161 n02948072
n02950826 n02963159 n02977058 n02988304 n02999410 n03014705 n03026506 n03042490 n03085013 n03089624 n03100240 n03126707
n03160309 n03179701 n03201208 n03250847 n03255030 n03355925 n03388043 n03393912 n03400231 n03404251 n03424325 n03444034
n03447447 n03544143 n03584254 n03599486 n03617480 n03637318 n03649909 n03662601 n03670208 n03706229 n03733131 n03763968
n03770439 n03796401 n03804744 n03814639 n03837869 n03838899 n03854065 n03891332 n03902125 n03930313 n03937543 n03970156
n03976657 n03977966 n03980874 n03983396 n03992509 n04008634 n04023962 n04067472 n04070727 n04074963 n04099969 n04118538
n04133789 n04146614 n04149813 n04179913 n04251144 n04254777 n04259630 n04265275 n04275548 n04285008 n04311004 n04328186
n04356056 n04366367 n04371430 n04376876 n04398044 n04399382 n04417672 n04456115 n04465501 n04486054 n04487081 n04501370
n04507155 n04532106 n04532670 n04540053 n04560804 n04562935 n04596742 n04597913 n06596364 n07579787 n07583066 n07614500
n07615774 n07695742 n07711569 n07715103 n07720875 n07734744 n07747607 n07749582 n07753592 n07768694 n07871810 n07873807
n07875152 n07920052 n09193705 n09246464 n09256479 n09332890 n09428293 n12267677
"""
"""The classes of Tiny ImageNet: the lines of its wnids.txt, sorted."""

TINY_FOLDERS = TinyFolders(
    classes=tuple(WNIDS.split()),
    per_class=(500, 50),
    obtain="Tiny ImageNet is http://cs231n.stanford.edu/tiny-imagenet-200.zip; unpack it into tiny_imagenet "
    "below $PROTOFED_DATA.",
)

TINY_IMAGENET = Dataset(
    name="tiny_imagenet",
    classes=TINY_FOLDERS.classes,
    pixels=64,
    counts={"tiny_imagenet": (100_000, 10_000)},
    obtain=TINY_FOLDERS.obtain,
    read=TINY_FOLDERS.read,
)
