"""The publisher's files below the data folder: where they are, what they contain, and whether they have changed.

Nothing outside the data folder is read, not even through links. Reading and decompressing stop at a size known in
advance, and at a plausible ratio to the size of the file.
"""

import bz2
import contextlib
import gzip
import logging
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from protofed.datasets.examples import Dataset, Split
from protofed.datasets.formats import decompressed_limit
from protofed.errors import BadInput

log = logging.getLogger(__name__)

VARIABLE = "PROTOFED_DATA"
PUBLISHED_FOLDERS = {"cifar10": "cifar-10-batches-bin", "cifar100": "cifar-100-binary"}
"""Folders that publishers' archives unpack to. They may stay as they are, inside or beside the dataset's folder."""

Stamp = list[str | int]
"""Name, size and modification time in nanoseconds. A list, because it is compared with what JSON returns."""

T = TypeVar("T")


@dataclass(frozen=True)
class Publication:
    """The files of one published dataset."""

    name: str
    obtain: str

    def decoded(self, root: Path, names: Sequence[str], limit: int, decode: Callable[[bytes], T]) -> T:
        """Applies `decode` to the first of these files that exists. At most `limit` bytes are read."""
        path = self.path(root, names)
        try:
            return decode(content(path, limit))
        except BadInput as error:
            raise BadInput(f"{path}: {error}. Get it again: {self.obtain}") from error

    def path(self, root: Path, names: Sequence[str]) -> Path:
        path = self.path_if_any(root, names)
        if path is None:
            raise BadInput(f"{root / self.name}: there is no {' or '.join(names)}. {self.obtain}")
        return path

    def path_if_any(self, root: Path, names: Sequence[str]) -> Path | None:
        """The first of these files that exists in the folders of the dataset."""
        for path in (folder / name for folder in folders(root, self.name) for name in names):
            if os.path.lexists(path):
                return regular(root, path)
        return None


Read = Callable[["Publication", tuple[int, int], Path, int], Mapping[str, Split]]


def dataset(
    publication: Publication, classes: tuple[str, ...], pixels: int, counts: tuple[int, int], read: Read
) -> Dataset:
    """A dataset of one domain, which has the dataset's name. `counts` are its numbers of training and test examples."""
    name = publication.name
    return Dataset(name, classes, pixels, {name: counts}, publication.obtain, partial(read, publication, counts))


def folders(root: Path, name: str) -> list[Path]:
    """The folders where the files of a dataset may lie, in the order of search."""
    published = PUBLISHED_FOLDERS.get(name)
    return [root / name, *([root / name / published, root / published] if published else [])]


def regular(root: Path, path: Path) -> Path:
    """The path. Refuses anything but a regular file below the root."""
    if not inside(root, path):  # guard: nothing-outside-folder-read
        raise BadInput(f"{path} leads out of {root}; put the file itself there, not a link")
    if not path.is_file():
        raise BadInput(f"{path} is not a regular file; put the publisher's file there")
    return path


def inside(root: Path, path: Path) -> bool:
    """Whether a path, with links followed, lies below the root. A link to itself counts as inside."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def data_root(wanted: str, obtain: str = "") -> Path:
    """The data folder, from the environment variable."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        raise BadInput(f"{wanted}: set ${VARIABLE} to the data folder. {obtain}".rstrip())
    return Path(folder)


def file_below(root: Path, name: str, obtain: str) -> Path:
    """The file of this name, such as `set/part.csv`, below the root. `obtain` says how to get it if it is missing."""
    path = root / name
    if not path.is_file():
        raise BadInput(f"{path}: there is no such file. {obtain}")
    if not inside(root, path):
        raise BadInput(f"{path} leads out of {root}; put the file itself there, not a link")
    return path


def content(path: Path, limit: int) -> bytes:
    """The whole file, decompressed if it ends in .gz or .bz2. Reading stops with an error after `limit` bytes."""
    openers: dict[str, Callable[..., gzip.GzipFile | bz2.BZ2File]] = {".gz": gzip.GzipFile, ".bz2": bz2.BZ2File}
    try:
        allowed = decompressed_limit(path.stat().st_size, limit)
        with openers.get(path.suffix, open)(path, "rb") as file:
            data: bytes = file.read(allowed + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"it cannot be read completely ({error})") from error
    if len(data) > allowed:
        of_its_size = "" if allowed == limit else " of a file of its size"
        raise BadInput(f"it contains more than the {allowed} bytes that were expected{of_its_size}")
    return data


def stamps(root: Path, name: str) -> list[Stamp]:
    """The stamp of every file of a dataset, in the order of their names."""
    statuses = {}
    for folder, names in (entry for top in folders(root, name) if inside(root, top) for entry in _files_below(top)):
        prefix = Path(folder).relative_to(root).as_posix()
        for file in names:
            with contextlib.suppress(OSError):  # deleted meanwhile, or a link to nothing: reading it will raise
                statuses[f"{prefix}/{file}"] = os.stat(os.path.join(folder, file))
    return [[path, status.st_size, status.st_mtime_ns] for path, status in sorted(statuses.items())]


def _files_below(top: Path) -> Iterator[tuple[str, list[str]]]:
    """Each folder with the names of its files. Links to folders are not followed."""
    return ((folder, names) for folder, _, names in os.walk(top))


def warn_if_fewer(where: str, count: int, published: int) -> None:
    if count < published:
        log.warning("%s: only %d of the %d published examples are here", where, count, published)
