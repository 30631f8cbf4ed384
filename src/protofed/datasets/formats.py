"""File formats of published image datasets: from bytes to arrays.

Each function checks the sizes in a header before it allocates memory for them; errors say what was expected. The arrays
are new and writable. MATLAB files are parsed here because damaged files can crash SciPy's reader.
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

IDX_BYTE = 8  # type code of unsigned bytes; images and labels have no other type

MATLAB_HEADER = 128
MATLAB_VERSION = b"\x00\x01IM"  # version 5, written on a little-endian machine
MATLAB_NAME, MATLAB_UINT8, MATLAB_SHAPE, MATLAB_FLAGS, MATLAB_MATRIX, MATLAB_COMPRESSED = 1, 2, 5, 6, 14, 15
MATLAB_PLAIN_UINT8 = b"\x09\x00"  # class uint8, and no flag for complex numbers

CIFAR_SIDE = 32

MAX_COMPRESSION_RATIO = 100
"""Largest ratio of decompressed to compressed size. Images of handwriting stay below 10."""
ALWAYS_ALLOWED = 16 * 2**20
"""Decompressed size that any file may have, however small it is."""

LIBSVM_NUMBER = rb"[-+]?[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]{1,3})?"
LIBSVM_VALUE = lru_cache(maxsize=1 << 14)(float)  # grey values repeat; the cache makes parsing three times as fast
LIBSVM_LINE = re.compile(rb"[0-9]{1,3}(?: [0-9]{1,6}:" + LIBSVM_NUMBER + rb")* ?")


def decompressed_limit(size: int, limit: int) -> int:
    """How many bytes `size` compressed bytes may decompress to, at most `limit`."""
    return min(limit, max(ALWAYS_ALLOWED, MAX_COMPRESSION_RATIO * size))  # guard: compressed-files-have-largest-ratio


def idx(data: bytes, dimensions: int) -> Bytes:
    """An array of unsigned bytes with this number of dimensions, in the format of MNIST."""
    start = 4 + 4 * dimensions
    if len(data) < start or data[:4] != bytes([0, 0, IDX_BYTE, dimensions]):
        raise BadInput(f"it is not an IDX file of bytes in {dimensions} dimensions: it begins with {data[:4]!r}")
    shape = struct.unpack_from(f">{dimensions}I", data, 4)
    if len(data) != start + prod(shape):
        raise BadInput(
            f"its header says shape {shape}, which makes {start + prod(shape)} bytes in all, but it has {len(data)}"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape).copy()


def libsvm(data: bytes, rows: int, features: int, classes: int) -> tuple[NDArray[np.float64], Labels]:
    """Values (N, F) in [-1, 1] and labels 1..classes from LIBSVM's text format. Features that a line omits are 0."""
    lines = data.count(b"\n") + (not data.endswith(b"\n"))
    if lines != rows:
        raise BadInput(f"it has {lines} lines, not {rows}")
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
        raise BadInput(f"not a label followed by index:value pairs: {line[:40]!r}")
    label, *numbers = map(LIBSVM_VALUE, line.replace(b":", b" ").split())
    index, values = np.array(numbers[::2], np.int64) - 1, np.array(numbers[1::2])
    if not 1 <= label <= classes:
        raise BadInput(f"the label is {label:g}, not 1 to {classes}")
    if (index < 0).any() or (index >= features).any() or (np.diff(index) <= 0).any():
        raise BadInput(f"feature indices must increase and lie between 1 and {features}")
    if (np.abs(values) > 1).any():
        raise BadInput("a value is outside -1 to 1")
    return int(label), index, values


def matlab_images(data: bytes, limit: int) -> tuple[Bytes, Labels]:
    """Images (N, 3, 32, 32) and labels as stored, from the variables X (32, 32, 3, N) and y (N, 1) of a MATLAB file.

    Each variable may decompress to at most `limit` bytes.
    """
    arrays: dict[str, Bytes] = {}
    for matrix in _matlab_matrices(data, limit):
        name, array = _matlab_array(matrix)
        if name in arrays:
            raise BadInput(f"it contains the variable {name} twice")
        if array is not None:
            arrays[name] = array
    if set(arrays) != {"X", "y"}:
        raise BadInput(f"it should contain the variables X and y, but contains only {sorted(arrays)} of them")
    x, y = arrays["X"], arrays["y"]
    if x.ndim != 4 or x.shape[:3] != (32, 32, 3) or y.shape != (x.shape[3], 1):
        raise BadInput(f"X and y should be (32, 32, 3, N) and (N, 1), not {x.shape} and {y.shape}")
    return x.transpose(3, 2, 0, 1).copy("C"), y.ravel().astype(np.int64)


