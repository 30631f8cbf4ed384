"""Publishers' formats, on small files written here, whole and damaged."""

import struct
import tracemalloc
import zlib
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.io import savemat

from protofed.datasets.formats import check_count, check_labels, cifar, idx, libsvm, matlab_images, resized
from protofed.errors import BadInput

IDX = bytes([0, 0, 8, 3]) + struct.pack(">3I", 2, 1, 3) + bytes(range(6))


def mat(compressed: bool = False, **variables: Any) -> bytes:
    file: Any = BytesIO()
    savemat(file, variables, do_compression=compressed)
    return bytes(file.getvalue())


def svhn(n: int = 3) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {"X": rng.integers(0, 256, (32, 32, 3, n), np.uint8), "y": np.arange(1, n + 1, dtype=np.uint8)[:, None]}


def test_idx_gives_bytes_in_the_shape_of_its_header() -> None:
    found = idx(IDX, 3)
    assert found.tolist() == [[[0, 1, 2]], [[3, 4, 5]]]
    assert found.dtype == np.uint8
    found[:] = 0  # one's own


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (IDX[:-1], "22 bytes in all, but it has 21"),
        (IDX + b"\0", "22 bytes in all, but it has 23"),
        (b"\1" + IDX[1:], "not an IDX file"),
        (IDX[:2] + bytes([13]) + IDX[3:], "not an IDX file"),  # 32-bit floats
        (IDX[:3] + bytes([1]) + IDX[4:], "not an IDX file"),
        (IDX[:4] + b"\xff" * 12 + IDX[16:], "4294967295"),
        (IDX[:10], "not an IDX file"),
        (b"", "not an IDX file"),
    ],
)
def test_idx_refuses_another_magic_type_rank_or_length(data: bytes, match: str) -> None:
    with pytest.raises(BadInput, match=match):
        idx(data, 3)


def test_libsvm_gives_values_and_labels_and_zero_for_what_is_left_out() -> None:
    x, y = libsvm(b"7 1:-1 2:0.5 4:1e-1\n10 3:-.25 \n".replace(b"-.25", b"-0.25"), 2, 4, 10)
    assert x.tolist() == [[-1, 0.5, 0, 0.1], [0, 0, -0.25, 0]]
    assert y.tolist() == [7, 10]


@pytest.mark.parametrize(
    ("line", "match"),
    [
        (b"0 1:0", "label is 0, not 1 to 10"),
        (b"11 1:0", "label is 11, not 1 to 10"),
        (b"1 0:0", "between 1 and 4"),
        (b"1 5:0", "between 1 and 4"),
        (b"1 2:0 1:0", "must increase"),
        (b"1 2:0 2:0", "must increase"),
        (b"1 1:nan", "not a label followed by"),
        (b"1 1:inf", "not a label followed by"),
        (b"1 1:1_0", "not a label followed by"),
        (b"1 1:", "not a label followed by"),
        (b"1 1:0:0", "not a label followed by"),
        (b"1 1", "not a label followed by"),
        (b"", "not a label followed by"),
        (b"1 1:1.001", "outside -1 to 1"),
        (b"1 1:-2", "outside -1 to 1"),
        (b"1 1:1e999", "outside -1 to 1"),
    ],
)
def test_libsvm_refuses_a_line_and_says_which(line: bytes, match: str) -> None:
    with pytest.raises(BadInput, match=f"line 2: .*{match}"):
        libsvm(b"1 1:0\n" + line + b"\n", 2, 4, 10)


@pytest.mark.parametrize("data", [b"1 1:0\n", b"1 1:0\n" * 3, b"", b"1\n" * 1_000_000])
def test_libsvm_counts_lines_before_it_makes_room(data: bytes) -> None:
    with pytest.raises(BadInput, match="lines, not 2"):
        libsvm(data, 2, 4, 10)


