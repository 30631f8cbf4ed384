"""The formats in which sets of images are published, from bytes to arrays.

Each function checks all that it is given before it allocates anything by it, and says what it expected. Arrays are
new: they may be written to. MATLAB files are not left to SciPy, which a damaged file can crash.
"""

import re
import struct
import zlib
from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from protofed.errors import BadInput

Bytes = NDArray[np.uint8]
Labels = NDArray[np.int64]

IDX_BYTE = 8  # the code of unsigned bytes, the only type that images and labels come in

MATLAB_HEADER = 128
MATLAB_VERSION = b"\x00\x01IM"  # version 5, written on a little-endian machine
MATLAB_NAME, MATLAB_UINT8, MATLAB_SHAPE, MATLAB_FLAGS, MATLAB_MATRIX, MATLAB_COMPRESSED = 1, 2, 5, 6, 14, 15
MATLAB_PLAIN_UINT8 = b"\x09\x00"  # the class, and no flag for complex numbers

CIFAR_SIDE = 32

MOST_UNFOLDING = 100
"""How many times its size a compressed file may unfold to; images of handwriting unfold to less than ten times."""
ALWAYS_UNFOLDED = 16 * 2**20
"""What any file may unfold to, however small it is."""

LIBSVM_NUMBER = rb"[-+]?[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]{1,3})?"
LIBSVM_VALUE = lru_cache(maxsize=1 << 14)(float)  # grey values come again and again: three times as fast
LIBSVM_LINE = re.compile(rb"[0-9]{1,3}(?: [0-9]{1,6}:" + LIBSVM_NUMBER + rb")* ?")


def unfolded_limit(size: int, limit: int) -> int:
    """How many bytes so many compressed bytes may unfold to, where at most `limit` are expected."""
    return min(limit, max(ALWAYS_UNFOLDED, MOST_UNFOLDING * size))  # guard: compressed-files-have-largest-ratio


def idx(data: bytes, dimensions: int) -> Bytes:
    """An array of unsigned bytes with so many dimensions, in the format of MNIST."""
    start = 4 + 4 * dimensions
    if len(data) < start or data[:4] != bytes([0, 0, IDX_BYTE, dimensions]):
        raise BadInput(f"it is no IDX file of unsigned bytes in {dimensions} dimensions: it begins with {data[:4]!r}")
    shape = struct.unpack_from(f">{dimensions}I", data, 4)
    if len(data) != start + prod(shape):
        raise BadInput(f"its header says {shape}, {start + prod(shape)} bytes in all, but it holds {len(data)}")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape).copy()


def libsvm(data: bytes, rows: int, features: int, classes: int) -> tuple[NDArray[np.float64], Labels]:
    """Values (N, F) in [-1, 1], 0 where a line leaves a feature out, and labels 1..classes, from LIBSVM's text."""
    found = data.count(b"\n") + (not data.endswith(b"\n"))
    if found != rows:
        raise BadInput(f"it has {found} lines, not {rows}")
    x, y = np.zeros((rows, features)), np.zeros(rows, np.int64)
    for row, line in enumerate(data.splitlines()):
        try:
            y[row], index, values = _libsvm_line(line, features, classes)
        except BadInput as error:
            raise BadInput(f"line {row + 1}: {error}") from error
        x[row, index] = values
    return x, y


def _libsvm_line(line: bytes, features: int, classes: int) -> tuple[int, Labels, NDArray[np.float64]]:
    if not LIBSVM_LINE.fullmatch(line):
        raise BadInput(f"it is no label followed by index:value pairs: {line[:40]!r}")
    label, *numbers = map(LIBSVM_VALUE, line.replace(b":", b" ").split())
    index, values = np.array(numbers[::2], np.int64) - 1, np.array(numbers[1::2])
    if not 1 <= label <= classes:
        raise BadInput(f"the label is {label:g}, not 1 to {classes}")
    if (index < 0).any() or (index >= features).any() or (np.diff(index) <= 0).any():
        raise BadInput(f"the indices of the features do not increase within 1 to {features}")
    if (np.abs(values) > 1).any():
        raise BadInput("a value is outside -1 to 1")
    return int(label), index, values


def matlab_images(data: bytes, limit: int) -> tuple[Bytes, Labels]:
    """Images (N, 3, 32, 32) and labels as stored, from the variables X (32, 32, 3, N) and y (N, 1) of a MATLAB file, of
    which each may unfold to at most `limit` bytes."""
    found: dict[str, Bytes] = {}
    for matrix in _matlab_matrices(data, limit):
        name, array = _matlab_array(matrix)
        if name in found:
            raise BadInput(f"it holds {name} twice")
        if array is not None:
            found[name] = array
    if set(found) != {"X", "y"}:
        raise BadInput(f"it should hold X and y, but holds {sorted(found)} of them")
    x, y = found["X"], found["y"]
    if x.ndim != 4 or x.shape[:3] != (32, 32, 3) or y.shape != (x.shape[3], 1):
        raise BadInput(f"X and y should be (32, 32, 3, N) and (N, 1), not {x.shape} and {y.shape}")
    return x.transpose(3, 2, 0, 1).copy("C"), y.ravel().astype(np.int64)


