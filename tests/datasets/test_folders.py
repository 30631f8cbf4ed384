"""Sets that come as folders, in small copies of their publishers' layouts, and Office-Caltech10 as it is."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from protofed.datasets import image_folders
from protofed.datasets.examples import Examples
from protofed.datasets.image_folders import DomainFolders
from protofed.datasets.office_caltech10 import OFFICE_CALTECH10, OFFICE_FOLDERS
from protofed.datasets.pacs import PACS, PACS_FOLDERS
from protofed.datasets.tiny_imagenet import TINY_FOLDERS, TINY_IMAGENET, TinyFolders
from protofed.datasets.vireofood172 import FOOD_FOLDERS, VIREOFOOD172, FoodFolders
from protofed.datasets.vlcs import VLCS, VLCS_FOLDERS, SplitFolders
from protofed.errors import BadInput

PAPER_NAMES = [names[0] for names in OFFICE_FOLDERS.classes]
OTHER_NAMES = [names[-1] for names in OFFICE_FOLDERS.classes]


def paint(path: Path, shade: int, kind: str | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (4, 4), shade).save(path, kind)


def shades(examples: Examples) -> list[int]:
    """The shade of each image, which is one all over."""
    assert examples.x.dtype == np.uint8
    assert examples.y.dtype == np.int64
    assert (examples.x == examples.x[:, :1, :1, :1]).all()
    found: list[int] = examples.x[:, 0, 0, 0].tolist()
    return found


def small_office(root: Path, names: list[str], numbers: tuple[int, ...] = (2,) * 10) -> DomainFolders:
    """Images whose shade is their number within the domain."""
    for start, domain in ((0, "amazon"), (100, "webcam")):
        shade = start
        for name, count in zip(names, numbers, strict=True):
            for k in range(count):
                paint(root / "office_caltech10" / domain / name / f"frame_{k:04}.png", shade)
                shade += 1
    return replace(OFFICE_FOLDERS, counts={"amazon": numbers, "webcam": numbers})


@pytest.mark.parametrize("names", [PAPER_NAMES, OTHER_NAMES])
def test_numbers_that_end_in_8_or_9_are_for_testing(tmp_path: Path, names: list[str]) -> None:
    found = small_office(tmp_path, names).read(tmp_path, 4)
    assert list(found) == ["amazon", "webcam"]
    # 20 images, two of each class: numbers 8, 9, 18 and 19 are tested, all of class 4 and all of class 9.
    assert shades(found["amazon"].test) == [8, 9, 18, 19]
    assert found["amazon"].test.y.tolist() == [4, 4, 9, 9]
    assert shades(found["amazon"].train) == [*range(8), *range(10, 18)]
    assert found["amazon"].train.y.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 5, 5, 6, 6, 7, 7, 8, 8]
    assert shades(found["webcam"].test) == [108, 109, 118, 119]


def test_images_have_the_side_asked_for(tmp_path: Path) -> None:
    found = small_office(tmp_path, PAPER_NAMES).read(tmp_path, 7)["amazon"]
    assert found.train.x.shape == (16, 3, 7, 7)
    assert found.test.x.shape == (4, 3, 7, 7)


def test_missing_and_unexpected_classes_are_both_listed(tmp_path: Path) -> None:
    office = small_office(tmp_path, PAPER_NAMES)
    home = tmp_path / "office_caltech10/webcam"
    (home / "mug").rename(home / "cup")
    (home / "back_pack").rename(home / "bag")
    with pytest.raises(BadInput, match=r"webcam: .*missing: back_pack or backpack, mug; unexpected: bag, cup"):
        office.read(tmp_path, 4)


def test_a_class_under_both_of_its_names_is_refused(tmp_path: Path) -> None:
    office = small_office(tmp_path, PAPER_NAMES)
    (tmp_path / "office_caltech10/amazon/laptop").mkdir()
    with pytest.raises(BadInput, match=r"amazon: .*duplicate: laptop_computer and laptop"):
        office.read(tmp_path, 4)


def test_wrong_numbers_name_the_domain_and_the_class(tmp_path: Path) -> None:
    office = small_office(tmp_path, PAPER_NAMES)
    (tmp_path / "office_caltech10/webcam/mug/frame_0001.png").unlink()
    paint(tmp_path / "office_caltech10/webcam/bike/extra.png", 0)
    with pytest.raises(BadInput, match=r"webcam: .*bike has 3 instead of 2, mug has 1 instead of 2.*office_caltech10"):
        office.read(tmp_path, 4)


def test_a_missing_set_and_a_missing_domain_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"pacs: there is no such folder\. PACS is published .* into pacs below"):
        PACS.read(tmp_path, 8)
    small_office(tmp_path, PAPER_NAMES)
    with pytest.raises(BadInput, match=r"office_caltech10/caltech: does not exist"):
        replace(OFFICE_FOLDERS, counts={"caltech": (2,) * 10}).read(tmp_path, 8)


@pytest.mark.parametrize("link", ["office_caltech10", "office_caltech10/amazon", "office_caltech10/amazon/mug"])
def test_folders_that_are_links_out_are_refused(tmp_path: Path, link: str) -> None:
    office = small_office(tmp_path / "root", PAPER_NAMES)
    path = tmp_path / "root" / link
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadInput, match=rf"{link}: a link out of"):
        office.read(tmp_path / "root", 4)


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    office = small_office(tmp_path, PAPER_NAMES)
    (tmp_path / "office_caltech10/webcam/mug/frame_0001.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(BadInput, match=r"webcam/mug/frame_0001\.png"):
        office.read(tmp_path, 4)


def test_nothing_is_decoded_when_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    office = small_office(tmp_path, PAPER_NAMES)
    (tmp_path / "office_caltech10/amazon/back_pack/frame_0000.png").write_bytes(b"damaged")
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1, "SC_PAGE_SIZE": 2 * 40 * 3 * 16 - 1}.__getitem__)
    with pytest.raises(BadInput, match="40 images of 4 × 4 need"):
        office.read(tmp_path, 4)


def test_the_published_counts_are_those_of_the_papers() -> None:
    # The sizes of the domains, and of their test sets, as FPL and FedSeProto have them.
    office = {"caltech": 1123, "amazon": 958, "webcam": 295, "dslr": 157}
    assert {domain: sum(own) for domain, own in OFFICE_FOLDERS.counts.items()} == office
    expected: Mapping[str, tuple[int, int]]
    expected = {"caltech": (899, 224), "amazon": (768, 190), "webcam": (237, 58), "dslr": (127, 30)}
    assert OFFICE_CALTECH10.counts == expected
    pacs = {"photo": (1336, 334), "art_painting": (1640, 408), "cartoon": (1876, 468), "sketch": (3144, 785)}
    assert PACS.counts == pacs
    assert VLCS.counts == {"caltech": (991, 424), "labelme": (1859, 797), "pascal": (2363, 1013), "sun": (2297, 985)}
    assert TINY_IMAGENET.counts == {"tiny_imagenet": (100_000, 10_000)}
    assert [dataset.pixels for dataset in (OFFICE_CALTECH10, PACS, VLCS, TINY_IMAGENET, VIREOFOOD172)] == [
        *(32, 64, 64, 64, 224)
    ]
    sizes = [len(dataset.classes) for dataset in (OFFICE_CALTECH10, PACS, VLCS, TINY_IMAGENET, VIREOFOOD172)]
    assert sizes == [10, 7, 5, 200, 172]
    assert all(len(own) == 7 for own in PACS_FOLDERS.counts.values())
    assert list(TINY_FOLDERS.classes) == sorted(set(TINY_FOLDERS.classes))


@pytest.fixture
def vlcs(tmp_path: Path) -> SplitFolders:
    """One domain: a training image of each class, a crossval one of class 3, and test images of classes 0 and 4."""
    home = tmp_path / "vlcs/SUN"
    for part in ("train", "crossval", "test", "full"):
        for label in range(5):
            (home / part / str(label)).mkdir(parents=True)
    for label in range(5):
        paint(home / f"train/{label}/imgs_1.jpg", 10 * label)
        paint(home / f"full/{label}/imgs_1.jpg", 10 * label)
    paint(home / "crossval/3/imgs_1.jpg", 100)
    paint(home / "test/0/imgs_1.jpg", 200)
    paint(home / "test/4/imgs_1.jpg", 210)
    return replace(VLCS_FOLDERS, counts={"sun": (6, 2)})


def test_of_vlcs_train_and_crossval_are_for_training(tmp_path: Path, vlcs: SplitFolders) -> None:
    found = vlcs.read(tmp_path, 4)["sun"]
    assert shades(found.train) == [0, 10, 20, 30, 40, 100]
    assert found.train.y.tolist() == [0, 1, 2, 3, 4, 3]
    assert shades(found.test) == [200, 210]
    assert found.test.y.tolist() == [0, 4]


def test_wrong_numbers_in_vlcs_say_which_part_and_what_is_there(tmp_path: Path, vlcs: SplitFolders) -> None:
    (tmp_path / "vlcs/SUN/test/4/imgs_1.jpg").unlink()
    with pytest.raises(BadInput, match=r"SUN, test: 1 images \(1 of class 0, 0 of class 1,.* instead of 2"):
        vlcs.read(tmp_path, 4)
    (tmp_path / "vlcs/SUN/crossval/3/imgs_1.jpg").unlink()
    with pytest.raises(BadInput, match=r"SUN, train and crossval: 5 images .* instead of 6"):
        vlcs.read(tmp_path, 4)


@pytest.fixture
def tiny(tmp_path: Path) -> TinyFolders:
    home = tmp_path / "tiny_imagenet/tiny-imagenet-200"
    for start, name in ((10, "n02"), (20, "n01")):
        for k in range(2):
            paint(home / "train" / name / "images" / f"{name}_{k}.JPEG", start + k, "PNG")
        (home / "train" / name / f"{name}_boxes.txt").write_text("n\t0\t0\t1\t1\n")
    (home / "wnids.txt").write_text("n02\nn01\n")
    (home / "words.txt").write_text("n02\ttwo\nn01\tone\n")
    for k, shade in ((0, 100), (1, 200)):
        paint(home / "val/images" / f"val_{k}.JPEG", shade, "PNG")
    (home / "val/val_annotations.txt").write_text("val_1.JPEG\tn01\t0\t32\t44\t62\nval_0.JPEG\tn02\t0\t0\t1\t1\n")
    return replace(TINY_FOLDERS, classes=("n01", "n02"), per_class=(2, 1))


def test_tiny_imagenet_is_tested_on_its_validation_images(tmp_path: Path, tiny: TinyFolders) -> None:
    found = tiny.read(tmp_path, 4)["tiny_imagenet"]
    assert shades(found.train) == [20, 21, 10, 11]
    assert found.train.y.tolist() == [0, 0, 1, 1]
    assert shades(found.test) == [200, 100]  # in the order of the list
    assert found.test.y.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("wnids.txt", "n02\n", r"wnids\.txt: .*missing: n01"),
        ("wnids.txt", "n02\nn01\nn03\n", r"wnids\.txt: .*unexpected: n03"),
        ("wnids.txt", "n02\nn01\nn02\n", r"wnids\.txt: .*duplicate: n02"),
        ("val/val_annotations.txt", "val_0.JPEG n01\n", r"val_annotations\.txt, line 1: expected"),
        ("val/val_annotations.txt", "val_0.JPEG\tn01\nval_1.JPEG\tn03\n", r"val_annotations\.txt, line 2: .*n03"),
        ("val/val_annotations.txt", "val_0.JPEG\tn01\nval_2.JPEG\tn02\n", r"not in .*val/images: val_2\.JPEG"),
        ("val/val_annotations.txt", "val_0.JPEG\tn01\n../images/val_1.JPEG\tn02\n", r"not in .*: \.\./images/val_1"),
        ("val/val_annotations.txt", "val_0.JPEG\tn01\nval_0.JPEG\tn02\n", r"twice: val_0\.JPEG"),
        ("val/val_annotations.txt", "val_0.JPEG\tn01\nval_1.JPEG\tn01\n", r"val: .*1 images.* n01 has 2, n02 has 0"),
    ],
)
def test_wrong_lists_of_tiny_imagenet_are_refused(
    tmp_path: Path, tiny: TinyFolders, name: str, text: str, message: str
) -> None:
    (tmp_path / "tiny_imagenet/tiny-imagenet-200" / name).write_text(text)
    with pytest.raises(BadInput, match=message):
        tiny.read(tmp_path, 4)


def test_classes_of_tiny_imagenet_that_lack_images_are_named(tmp_path: Path, tiny: TinyFolders) -> None:
    (tmp_path / "tiny_imagenet/tiny-imagenet-200/train/n02/images/n02_1.JPEG").unlink()
    with pytest.raises(BadInput, match=r"train: .*2 images, but n02 has 1"):
        tiny.read(tmp_path, 4)


def test_a_list_that_is_a_link_out_or_not_text_is_refused(tmp_path: Path, tiny: TinyFolders) -> None:
    path = tmp_path / "tiny_imagenet/tiny-imagenet-200/wnids.txt"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(BadInput, match=r"wnids\.txt: not UTF-8"):
        tiny.read(tmp_path, 4)
    path.unlink()
    (tmp_path / "elsewhere.txt").write_text("n01\nn02\n")
    path.symlink_to(tmp_path / "elsewhere.txt")
    with pytest.raises(BadInput, match=r"wnids\.txt: a link out of"):
        tiny.read(tmp_path, 4)


def test_a_list_of_too_many_bytes_is_refused(
    tmp_path: Path, tiny: TinyFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_folders, "MAX_TEXT_BYTES", 8)
    (tmp_path / "tiny_imagenet/tiny-imagenet-200/wnids.txt").write_text("n02\nn01\n\n")
    with pytest.raises(BadInput, match=r"wnids\.txt: larger than"):
        tiny.read(tmp_path, 4)


@pytest.fixture
def food(tmp_path: Path) -> FoodFolders:
    """Eleven dishes, of which 10 and 11 sort before 2 as text; one image of each for training, three for testing."""
    home = tmp_path / "vireofood172"
    for number in range(1, 12):
        for k in range(3):
            paint(home / f"ready_chinese_food/{number}/{number}_{k}.jpg", 20 * number + k)
    (home / "SplitAndIngreLabel").mkdir()
    lists = {
        "TR.txt": [f"/{number}/{number}_0.jpg" for number in range(11, 0, -1)],
        "VAL.txt": ["/1/1_2.jpg"],
        "TE.txt": ["/2/2_1.jpg", "/11/11_1.jpg", "/1/1_1.jpg"],
    }
    for name, lines in lists.items():
        (home / "SplitAndIngreLabel" / name).write_text("\r\n".join(lines) + "\r\n")
    return replace(FOOD_FOLDERS, num_classes=11, counts=(frozenset({11, 12}), 3))


def test_vireofood_follows_its_lists_and_counts_its_dishes_as_numbers(tmp_path: Path, food: FoodFolders) -> None:
    found = food.read(tmp_path, 4)["vireofood172"]
    assert found.train.y.tolist() == list(range(10, -1, -1))
    assert shades(found.train) == [20 * number for number in range(11, 0, -1)]
    assert found.test.y.tolist() == [1, 10, 0]
    assert shades(found.test) == [41, 221, 21]


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("TE.txt", ["/2/2_1.jpg"], r"TE\.txt: 1 lines instead of 3"),
        ("TR.txt", ["/2/2_1.jpg"], r"TR\.txt: 1 lines instead of 11 or 12"),
        ("TE.txt", ["/2/2_1.jpg", "/2/2_9.jpg", "/3/3_1.jpg"], r"TE\.txt names .* not in .*: /2/2_9\.jpg"),
        ("TE.txt", ["/2/2_1.jpg", "/2/../3/3_2.jpg", "/3/3_1.jpg"], r"not in .*: /2/\.\./3/3_2\.jpg"),
        ("TE.txt", ["/2/2_1.jpg", "/2/2_1.jpg", "/3/3_1.jpg"], r"twice: /2/2_1\.jpg"),
    ],
)
def test_wrong_lists_of_vireofood_are_refused(
    tmp_path: Path, food: FoodFolders, name: str, lines: list[str], message: str
) -> None:
    (tmp_path / "vireofood172/SplitAndIngreLabel" / name).write_text("\n".join(lines))
    with pytest.raises(BadInput, match=message):
        food.read(tmp_path, 4)


@pytest.mark.skipif("PROTOFED_DATA" not in os.environ, reason="PROTOFED_DATA names no folder of data")
def test_office_caltech10_as_published_has_the_counts_of_the_papers() -> None:
    root = Path(os.environ["PROTOFED_DATA"])
    if not (root / "office_caltech10").is_dir():
        pytest.skip("Office-Caltech10 is not in PROTOFED_DATA")
    found = OFFICE_CALTECH10.read(root, OFFICE_CALTECH10.pixels)
    counts = {domain: (len(split.train), len(split.test)) for domain, split in found.items()}
    assert counts == {"caltech": (899, 224), "amazon": (768, 190), "webcam": (237, 58), "dslr": (127, 30)}
    for domain, split in found.items():
        assert split.train.x.shape[1:] == (3, 32, 32)
        both = np.bincount(split.train.y, minlength=10) + np.bincount(split.test.y, minlength=10)
        assert both.tolist() == list(OFFICE_FOLDERS.counts[domain])
        # Photographs, most of them of things on a bright ground: neither black nor blank.
        assert 80 < split.train.x.mean() < 230
        assert split.test.x.std() > 30