@pytest.mark.parametrize("compressed", [False, True])
def test_matlab_images_come_with_channels_first_in_order(compressed: bool) -> None:
    given = svhn()
    x, y = matlab_images(mat(compressed, other=np.ones(3), **given), 1 << 20)
    assert x.shape == (3, 3, 32, 32)
    assert x[2, 1, 5, 7] == given["X"][5, 7, 1, 2]
    assert x.flags.c_contiguous
    assert y.tolist() == [1, 2, 3]
    assert y.dtype == np.int64


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"X": 1j * np.zeros((32, 32, 3, 3))}, "is not of type uint8"),
        ({"X": np.zeros((32, 32, 3, 3))}, "is not of type uint8"),
        ({"y": np.ones((3, 1))}, "is not of type uint8"),
        ({"X": np.zeros((32, 32, 1, 3), np.uint8)}, r"\(32, 32, 3, N\)"),
        ({"X": np.zeros((32, 32, 3, 4), np.uint8)}, r"\(32, 32, 3, N\)"),
        ({"X": np.zeros((3, 3), np.uint8)}, r"\(32, 32, 3, N\)"),
        ({"X": np.array([[1, "a"]], dtype=object)}, "is not of type uint8"),
        ({"X": {"a": 1}}, "is not of type uint8"),
    ],
)
def test_matlab_refuses_other_shapes_and_types(change: dict[str, Any], match: str) -> None:
    with pytest.raises(BadInput, match=match):
        matlab_images(mat(**(svhn() | change)), 1 << 20)


@pytest.mark.parametrize("keep", ["X", "y"])
def test_matlab_refuses_a_file_without_one_of_its_variables(keep: str) -> None:
    with pytest.raises(BadInput, match="should contain the variables X and y"):
        matlab_images(mat(**{keep: svhn()[keep]}), 1 << 20)


def test_matlab_refuses_a_variable_that_comes_twice() -> None:
    whole = mat(**svhn())
    with pytest.raises(BadInput, match="X twice"):
        matlab_images(whole + whole[128:], 1 << 20)


