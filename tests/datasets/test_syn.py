"""SYN and MNIST-M, in small copies of the forms in which they are met."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from protofed.datasets.examples import Examples
from protofed.datasets.syn import MNIST_M, MNIST_M_FILES, SYN, SYN_FILES, MnistMFiles
from protofed.errors import BadInput


def paint(path: Path, shade: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (4, 4), shade).save(path)


def shades(examples: Examples) -> list[int]:
    assert examples.x.dtype == np.uint8
    assert examples.y.dtype == np.int64
    found: list[int] = examples.x[:, 0, 0, 0].tolist()
    return found


def syn_folders(root: Path) -> None:
    """Two training images and one for testing of each digit."""
    for digit in range(10):
        for k in range(2):
            paint(root / f"syn/imgs_train/{digit}/{digit}_{k}.jpg", 10 * digit + k)
        paint(root / f"syn/imgs_valid/{digit}/{digit}_2.jpg", 10 * digit + 2)


def syn_matlab(root: Path, name: str, shade: list[int], labels: list[int], packed: bool = False) -> None:
    (root / "syn").mkdir(exist_ok=True)
    x = np.broadcast_to(np.array(shade, np.uint8), (32, 32, 3, len(shade)))
    savemat(root / "syn" / name, {"X": x, "y": np.array(labels, np.uint8)[:, None]}, do_compression=packed)


def test_folders_of_syn_are_read_in_the_order_of_digits(tmp_path: Path) -> None:
    syn_folders(tmp_path)
    found = replace(SYN_FILES, counts=(20, 10)).read(tmp_path, 4)["syn"]
    assert shades(found.train) == [10 * digit + k for digit in range(10) for k in range(2)]
    assert found.train.y.tolist() == [digit for digit in range(10) for _ in range(2)]
    assert shades(found.test) == [10 * digit + 2 for digit in range(10)]
    assert found.test.y.tolist() == list(range(10))
    assert found.train.x.shape == (20, 3, 4, 4)


def test_wrong_numbers_in_folders_of_syn_name_part_and_digits(tmp_path: Path) -> None:
    syn_folders(tmp_path)
    (tmp_path / "syn/imgs_valid/7/7_2.jpg").unlink()
    with pytest.raises(BadInput, match=r"imgs_valid: 10 images expected, .*1 of 0,.* 0 of 7, 1 of 8"):
        replace(SYN_FILES, counts=(20, 10)).read(tmp_path, 4)
    (tmp_path / "syn/imgs_valid/7").rmdir()
    with pytest.raises(BadInput, match=r"imgs_valid: .*missing: 7"):
        replace(SYN_FILES, counts=(20, 10)).read(tmp_path, 4)


@pytest.mark.parametrize("packed", [False, True])
def test_matlab_files_of_syn_may_hold_any_number_which_is_said(
    tmp_path: Path, packed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    syn_matlab(tmp_path, "synth_train_32x32.mat", [1, 2, 3], [10, 9, 1], packed)
    syn_matlab(tmp_path, "synth_test_32x32.mat", [4, 5], [0, 3], packed)
    with caplog.at_level(logging.INFO):
        found = SYN.read(tmp_path, 32)["syn"]
    assert shades(found.train) == [1, 2, 3]
    assert found.train.y.tolist() == [0, 9, 1]  # a zero may be called 10
    assert shades(found.test) == [4, 5]
    assert found.test.y.tolist() == [0, 3]
    assert "3 training and 2 test images" in caplog.text


def test_matlab_files_of_syn_are_read_at_another_size(tmp_path: Path) -> None:
    syn_matlab(tmp_path, "synth_train_32x32.mat", [1, 2, 3], [1, 9, 1])
    syn_matlab(tmp_path, "synth_test_32x32.mat", [4], [0])
    found = SYN.read(tmp_path, 16)["syn"]
    assert found.train.x.shape == (3, 3, 16, 16)
    assert found.test.x.shape == (1, 3, 16, 16)


def test_matlab_files_of_syn_with_too_many_images_or_wrong_labels_are_refused(tmp_path: Path) -> None:
    assert SYN_FILES.max_images == 479_400
    syn_matlab(tmp_path, "synth_train_32x32.mat", [1, 2, 3], [10, 9, 1])
    syn_matlab(tmp_path, "synth_test_32x32.mat", [4], [11])
    with pytest.raises(BadInput, match=r"synth_train_32x32\.mat: it contains"):
        replace(SYN_FILES, max_images=2).read(tmp_path, 32)
    with pytest.raises(BadInput, match=r"synth_test_32x32\.mat: .* 11 to 11, not from 0 to 10"):
        SYN.read(tmp_path, 32)


def test_syn_in_two_forms_at_once_or_in_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"syn: there is no such folder\. Put either"):
        SYN.read(tmp_path, 32)
    syn_matlab(tmp_path, "synth_train_32x32.mat", [1], [1])
    with pytest.raises(BadInput, match=r"there is no synth_test_32x32\.mat\. Put either"):
        SYN.read(tmp_path, 32)
    (tmp_path / "syn/imgs_train").mkdir()
    with pytest.raises(BadInput, match="keep one of the two"):
        SYN.read(tmp_path, 32)


@pytest.fixture
def mnist_m(tmp_path: Path) -> MnistMFiles:
    """Three training images and two for testing, listed in an order of their own."""
    home = tmp_path / "mnist_m"
    for k in range(3):
        paint(home / f"mnist_m_train/{k:08}.png", k)
        paint(home / f"mnist_m_test/{k:08}.png", 100 + k)
    (home / "mnist_m_train_labels.txt").write_text("00000000.png 5\n00000002.png 0\n00000001.png 9\n")
    (home / "mnist_m_test_labels.txt").write_text("00000000.png 7\n00000001.png 2\n")
    return replace(MNIST_M_FILES, counts=(frozenset({3, 4}), frozenset({2})))


def test_labels_of_mnist_m_go_with_the_images_they_name(tmp_path: Path, mnist_m: MnistMFiles) -> None:
    found = mnist_m.read(tmp_path, 4)["mnist_m"]
    assert shades(found.train) == [0, 2, 1]
    assert found.train.y.tolist() == [5, 0, 9]
    assert shades(found.test) == [100, 101]
    assert found.test.y.tolist() == [7, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("00000000.png 5\n", r"mnist_m_train_labels\.txt: 1 lines instead of 3 or 4"),
        ("00000000.png 5\n00000001.png\n00000002.png 1\n", r"labels\.txt, line 2: expected an image and a digit"),
        ("00000000.png 5\n00000001.png 10\n00000002.png 1\n", r"labels\.txt, line 2: .*'00000001\.png 10'"),
        ("00000000.png 5\n00000001.png 1\n00000007.png 1\n", r"not in .*mnist_m_train: 00000007\.png"),
        ("00000000.png 5\n00000001.png 1\n00000001.png 1\n", r"twice: 00000001\.png"),
        ("00000000.png 5\n00000001.png 1\n../mnist_m_test/00000001.png 1\n", r"not in .*mnist_m_train: \.\./"),
    ],
)
def test_wrong_labels_of_mnist_m_are_refused(tmp_path: Path, mnist_m: MnistMFiles, text: str, message: str) -> None:
    (tmp_path / "mnist_m/mnist_m_train_labels.txt").write_text(text)
    with pytest.raises(BadInput, match=message):
        mnist_m.read(tmp_path, 4)


def test_the_counts_are_the_usual_ones() -> None:
    assert SYN.counts == {"syn": (10_000, 2_000)}
    assert MNIST_M.counts == {"mnist_m": (59_001, 9_001)}
    assert MNIST_M_FILES.counts == (frozenset({59_001, 60_000}), frozenset({9_001, 10_000}))
    with pytest.raises(BadInput, match=r"mnist_m: there is no such folder\. MNIST-M is"):
        MNIST_M.read(Path("/nowhere"), 32)
