"""Sets of images that come as folders, in their publishers' layouts.

Office-Caltech10: Gong et al., Geodesic flow kernel for unsupervised domain adaptation, CVPR 2012, the ten classes that
Office-31 (Saenko et al., ECCV 2010) and Caltech-256 (Griffin et al., 2007) have in common. PACS: Li et al., Deeper,
broader and artier domain generalization, ICCV 2017. VLCS: Fang, Xu and Rockmore, Unbiased metric learning, ICCV 2013.
Tiny ImageNet: Stanford CS231n, 2015, from ImageNet (Deng et al., CVPR 2009; for non-commercial research).
VireoFood-172: Chen and Ngo, Deep-based ingredient recognition for cooking recipe retrieval, ACM MM 2016 (on request,
for research). We know of no licence for the first three.

Office-Caltech10 and PACS have no split of their own. Theirs is that of FPL's code (Huang et al., CVPR 2023): of the
images of a domain in the order of classes and names, counted from 0, those whose number ends in 8 or 9 are for testing.

Images are made square. Office-Caltech10 has 32 pixels a side by default, as FPL has; Tiny ImageNet its own 64;
VireoFood-172 has 224, as its federated papers have. For PACS and VLCS no paper says; 64 is our choice.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from protofed.datasets.examples import Dataset, Examples, Split
from protofed.datasets.images import check_inside, check_memory, composed, contents, images_in, listed, stacked
from protofed.errors import BadInput

Labelled = Sequence[tuple[Path, int]]
"""Image files, and the class of each."""

MOST_TEXT = 16 * 2**20
MOST_LETTERS = 120
"""Of a name in a message."""


@dataclass(frozen=True)
class DomainFolders:
    """`folder/domain/class/image`, with a split by number."""

    folder: str
    classes: tuple[tuple[str, ...], ...]
    """The names that the folder of each class may have."""
    counts: Mapping[str, tuple[int, ...]]
    """How many images each class has in each domain."""
    obtain: str

    def read(self, root: Path, pixels: int) -> Mapping[str, Split]:
        home = found_folder(self.folder, root, self.obtain)
        sets = {domain: numbered_split(self._domain(home / domain, domain)) for domain in self.counts}
        return splits_of(sets, pixels, self.folder)

    def _domain(self, folder: Path, domain: str) -> Labelled:
        files = files_by_class(folder, folder.parent, self.classes, self.obtain)
        wrong = [
            f"{names[0]} has {len(own)} instead of {expected}"
            for names, own, expected in zip(self.classes, files, self.counts[domain], strict=True)
            if len(own) != expected
        ]
        if wrong:
            raise BadInput(f"{folder}: wrong numbers of images: {', '.join(wrong)}. {self.obtain}")
        return labelled(files)

    @property
    def split_counts(self) -> dict[str, tuple[int, int]]:
        """Training and test examples of each domain."""
        numbers = {domain: numbered_split([(Path(), 0)] * sum(own)) for domain, own in self.counts.items()}
        return {domain: (len(train), len(test)) for domain, (train, test) in numbers.items()}


@dataclass(frozen=True)
class SplitFolders:
    """`folder/DOMAIN/part/class/image`, as VLCS has it: the parts train and crossval are for training."""

    folder: str
    num_classes: int
    counts: Mapping[str, tuple[int, int]]
    obtain: str

    def read(self, root: Path, pixels: int) -> Mapping[str, Split]:
        home = found_folder(self.folder, root, self.obtain)
        sets = {}
        for domain, (num_train, num_test) in self.counts.items():
            train = [*self._part(home, domain, "train"), *self._part(home, domain, "crossval")]
            test = self._part(home, domain, "test")
            self._check(train, num_train, f"{home / domain.upper()}, train and crossval")
            self._check(test, num_test, f"{home / domain.upper()}, test")
            sets[domain] = train, test
        return splits_of(sets, pixels, self.folder)

    def _part(self, home: Path, domain: str, part: str) -> Labelled:
        classes = [(str(label),) for label in range(self.num_classes)]
        return labelled(files_by_class(home / domain.upper() / part, home, classes, self.obtain))

    def _check(self, files: Labelled, expected: int, where: str) -> None:
        if len(files) != expected:
            own = np.bincount([label for _, label in files], minlength=self.num_classes)
            by_class = ", ".join(f"{count} of class {label}" for label, count in enumerate(own))
            raise BadInput(f"{where}: {len(files)} images ({by_class}) instead of {expected}. {self.obtain}")


@dataclass(frozen=True)
class TinyFolders:
    """Tiny ImageNet: a folder of images for each class, and the validation images, which have labels, for testing."""

    classes: tuple[str, ...]
    per_class: tuple[int, int]
    obtain: str
    folder: str = "tiny_imagenet/tiny-imagenet-200"

    def read(self, root: Path, pixels: int) -> Mapping[str, Split]:
        home = found_folder(self.folder, root, self.obtain)
        check_names(text_lines(home / "wnids.txt", home), [(name,) for name in self.classes], home / "wnids.txt", "")
        listing = listed(home / "train", home)
        check_names(list(listing.classes), [(name,) for name in self.classes], home / "train", self.obtain)
        train = labelled([images_in(home / "train" / name / "images", home)[0] for name in self.classes])
        test = self._validation(home)
        for part, files, expected in (("train", train, self.per_class[0]), ("val", test, self.per_class[1])):
            self._check(files, expected, home / part)
        return splits_of({"tiny_imagenet": (train, test)}, pixels, self.folder)

    def _validation(self, home: Path) -> Labelled:
        source = home / "val" / "val_annotations.txt"
        rows = [tuple(line.split("\t")[:2]) for line in text_lines(source, home)]
        label_of = {name: label for label, name in enumerate(self.classes)}
        for number, row in enumerate(rows, 1):
            if len(row) != 2 or row[1] not in label_of:
                raise BadInput(f"{source}, line {number}: expected an image, a tab and a class of wnids.txt, not {row}")
        names = [row[0] for row in rows]
        return list(
            zip(
                named_images(names, home / "val" / "images", home, source),
                [label_of[row[1]] for row in rows],
                strict=True,
            )
        )

    def _check(self, files: Labelled, expected: int, where: Path) -> None:
        own = np.bincount([label for _, label in files], minlength=len(self.classes))
        wrong = [f"{self.classes[label]} has {own[label]}" for label in np.flatnonzero(own != expected)]
        if wrong:
            raise BadInput(f"{where}: {expected} images of each class expected, but {shortened(wrong)}. {self.obtain}")


@dataclass(frozen=True)
class FoodFolders:
    """VireoFood-172: a folder of images for each dish, and lists of those for training and for testing."""

    num_classes: int
    counts: tuple[frozenset[int], int]
    """How many training images there may be, and how many test images there are."""
    obtain: str
    folder: str = "vireofood172"

    def read(self, root: Path, pixels: int) -> Mapping[str, Split]:
        home = found_folder(self.folder, root, self.obtain)
        images = home / "ready_chinese_food"
        classes = [(str(number),) for number in range(1, self.num_classes + 1)]
        by_class = files_by_class(images, home, classes, self.obtain)
        there = {f"/{label + 1}/{composed(path.name)}": (path, label) for path, label in labelled(by_class)}
        train = self._part(home, "TR.txt", there, self.counts[0])
        test = self._part(home, "TE.txt", there, frozenset({self.counts[1]}))
        return splits_of({"vireofood172": (train, test)}, pixels, self.folder)

    def _part(self, home: Path, name: str, there: Mapping[str, tuple[Path, int]], expected: frozenset[int]) -> Labelled:
        source = home / "SplitAndIngreLabel" / name
        names = [composed(line) for line in text_lines(source, home)]
        if len(names) not in expected:
            numbers = " or ".join(map(str, sorted(expected)))
            raise BadInput(f"{source}: {len(names)} lines instead of {numbers}. {self.obtain}")
        check_listed(names, there, source, home / "ready_chinese_food")
        return [there[line] for line in names]


def splits_of(sets: Mapping[str, tuple[Labelled, Labelled]], pixels: int, where: str) -> dict[str, Split]:
    """The training and test images of each domain, decoded one at a time."""
    check_memory(sum(len(train) + len(test) for train, test in sets.values()), pixels, where)
    return {domain: Split(_examples(train, pixels), _examples(test, pixels)) for domain, (train, test) in sets.items()}


def _examples(files: Labelled, pixels: int) -> Examples:
    return Examples(stacked([path for path, _ in files], pixels), np.array([label for _, label in files], np.int64))


def labelled(by_class: Sequence[Sequence[Path]]) -> Labelled:
    return [(path, label) for label, files in enumerate(by_class) for path in files]


def numbered_split(files: Labelled) -> tuple[Labelled, Labelled]:
    """Those whose number ends in 0 to 7, and those whose number ends in 8 or 9."""
    train = [file for number, file in enumerate(files) if number % 10 < 8]
    return train, [file for number, file in enumerate(files) if number % 10 >= 8]


def files_by_class(folder: Path, root: Path, classes: Sequence[tuple[str, ...]], obtain: str) -> list[tuple[Path, ...]]:
    """The images of each class; each class has one folder, under one of its names, and there are no others."""
    listing = listed(folder, root)
    check_names(list(listing.classes), classes, folder, obtain)
    return [next(listing.classes[name] for name in names if name in listing.classes) for names in classes]


def check_names(found: Sequence[str], classes: Sequence[tuple[str, ...]], where: Path, obtain: str) -> None:
    """Refuses names of classes that are not, one for one, those that are expected."""
    known = {name for names in classes for name in names}
    missing = [" or ".join(names) for names in classes if not set(names) & set(found)]
    unexpected = sorted(set(found) - known)
    twice = [" and ".join(names) for names in classes if sum(found.count(name) for name in names) > 1]
    faults = {"missing": missing, "unexpected": unexpected, "there twice": twice}
    said = "; ".join(f"{fault}: {shortened(names)}" for fault, names in faults.items() if names)
    if said:
        raise BadInput(f"{where}: other classes than the {len(classes)} expected ({said}). {obtain}".rstrip())


def found_folder(name: str, root: Path, obtain: str) -> Path:
    """The folder of a set."""
    folder = root / name
    if not folder.is_dir():
        raise BadInput(f"{folder}: there is no such folder. {obtain}")
    check_inside(folder, root)
    return folder


def text_lines(path: Path, root: Path) -> list[str]:
    """The lines of a text file that are not empty, without the white space around them."""
    check_inside(path, root)
    try:
        text = contents(path, MOST_TEXT).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: not UTF-8 text: get the file again") from error
    return [line.strip() for line in text.split("\n") if line.strip()]


def named_images(names: Sequence[str], folder: Path, root: Path, source: Path) -> list[Path]:
    """The images of a folder in the order in which a list names them, each once."""
    there = {composed(path.name): path for path in images_in(folder, root)[0]}
    wanted = [composed(name) for name in names]
    check_listed(wanted, there, source, folder)
    return [there[name] for name in wanted]


def check_listed(names: Sequence[str], there: Mapping[str, object], source: Path, folder: Path) -> None:
    """Refuses a list that names an image twice, or one that is not in the folder."""
    missing = [name for name in names if name not in there]
    if missing:
        raise BadInput(f"{source} names images that are not in {folder}: {shortened(missing)}")
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise BadInput(f"{source} names images twice: {shortened(twice)}")


def shortened(words: Sequence[str], most: int = 8) -> str:
    """A list for a message, its end left out where it is long, and so the end of each word."""
    rest = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(word if len(word) <= MOST_LETTERS else f"{word[:MOST_LETTERS]}…" for word in words[:most]) + rest


OFFICE_FOLDERS = DomainFolders(
    folder="office_caltech10",
    classes=(
        ("back_pack", "backpack"),
        ("bike",),
        ("calculator",),
        ("headphones",),
        ("keyboard",),
        ("laptop_computer", "laptop"),
        ("monitor",),
        ("mouse",),
        ("mug",),
        ("projector",),
    ),
    counts={
        "caltech": (151, 110, 100, 138, 85, 128, 133, 94, 87, 97),
        "amazon": (92, 82, 94, 99, 100, 100, 99, 100, 94, 98),
        "webcam": (29, 21, 31, 27, 27, 30, 43, 30, 27, 30),
        "dslr": (12, 21, 12, 13, 10, 24, 22, 12, 8, 23),
    },
    obtain="Office-Caltech10 is four folders, caltech, amazon, webcam and dslr, of ten class folders each; put them "
    "into office_caltech10 below $PROTOFED_DATA.",
)

PACS_FOLDERS = DomainFolders(
    folder="pacs",
    classes=(("dog",), ("elephant",), ("giraffe",), ("guitar",), ("horse",), ("house",), ("person",)),
    counts={
        "photo": (189, 202, 182, 186, 199, 280, 432),
        "art_painting": (379, 255, 285, 184, 201, 295, 449),
        "cartoon": (389, 457, 346, 135, 324, 288, 405),
        "sketch": (772, 740, 753, 608, 816, 80, 160),
    },
    obtain="PACS is published as an archive of the folder kfold with photo, art_painting, cartoon and sketch in it; "
    "put these four into pacs below $PROTOFED_DATA.",
)

VLCS_FOLDERS = SplitFolders(
    folder="vlcs",
    num_classes=5,
    counts={"caltech": (991, 424), "labelme": (1859, 797), "pascal": (2363, 1013), "sun": (2297, 985)},
    obtain="VLCS is published as four folders, CALTECH, LABELME, PASCAL and SUN, each with train, crossval, test and "
    "full; put them into vlcs below $PROTOFED_DATA.",
)

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
"""The classes of Tiny ImageNet: its wnids.txt, sorted."""

TINY_FOLDERS = TinyFolders(
    classes=tuple(WNIDS.split()),
    per_class=(500, 50),
    obtain="Tiny ImageNet is http://cs231n.stanford.edu/tiny-imagenet-200.zip; unpack it into tiny_imagenet "
    "below $PROTOFED_DATA.",
)

FOOD_FOLDERS = FoodFolders(
    num_classes=172,
    # pFedCSPC prints 68 175, others print 66 071 for the same list; we have not seen the list itself.
    counts=(frozenset({68_175, 66_071}), 33_154),
    obtain="VireoFood-172 is given by its authors on request (VireoFood172.zip and SplitAndIngreLabel.zip); put the "
    "folders ready_chinese_food and SplitAndIngreLabel into vireofood172 below $PROTOFED_DATA.",
)

OFFICE_CALTECH10 = Dataset(
    name="office_caltech10",
    classes=tuple(names[0] for names in OFFICE_FOLDERS.classes),
    pixels=32,
    counts=OFFICE_FOLDERS.split_counts,
    obtain=OFFICE_FOLDERS.obtain,
    read=OFFICE_FOLDERS.read,
)

PACS = Dataset(
    name="pacs",
    classes=tuple(names[0] for names in PACS_FOLDERS.classes),
    pixels=64,
    counts=PACS_FOLDERS.split_counts,
    obtain=PACS_FOLDERS.obtain,
    read=PACS_FOLDERS.read,
)

VLCS = Dataset(
    name="vlcs",
    classes=("bird", "car", "chair", "dog", "person"),
    pixels=64,
    counts=VLCS_FOLDERS.counts,
    obtain=VLCS_FOLDERS.obtain,
    read=VLCS_FOLDERS.read,
)

TINY_IMAGENET = Dataset(
    name="tiny_imagenet",
    classes=TINY_FOLDERS.classes,
    pixels=64,
    counts={"tiny_imagenet": (100_000, 10_000)},
    obtain=TINY_FOLDERS.obtain,
    read=TINY_FOLDERS.read,
)

VIREOFOOD172 = Dataset(
    name="vireofood172",
    classes=tuple(str(number) for number in range(1, 173)),
    pixels=224,
    counts={"vireofood172": (68_175, 33_154)},
    obtain=FOOD_FOLDERS.obtain,
    read=FOOD_FOLDERS.read,
)