@pytest.mark.parametrize("compressed", [False, True])
def test_matlab_refuses_what_is_cut_off(compressed: bool) -> None:
    whole = mat(compressed, **svhn())
    for length in (0, 64, 127, 128, 131, 140, 300, len(whole) // 2, len(whole) - 1):
        with pytest.raises(BadInput):
            matlab_images(whole[:length], 1 << 20)


def test_matlab_refuses_a_compressed_variable_without_its_checksum() -> None:
    plain = mat(**svhn())
    packed = zlib.compress(plain[128:])[:-4]  # the content is whole, so that nothing else can tell
    with pytest.raises(BadInput, match="variable is truncated"):
        matlab_images(plain[:128] + struct.pack("<II", 15, len(packed)) + packed, 1 << 20)


@pytest.mark.parametrize("flags", [b"\x06\x00", b"\x09\x08"], ids=["double", "complex"])
def test_matlab_refuses_bytes_that_stand_for_other_numbers(flags: bytes) -> None:
    whole = mat(**svhn())
    at = whole.index(struct.pack("<II", 6, 8)) + 8
    with pytest.raises(BadInput, match="X is not of type uint8"):
        matlab_images(whole[:at] + flags + whole[at + 2 :], 1 << 20)


def test_matlab_refuses_another_version() -> None:
    whole = mat(**svhn())
    with pytest.raises(BadInput, match="version 5"):
        matlab_images(whole[:124] + b"\x00\x02IM" + whole[128:], 1 << 20)


def test_matlab_refuses_a_bomb_without_unfolding_it() -> None:
    packer = zlib.compressobj()
    bomb = b"".join([packer.compress(bytes(1 << 20)) for _ in range(64)]) + packer.flush()
    data = mat(**svhn()) + struct.pack("<II", 15, len(bomb)) + bomb
    tracemalloc.start()
    try:
        with pytest.raises(BadInput, match="decompresses to more"):
            matlab_images(data, 1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 1 << 23
    finally:
        tracemalloc.stop()


def test_matlab_refuses_a_cell_array_that_declares_a_great_size() -> None:
    whole = mat(X=np.array([[1]], dtype=object), y=svhn()["y"])
    at = whole.index(struct.pack("<4I", 5, 8, 1, 1))
    with pytest.raises(BadInput, match="not of type uint8"):
        matlab_images(whole[:at] + struct.pack("<4I", 5, 8, 1 << 15, 1 << 16) + whole[at + 16 :], 1 << 20)


def test_matlab_refuses_a_shape_that_is_not_its_content() -> None:
    whole = mat(**svhn())
    at = whole.index(struct.pack("<4I", 32, 32, 3, 3))
    for shape in ((32, 32, 3, 4), (1 << 30, 1 << 30, 1 << 30, 1), (-32, -32, 3, 3)):
        with pytest.raises(BadInput, match="X should be"):
            matlab_images(whole[:at] + struct.pack("<4i", *shape) + whole[at + 16 :], 1 << 20)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(at=st.integers(0, 400), value=st.binary(min_size=1, max_size=8), compressed=st.booleans())
def test_matlab_gives_images_or_refuses_whatever_is_in_the_file(at: int, value: bytes, compressed: bool) -> None:
    whole = mat(compressed, y=svhn(2)["y"], X=np.zeros((32, 32, 3, 2), np.uint8))
    damaged = whole[:at] + value + whole[at + len(value) :]
    try:
        x, y = matlab_images(damaged, 1 << 20)
    except BadInput:
        return
    assert x.shape == (len(y), 3, 32, 32)


def test_cifar_gives_planes_and_the_last_label() -> None:
    images = np.arange(2 * 3072).astype(np.uint8).reshape(2, 3072)
    ten = b"".join(bytes([label]) + image.tobytes() for label, image in zip((9, 4), images, strict=True))
    x, y = cifar(ten, (10,))
    assert np.array_equal(x, images.reshape(2, 3, 32, 32))
    assert y.tolist() == [9, 4]
    hundred = b"".join(bytes([19, label]) + image.tobytes() for label, image in zip((99, 4), images, strict=True))
    x, y = cifar(hundred, (20, 100))
    assert np.array_equal(x, images.reshape(2, 3, 32, 32))
    assert y.tolist() == [99, 4]


@pytest.mark.parametrize(
    ("data", "classes", "match"),
    [
        (bytes(3072), (10,), "not a multiple of 3073"),
        (bytes(3073 * 2), (20, 100), "not a multiple of 3074"),
        (bytes([10]) + bytes(3072), (10,), r"\[10\].* below \[10\]"),
        (bytes([0, 100]) + bytes(3072), (20, 100), r"\[0, 100\].* below \[20, 100\]"),
        (bytes([20, 0]) + bytes(3072), (20, 100), r"\[20, 0\].* below \[20, 100\]"),
    ],
)
def test_cifar_refuses_another_length_or_label(data: bytes, classes: tuple[int, ...], match: str) -> None:
    with pytest.raises(BadInput, match=match):
        cifar(data, classes)


def test_images_of_the_wanted_side_are_left_as_they_are() -> None:
    images = np.zeros((2, 1, 4, 4), np.uint8)
    assert resized(images, 4) is images


@pytest.mark.parametrize("side", [8, 24])
def test_resizing_is_pillows_bilinear_of_the_colour_image(side: int) -> None:
    image = np.random.default_rng(1).integers(0, 256, (3, 16, 16), np.uint8)
    expected = Image.fromarray(image.transpose(1, 2, 0)).resize((side, side), Image.Resampling.BILINEAR)
    assert np.array_equal(resized(image[None], side)[0], np.asarray(expected).transpose(2, 0, 1))


def test_shrinking_is_antialiased() -> None:
    board = (np.indices((16, 16)).sum(0) % 2 * 255).astype(np.uint8)
    assert abs(resized(board[None, None], 4).astype(int) - 127).max() < 20  # picking pixels would give 0 and 255


def test_labels_and_counts_are_compared_with_what_is_expected() -> None:
    check_labels(np.array([1, 10]), 1, 10)
    check_count(3, 3)
    check_count(1, 3, minimum=1)
    for labels in ([0, 10], [1, 11]):
        with pytest.raises(BadInput, match="not from 1 to 10"):
            check_labels(np.array(labels), 1, 10)
    for found, fewest in ((2, None), (4, None), (0, 1), (4, 1)):
        with pytest.raises(BadInput, match=f"it contains {found} examples, not 3"):
            check_count(found, 3, fewest)