def _matlab_matrices(data: bytes, limit: int) -> Iterator[memoryview]:
    """The content of each variable, decompressed one at a time."""
    if len(data) < MATLAB_HEADER or data[MATLAB_HEADER - 4 : MATLAB_HEADER] != MATLAB_VERSION:
        raise BadInput("it is not a MATLAB file of version 5 (little-endian)")
    at, view = MATLAB_HEADER, memoryview(data)
    while at < len(data):
        kind, body, at = _matlab_element(view, at)
        if kind == MATLAB_COMPRESSED:
            kind, body, _ = _matlab_element(memoryview(_decompressed(body, limit)), 0)
        if kind != MATLAB_MATRIX:
            raise BadInput(f"it contains an element of type {kind} where a variable should be")
        yield body


def _matlab_element(data: memoryview, at: int) -> tuple[int, memoryview, int]:
    """Type and content of the element at an offset, and the offset of the next element."""
    if at + 8 > len(data):
        raise BadInput("it is truncated or damaged")
    kind, size = struct.unpack_from("<II", data, at)
    start, after = at + 8, at + 8 + size
    if kind >> 16:  # small element: up to four bytes of content are inside the eight-byte tag
        kind, size, start, after = kind & 0xFFFF, kind >> 16, at + 4, at + 8
    elif kind != MATLAB_COMPRESSED:
        after += -size % 8
    if start + size > min(len(data), after):
        raise BadInput("it is truncated or damaged")
    return kind, data[start : start + size], after


def _matlab_array(matrix: memoryview) -> tuple[str, Bytes | None]:
    """The name of a variable, and its content if it is X or y."""
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


def _decompressed(body: memoryview, limit: int) -> bytes:
    stream, allowed = zlib.decompressobj(), decompressed_limit(len(body), limit)
    try:
        data = stream.decompress(body, allowed + 1)
    except zlib.error as error:
        raise BadInput(f"a compressed variable is damaged ({error})") from error
    if len(data) > allowed:
        raise BadInput(f"a variable decompresses to more than the {allowed} bytes that its size allows")
    if not stream.eof:
        raise BadInput("a compressed variable is truncated")
    return data


def cifar(data: bytes, classes: tuple[int, ...]) -> tuple[Bytes, Labels]:
    """Images (N, 3, 32, 32) and their labels. Before each image stands one byte for each of the kinds of `classes`; the
    last of them is the label."""
    pixels = 3 * CIFAR_SIDE**2
    record = len(classes) + pixels
    if len(data) % record:
        raise BadInput(f"its {len(data)} bytes are not a multiple of {record}, the size of one image with its labels")
    rows = np.frombuffer(data, np.uint8).reshape(-1, record)
    labels = rows[:, : len(classes)].astype(np.int64)
    if (labels >= np.array(classes)).any():
        raise BadInput(f"the largest labels are {labels.max(0).tolist()}; they must be below {list(classes)}")
    return rows[:, len(classes) :].reshape(-1, 3, CIFAR_SIDE, CIFAR_SIDE).copy(), labels[:, -1].copy()


def resized(images: Bytes, side: int) -> Bytes:
    """Images (N, C, H, W) resized to another side, bilinear and antialiased. Returns the same array if the side is
    already right."""
    if images.shape[2:] == (side, side):
        return images
    result = np.empty((*images.shape[:2], side, side), np.uint8)
    for n, channel in np.ndindex(images.shape[:2]):
        image = Image.fromarray(images[n, channel]).resize((side, side), Image.Resampling.BILINEAR)
        result[n, channel] = np.asarray(image)
    return result


def check_labels(labels: NDArray[Any], low: int, high: int) -> None:
    if labels.size and not low <= labels.min() <= labels.max() <= high:
        raise BadInput(f"its labels run from {labels.min()} to {labels.max()}, not from {low} to {high}")


def check_count(count: int, expected: int, minimum: int | None = None) -> None:
    if not (expected if minimum is None else minimum) <= count <= expected:
        raise BadInput(f"it contains {count} examples, not {expected}")
