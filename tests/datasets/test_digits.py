"""MNIST, Fashion-MNIST, USPS and SVHN: small files in their publishers' form, and the real ones where they are."""

import bz2
import gzip
import logging
import os
import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.io import savemat

from protofed.datasets.digits import FASHION_MNIST, MNIST, SVHN, USPS, read_idx, read_svhn, read_usps
from protofed.datasets.examples import Dataset, Split
from protofed.datasets.files import Publication
from protofed.errors import BadInput

DATA = os.environ.get("PROTOFED_DATA")
COUNTS = 6, 4

IDX = partial(read_idx, Publication("mnist", "Ask LeCun."), COUNTS)
TEXT = partial(read_usps, Publication("usps", "Ask LIBSVM."), COUNTS)
MATRICES = partial(read_svhn, Publication("svhn", "Ask Stanford."), COUNTS)


def idx(array: Any) -> bytes:
    array = np.asarray(array, np.uint8)
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + bytes(array.tobytes())


def images(count: int, side: int = 28) -> Any:
    return np.random.default_rng(count).integers(0, 256, (count, side, side), np.uint8)


def put_mnist(root: Path, packed: bool) -> None:
    (root / "mnist").mkdir()
    for prefix, count in zip(("train", "t10k"), COUNTS, strict=True):
        for name, array in (("images-idx3", images(count)), ("labels-idx1", np.arange(count))):
            path = root / f"mnist/{prefix}-{name}-ubyte{'.gz' * packed}"
            path.write_bytes(gzip.compress(idx(array)) if packed else idx(array))


def put_usps(root: Path, packed: bool) -> None:
    (root / "usps").mkdir()
    for name, count in zip(("usps", "usps.t"), COUNTS, strict=True):
        pairs = " ".join(f"{k}:{value}" for k, value in enumerate([-1, 1, 0.5, -0.631] + [-1] * 252, 1))
        text = "".join(f"{(k + 9) % 10 + 1} {pairs} \n" for k in range(count)).encode()
        (root / f"usps/{name}{'.bz2' * packed}").write_bytes(bz2.compress(text) if packed else text)


def put_svhn(root: Path, train: int = COUNTS[0], test: int = COUNTS[1]) -> None:
    (root / "svhn").mkdir(exist_ok=True)
    for name, count in (("train", train), ("test", test)):
        labels = ((np.arange(count) + 9) % 10 + 1).astype(np.uint8)[:, None]
        x = np.random.default_rng(count).integers(0, 256, (32, 32, 3, count), np.uint8)
        savemat(root / f"svhn/{name}_32x32.mat", {"X": x, "y": labels}, do_compression=True)


@pytest.mark.parametrize("packed", [False, True])
def test_mnist_comes_as_it_was_written(tmp_path: Path, packed: bool) -> None:
    put_mnist(tmp_path, packed)
    split = IDX(tmp_path, 28)["mnist"]
    assert np.array_equal(split.train.x, images(6)[:, None])
    assert np.array_equal(split.test.x, images(4)[:, None])
    assert split.train.y.tolist() == [0, 1, 2, 3, 4, 5]
    assert split.test.y.dtype == np.int64


def test_another_side_is_made_by_resizing(tmp_path: Path) -> None:
    put_mnist(tmp_path, True)
    put_usps(tmp_path, True)
    put_svhn(tmp_path)
    assert IDX(tmp_path, 32)["mnist"].train.x.shape == (6, 1, 32, 32)
    assert TEXT(tmp_path, 32)["usps"].test.x.shape == (4, 1, 32, 32)
    assert MATRICES(tmp_path, 16)["svhn"].test.x.shape == (4, 3, 16, 16)


@pytest.mark.parametrize(
    ("name", "data", "match"),
    [
        ("train-images-idx3-ubyte", idx(images(6))[:-1], "but it has"),
        ("train-images-idx3-ubyte", idx(images(5)), "5 examples, not 6"),
        ("train-images-idx3-ubyte", idx(images(7)), "more than the 4720 bytes"),
        ("t10k-images-idx3-ubyte", idx(images(4).astype(bool).reshape(-1)), "not an IDX file"),
        ("t10k-labels-idx1-ubyte", idx([0, 1, 2]), "3 examples, not 4"),
        ("t10k-labels-idx1-ubyte", idx([0, 1, 2, 10]), "0 to 10, not from 0 to 9"),
        ("t10k-labels-idx1-ubyte", b"<html>", "not an IDX file"),
    ],
)
def test_a_wrong_file_of_mnist_is_named_with_what_was_expected(
    tmp_path: Path, name: str, data: bytes, match: str
) -> None:
    put_mnist(tmp_path, False)
    (tmp_path / "mnist" / name).write_bytes(data)
    with pytest.raises(BadInput, match=rf"mnist/{name}: .*{match}.*\. Get it again: Ask LeCun\."):
        IDX(tmp_path, 28)


