"""Decoded datasets, cached below the data folder so that a second start is fast.

A cached dataset is a folder of .npy files with an index.json. The index holds shapes, types, sizes and checksums of the
arrays, and names, sizes and modification times of the publisher's files. The folder is written under a temporary name,
read back, flushed to disk and then renamed, so a folder under its final name is complete. Loading compares the index
with the publisher's files, and the sizes and headers of the arrays with the index. It does not read the arrays. They
are memory-mapped, and each page is read when it is first used. The maps are copy-on-write: no other process sees what
is written to an array.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from protofed.datasets import files
from protofed.datasets.examples import Dataset, Examples, Split
from protofed.datasets.files import Stamp
from protofed.errors import BadInput

log = logging.getLogger(__name__)

FORMAT = 1
"""Increase it whenever a reader decodes the same files differently, or the layout of the cache changes."""
MAX_SIDE = 512
INDEX_LIMIT = 1 << 26
DTYPES = ("|u1", "<f4", "<i8")


class _Damaged(Exception):
    """A cached dataset is not as it was written."""


def load(dataset: Dataset, root: Path | None = None, pixels: int | None = None) -> dict[str, Split]:
    """The examples of each domain, with images at the given side. They come from the cache if it is up to date;
    otherwise the files are decoded and the cache is written.

    `root` is the data folder, by default `$PROTOFED_DATA`.
    """
    root = _root(dataset, root)
    side = _side(dataset, pixels)
    cache = root / "cache"
    if not files.inside(root, cache):
        raise BadInput(f"{cache} leads out of {root}; make it a folder, not a link")
    target = cache / f"{dataset.name}-{side}-{FORMAT}"
    origin = files.stamps(root, dataset.name)
    try:
        cached = _cached(target, origin)
    except _Damaged as error:
        log.warning("%s is damaged (%s); the files are decoded again", target, error)
        cached = None
    if cached is None:
        return _decoded(dataset, root, side, target, origin)
    for domain, (train, test) in dataset.counts.items():
        if domain in cached:
            files.warn_if_fewer(f"{domain}, training", len(cached[domain].train), train)
            files.warn_if_fewer(f"{domain}, test", len(cached[domain].test), test)
    return cached


def _root(dataset: Dataset, root: Path | None) -> Path:
    root = files.data_root(dataset.name, dataset.obtain) if root is None else root
    if not root.is_dir():
        raise BadInput(f"{dataset.name}: {root}, the data folder, is not a folder. {dataset.obtain}")
    return root


def _side(dataset: Dataset, pixels: int | None) -> int:
    if not re.fullmatch("[a-z0-9][a-z0-9_-]*", dataset.name):
        raise BadInput(f"a dataset cannot be called {dataset.name!r}: use lower-case letters, digits, _ and -")
    if pixels is not None and not 1 <= pixels <= MAX_SIDE:
        raise BadInput(f"{dataset.name}: images of {pixels} pixels a side are not possible; choose 1 to {MAX_SIDE}")
    return dataset.pixels if pixels is None else pixels


def _decoded(dataset: Dataset, root: Path, side: int, target: Path, origin: list[Stamp]) -> dict[str, Split]:
    splits = _writable(dataset.read(root, side))
    if files.stamps(root, dataset.name) != origin:
        raise BadInput(
            f"{dataset.name}: files below {root} changed while they were read; try again when they are complete"
        )
    try:
        _store(splits, target, origin)
        return _cached(target, origin) or splits
    except (OSError, _Damaged) as error:
        log.warning(
            "%s cannot be cached in %s (%s); it will be decoded at each start", dataset.name, target.parent, error
        )
        return splits


def _writable(splits: Mapping[str, Split]) -> dict[str, Split]:
    """Contiguous and writable arrays, as the cache returns them. torch warns about read-only arrays."""

    def examples(part: Examples) -> Examples:
        return Examples(np.require(part.x, requirements=["C", "W"]), np.require(part.y, requirements=["C", "W"]))

    return {domain: Split(examples(split.train), examples(split.test)) for domain, split in splits.items()}


def _store(splits: Mapping[str, Split], target: Path, origin: list[Stamp]) -> None:
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
        new = Path(folder, "new")
        new.mkdir()
        arrays = {}
        for number, split in enumerate(splits.values()):
            for name, array in _arrays(number, split).items():
                arrays[name] = _write_array(new / f"{name}.npy", array)
        index = {"format": FORMAT, "made_from": origin, "domains": list(splits), "arrays": arrays}
        _write(new / "index.json", json.dumps(index, indent=1).encode("ascii"))
        _flush(new)
        _install(new, target, origin)


def _arrays(number: int, split: Split) -> dict[str, NDArray[Any]]:
    parts = {"train": split.train, "test": split.test}
    return {
        f"{number}-{part}-{letter}": array
        for part, examples in parts.items()
        for letter, array in (("x", examples.x), ("y", examples.y))
    }


def _write_array(path: Path, array: NDArray[Any]) -> dict[str, Any]:
    """Writes the array, and returns its entry in the index."""
    header = _header(array.shape, array.dtype.str)
    _write(path, header, array.data)
    with path.open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    expected = hashlib.sha256(header)
    expected.update(array.data)
    if checksum != expected.hexdigest():
        raise _Damaged(f"{path.name} differs on disk from what was written")
    size = len(header) + array.nbytes
    return {"shape": list(array.shape), "dtype": array.dtype.str, "bytes": size, "sha256": checksum}


def _header(shape: tuple[int, ...], dtype: str) -> bytes:
    buffer = BytesIO()
    npy.write_array_header_1_0(buffer, {"descr": dtype, "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def _write(path: Path, *parts: bytes | memoryview) -> None:
    with path.open("xb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def _flush(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _install(new: Path, target: Path, origin: list[Stamp]) -> None:
    """Gives the folder its final name, unless another process was first. Replaces a damaged or outdated folder."""
    for attempt in range(3):
        with contextlib.suppress(_Damaged):
            if _cached(target, origin) is not None:
                return
        with contextlib.suppress(FileNotFoundError):
            os.rename(target, new.parent / f"old-{attempt}")
        try:
            os.rename(new, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            _flush(target.parent)
            return


def _cached(target: Path, origin: list[Stamp]) -> dict[str, Split] | None:
    """The dataset from the cache; None if there is none, or if it was made from other files."""
    if not os.path.lexists(target):
        return None
    try:
        if target.is_symlink():
            raise _Damaged("it is a link; only folders written here are read")
        index = _index(target)
        if index["made_from"] != origin:
            return None
        return {name: _split(target, index["arrays"], number) for number, name in enumerate(index["domains"])}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _Damaged(f"{type(error).__name__}: {error}") from error


def _index(target: Path) -> dict[str, Any]:
    path = target / "index.json"
    if _size(path) > INDEX_LIMIT:
        raise _Damaged(f"{path.name} is too large")
    index = json.loads(path.read_bytes())
    if not isinstance(index, dict) or index["format"] != FORMAT:
        raise _Damaged(f"{path.name} is not of format {FORMAT}")
    return index


def _split(target: Path, entries: Mapping[str, Any], number: int) -> Split:
    def examples(part: str) -> Examples:
        x, y = (_array(target, f"{number}-{part}-{letter}", entries) for letter in "xy")
        if x.ndim < 2 or y.shape != x.shape[:1] or y.dtype != np.int64:
            raise _Damaged(f"index.json gives {part} inputs {x.shape} and labels {y.shape} of type {y.dtype}")
        return Examples(x, y)

    return Split(examples("train"), examples("test"))


def _array(target: Path, name: str, entries: Mapping[str, Any]) -> NDArray[Any]:
    path, entry = target / f"{name}.npy", entries[name]
    shape, dtype = tuple(entry["shape"]), entry["dtype"]
    if dtype not in DTYPES or not all(type(length) is int and length >= 0 for length in shape):
        raise _Damaged(f"index.json gives {path.name} the type {dtype} and the shape {shape}")
    header = _header(shape, dtype)
    expected = len(header) + prod(shape) * np.dtype(dtype).itemsize
    if _size(path) != expected or entry["bytes"] != expected:
        raise _Damaged(f"{path.name} has {_size(path)} bytes instead of {expected}")
    with path.open("rb") as file:
        if file.read(len(header)) != header:
            raise _Damaged(f"the header of {path.name} is not the one that was written")
        # Copy-on-write instead of read-only: torch accepts it without a warning, and the file never changes.
        return np.asarray(np.memmap(file, dtype, "c", len(header), shape))


def _size(path: Path) -> int:
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise _Damaged(f"{path.name} is not a regular file")
    return status.st_size
