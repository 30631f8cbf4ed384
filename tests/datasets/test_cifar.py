"""CIFAR-10 and CIFAR-100: small files in the publisher's form, and the real ones where they are."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protofed.datasets.cifar import CIFAR10, CIFAR10_CLASSES, CIFAR100, CIFAR100_CLASSES, read_cifar10, read_cifar100
from protofed.datasets.examples import Dataset
from protofed.datasets.files import Publication, folders
from protofed.errors import BadInput

DATA = os.environ.get("PROTOFED_DATA")
COUNTS = 10, 3  # two in each training batch of CIFAR-10

TEN = partial(read_cifar10, Publication("cifar10", "Ask Toronto."), COUNTS)
HUNDRED = partial(read_cifar100, Publication("cifar100", "Ask Toronto."), COUNTS)


def records(*labels: tuple[int, ...]) -> bytes:
    """Images whose pixels all have the value of their last label."""
    return b"".join(bytes(label) + bytes([label[-1]]) * 3072 for label in labels)


@pytest.fixture
def ten(tmp_path: Path) -> Path:
    folder = tmp_path / "cifar10"
    folder.mkdir()
    for k in range(5):
        (folder / f"data_batch_{k + 1}.bin").write_bytes(records((2 * k,), (2 * k + 1,)))
    (folder / "test_batch.bin").write_bytes(records((9,), (0,), (4,)))
    (folder / "batches.meta.txt").write_text("\n".join(CIFAR10_CLASSES) + "\n\n")
    return tmp_path


@pytest.fixture
def hundred(tmp_path: Path) -> Path:
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    (folder / "train.bin").write_bytes(records(*((k, 99 - k) for k in range(10))))
    (folder / "test.bin").write_bytes(records((19, 5), (0, 0), (3, 99)))
    (folder / "fine_label_names.txt").write_text("\n".join(CIFAR100_CLASSES) + "\n")
    return tmp_path


def values(x: Any) -> list[int]:
    assert (x == x[:, :1, :1, :1]).all()
    return [int(value) for value in x[:, 0, 0, 0]]


def test_cifar10_is_its_batches_in_order(ten: Path) -> None:
    split = TEN(ten, 32)["cifar10"]
    assert split.train.x.shape == (10, 3, 32, 32)
    assert split.train.y.tolist() == values(split.train.x) == list(range(10))
    assert split.test.y.tolist() == values(split.test.x) == [9, 0, 4]


def test_cifar100_has_its_fine_labels(hundred: Path) -> None:
    split = HUNDRED(hundred, 32)["cifar100"]
    assert split.train.y.tolist() == values(split.train.x) == list(range(99, 89, -1))
    assert split.test.y.tolist() == [5, 0, 99]


def test_another_side_is_made_by_resizing(ten: Path) -> None:
    assert TEN(ten, 16)["cifar10"].train.x.shape == (10, 3, 16, 16)


@pytest.mark.parametrize(
    ("name", "data", "match"),
    [
        ("data_batch_3.bin", records((1,)), "1 examples, not 2"),
        ("data_batch_3.bin", records((1,), (1,))[:-1], "not a multiple of 3073"),
        ("test_batch.bin", records((1,), (1,), (1,), (1,)), "more than the 9219 bytes"),
        ("test_batch.bin", records((1,), (1,), (10,)), "must be below"),
        ("batches.meta.txt", b"cat\ndog\n", "should name airplane, .* but names cat, dog"),
    ],
)
def test_a_wrong_file_is_named_with_what_was_expected(ten: Path, name: str, data: bytes, match: str) -> None:
    (ten / "cifar10" / name).write_bytes(data)
    with pytest.raises(BadInput, match=rf"cifar10/{name}: .*{match}.*Ask Toronto\."):
        TEN(ten, 32)


def test_other_fine_names_are_refused(hundred: Path) -> None:
    (hundred / "cifar-100-binary/fine_label_names.txt").write_text("apple\n")
    with pytest.raises(BadInput, match="should name apple, aquarium_fish"):
        HUNDRED(hundred, 32)


def test_the_lists_of_names_may_be_missing(ten: Path) -> None:
    (ten / "cifar10/batches.meta.txt").unlink()
    assert len(TEN(ten, 32)["cifar10"].train) == 10


def test_a_missing_batch_is_named(ten: Path) -> None:
    (ten / "cifar10/data_batch_4.bin").unlink()
    with pytest.raises(BadInput, match=r"there is no data_batch_4\.bin\. Ask Toronto\."):
        TEN(ten, 32)


@pytest.mark.parametrize(("dataset", "classes"), [(CIFAR10, 10), (CIFAR100, 100)], ids=["ten", "hundred"])
def test_classes_are_named_once_each_in_order_of_the_alphabet(dataset: Dataset, classes: int) -> None:
    assert len(dataset.classes) == classes
    assert list(dataset.classes) == sorted(set(dataset.classes))


@pytest.mark.parametrize("dataset", [CIFAR10, CIFAR100], ids=lambda d: d.name)
def test_the_real_files_have_the_published_numbers_of_each_class(dataset: Dataset) -> None:
    if not DATA or not any(folder.is_dir() for folder in folders(Path(DATA), dataset.name)):
        pytest.skip(f"needs the files of {dataset.name} below $PROTOFED_DATA")
    split = dataset.read(Path(DATA), dataset.pixels)[dataset.name]
    classes = len(dataset.classes)
    assert split.train.x.shape == (50_000, 3, 32, 32)
    assert np.bincount(split.train.y).tolist() == [50_000 // classes] * classes
    assert np.bincount(split.test.y).tolist() == [10_000 // classes] * classes