def _matlab_matrices(data: bytes, limit: int) -> Iterator[memoryview]:
    """What is inside each variable, one at a time unfolded."""
    if len(data) < MATLAB_HEADER or data[MATLAB_HEADER - 4 : MATLAB_HEADER] != MATLAB_VERSION:
        raise BadInput("it is no MATLAB file of version 5 (little-endian)")
    at, view = MATLAB_HEADER, memoryview(data)
    while at < len(data):
        kind, body, at = _matlab_element(view, at)
        if kind == MATLAB_COMPRESSED:
            kind, body, _ = _matlab_element(memoryview(_inflated(body, limit)), 0)
        if kind != MATLAB_MATRIX:
            raise BadInput(f"it holds an element of type {kind} where a variable should be")
        yield body


def _matlab_element(data: memoryview, at: int) -> tuple[int, memoryview, int]:
    """Type and content of the element at a place, and the place of the next."""
    if at + 8 > len(data):
        raise BadInput("it is cut off or damaged")
    kind, size = struct.unpack_from("<II", data, at)
    start, after = at + 8, at + 8 + size
    if kind >> 16:  # up to four bytes stand within the eight of the tag
        kind, size, start, after = kind & 0xFFFF, kind >> 16, at + 4, at + 8
    elif kind != MATLAB_COMPRESSED:
        after += -size % 8
    if start + size > min(len(data), after):
        raise BadInput("it is cut off or damaged")
    return kind, data[start : start + size], after


def _matlab_array(matrix: memoryview) -> tuple[str, Bytes | None]:
    """The name of a variable, and its bytes if it is X or y."""
    parts, at = [], 0
    for expected in (MATLAB_FLAGS, MATLAB_SHAPE, MATLAB_NAME):
        kind, part, at = _matlab_element(matrix, at)
        if kind != expected or (kind == MATLAB_SHAPE and len(part) % 4):
            raise BadInput("the header of a variable is damaged")
        parts.append(bytes(part))
    name = parts[2].decode("latin-1")
    if name not in ("X", "y"):
        return name, None
    kind, content, _ = _matlab_element(matrix, at)
    shape = struct.unpack(f"<{len(parts[1]) // 4}i", parts[1])
    if parts[0][:2] != MATLAB_PLAIN_UINT8 or kind != MATLAB_UINT8:
        raise BadInput(f"{name} is not of type uint8")
    if min(shape, default=-1) < 0 or prod(shape) != len(content):
        raise BadInput(f"{name} should be {shape}, but has {len(content)} bytes")
    return name, np.frombuffer(content, np.uint8).reshape(shape, order="F")


def _inflated(body: memoryview, limit: int) -> bytes:
    stream, most = zlib.decompressobj(), unfolded_limit(len(body), limit)
    try:
        data = stream.decompress(body, most + 1)
    except zlib.error as error:
        raise BadInput(f"a compressed variable is damaged ({error})") from error
    if len(data) > most:
        raise BadInput(f"it unfolds to more bytes than were expected, {most} for a variable of its size")
    if not stream.eof:
        raise BadInput("a compressed variable is cut off")
    return data


def cifar(data: bytes, classes: tuple[int, ...]) -> tuple[Bytes, Labels]:
    """Images (N, 3, 32, 32) and the last of the label bytes before each, of which each names one of so many classes."""
    pixels = 3 * CIFAR_SIDE**2
    record = len(classes) + pixels
    if len(data) % record:
        raise BadInput(f"its {len(data)} bytes are no multiple of {record}, the size of one image and its labels")
    rows = np.frombuffer(data, np.uint8).reshape(-1, record)
    labels = rows[:, : len(classes)].astype(np.int64)
    if (labels >= np.array(classes)).any():
        raise BadInput(f"a label is {labels.max(0).tolist()}, not below {list(classes)}")
    return rows[:, len(classes) :].reshape(-1, 3, CIFAR_SIDE, CIFAR_SIDE).copy(), labels[:, -1].copy()


def resized(images: Bytes, side: int) -> Bytes:
    """Images (N, C, H, W) at another side, bilinear and antialiased; the same array where that is its side."""
    if images.shape[2:] == (side, side):
        return images
    made = np.empty((*images.shape[:2], side, side), np.uint8)
    for n, channel in np.ndindex(images.shape[:2]):
        image = Image.fromarray(images[n, channel]).resize((side, side), Image.Resampling.BILINEAR)
        made[n, channel] = np.asarray(image)
    return made


def check_labels(labels: NDArray[Any], low: int, high: int) -> None:
    if labels.size and not low <= labels.min() <= labels.max() <= high:
        raise BadInput(f"its labels are {labels.min()} to {labels.max()}, not {low} to {high}")


def check_count(found: int, expected: int, fewest: int | None = None) -> None:
    if not (expected if fewest is None else fewest) <= found <= expected:
        raise BadInput(f"it holds {found} examples, not {expected}")