@pytest.mark.parametrize("packed", [False, True])
def test_usps_turns_values_into_grey_and_ten_labels_into_digits(tmp_path: Path, packed: bool) -> None:
    put_usps(tmp_path, packed)
    split = TEXT(tmp_path, 16)["usps"]
    assert split.train.x.shape == (6, 1, 16, 16)
    # (0.5 + 1) / 2 × 255 = 191.25; (−0.631 + 1) / 2 × 255 = 47.05.
    assert split.train.x[3, 0, 0, :5].tolist() == [0, 255, 191, 47, 0]
    assert split.train.y.tolist() == [9, 0, 1, 2, 3, 4]  # 10 stands for 9, 1 for 0
    assert split.test.y.tolist() == [9, 0, 1, 2]


def test_a_wrong_file_of_usps_is_named_with_the_line(tmp_path: Path) -> None:
    put_usps(tmp_path, False)
    path = tmp_path / "usps/usps.t"
    path.write_bytes(path.read_bytes().replace(b"\n1 ", b"\n0 "))
    with pytest.raises(BadInput, match=r"usps/usps\.t: line 2: the label is 0, not 1 to 10.*Ask LIBSVM\."):
        TEXT(tmp_path, 16)


def test_svhn_takes_ten_for_zero(tmp_path: Path) -> None:
    put_svhn(tmp_path)
    split = MATRICES(tmp_path, 32)["svhn"]
    assert split.train.x.shape == (6, 3, 32, 32)
    assert split.train.y.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_part_of_svhns_training_images_will_do_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put_svhn(tmp_path)
    with caplog.at_level(logging.WARNING):
        MATRICES(tmp_path, 32)
        assert not caplog.messages
        put_svhn(tmp_path, train=3)
        assert len(MATRICES(tmp_path, 32)["svhn"].train) == 3
    assert caplog.messages == ["svhn, training: only 3 of the 6 published examples are here"]


@pytest.mark.parametrize(
    ("train", "test", "match"),
    [
        (7, 4, "train_32x32.mat: it contains 7 examples, not 6"),
        (6, 3, "test_32x32.mat: it contains 3 examples, not 4"),
        (6, 9, "test_32x32.mat: .*more .*bytes"),
    ],
)
def test_svhn_with_another_number_of_images_is_refused(tmp_path: Path, train: int, test: int, match: str) -> None:
    put_svhn(tmp_path, train, test)
    with pytest.raises(BadInput, match=f"{match}.*Ask Stanford"):
        MATRICES(tmp_path, 32)


@pytest.mark.parametrize("label", [0, 11])
def test_svhn_with_another_label_is_refused(tmp_path: Path, label: int) -> None:
    put_svhn(tmp_path)
    y = np.array([[label], [1], [2], [3]], np.uint8)
    savemat(tmp_path / "svhn/test_32x32.mat", {"X": np.zeros((32, 32, 3, 4), np.uint8), "y": y})
    with pytest.raises(BadInput, match="not from 1 to 10"):
        MATRICES(tmp_path, 32)


@pytest.mark.parametrize("dataset", [MNIST, FASHION_MNIST, USPS, SVHN], ids=lambda d: d.name)
def test_a_set_that_is_not_there_says_where_it_comes_from_and_goes(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as raised:
        dataset.read(tmp_path, dataset.pixels)
    assert dataset.obtain in str(raised.value)
    assert f"$PROTOFED_DATA/{dataset.name}/" in dataset.obtain
    assert len(set(dataset.classes)) == 10


# The published numbers of each class: of training and of test examples; None for a part that may be incomplete.
HISTOGRAMS = {
    "mnist": (
        [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
        [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
    ),
    "fashion_mnist": ([6000] * 10, [1000] * 10),
    "usps": ([1194, 1005, 731, 658, 652, 556, 664, 645, 542, 644], [359, 264, 198, 166, 200, 160, 170, 147, 166, 177]),
    "svhn": (None, [1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595]),
}
SVHN_TRAIN = [4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659]


@pytest.mark.parametrize("dataset", [MNIST, FASHION_MNIST, USPS, SVHN], ids=lambda d: d.name)
def test_the_real_files_have_the_published_numbers_of_each_class(dataset: Dataset) -> None:
    if not DATA or not Path(DATA, dataset.name).is_dir():
        pytest.skip(f"needs the files of {dataset.name} below $PROTOFED_DATA")
    split = dataset.read(Path(DATA), dataset.pixels)[dataset.name]
    train, test = HISTOGRAMS[dataset.name]
    check_shapes(dataset, split)
    assert np.bincount(split.test.y).tolist() == test
    if train is None and len(split.train) == sum(SVHN_TRAIN):
        train = SVHN_TRAIN
    assert train is None or np.bincount(split.train.y).tolist() == train


def check_shapes(dataset: Dataset, split: Split) -> None:
    shape = (3 if dataset is SVHN else 1, dataset.pixels, dataset.pixels)
    assert split.train.x.shape == (len(split.train.y), *shape)
    assert split.test.x.shape == (dataset.counts[dataset.name][1], *shape)
    assert split.train.x.dtype == split.test.x.dtype == np.uint8
    assert len(split.train) == dataset.counts[dataset.name][0] or dataset is SVHN
