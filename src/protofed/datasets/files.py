"""The publisher's files below the folder of data: where they are, what they hold, and whether they have changed.

Nothing outside the folder is read, whatever links say, and no file is read or unfolded beyond a size known beforehand,
nor beyond what a file of its size can honestly hold.
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
from protofed.datasets.formats import unfolded_limit
from protofed.errors import BadInput

log = logging.getLogger(__name__)

VARIABLE = "PROTOFED_DATA"
PUBLISHED_FOLDERS = {"cifar10": "cifar-10-batches-bin", "cifar100": "cifar-100-binary"}
"""What a publisher's archive unpacks to, which may stay as it is, inside or beside the folder of the set's name."""

Stamp = list[str | int]
"""Name, size and time of change in nanoseconds: a list, as JSON gives it back."""

T = TypeVar("T")


@dataclass(frozen=True)
class Publication:
    """The files of one published set."""

    name: str
    obtain: str

    def decoded(self, root: Path, names: Sequence[str], limit: int, decode: Callable[[bytes], T]) -> T:
        """What `decode` makes of the first file there is of these names, of which at most `limit` bytes are read."""
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
        """The first regular file of these names in the folders of the set."""
        for path in (folder / name for folder in folders(root, self.name) for name in names):
            if os.path.lexists(path):
                return regular(root, path)
        return None


Read = Callable[["Publication", tuple[int, int], Path, int], Mapping[str, Split]]


def dataset(
    publication: Publication, classes: tuple[str, ...], pixels: int, counts: tuple[int, int], read: Read
) -> Dataset:
    """A set of one domain, which is called as the set is; `counts` are its training and test examples."""
    name = publication.name
    return Dataset(name, classes, pixels, {name: counts}, publication.obtain, partial(read, publication, counts))


def folders(root: Path, name: str) -> list[Path]:
    """Where the files of a set may lie, in the order in which they are looked for."""
    published = PUBLISHED_FOLDERS.get(name)
    return [root / name, *([root / name / published, root / published] if published else [])]


def regular(root: Path, path: Path) -> Path:
    """The path, if it is a regular file below the root."""
    if not inside(root, path):  # guard: nothing-outside-folder-read
        raise BadInput(f"{path} leads out of {root}: put the file itself there, not a link")
    if not path.is_file():
        raise BadInput(f"{path} is not a file: put the publisher's file there")
    return path


def inside(root: Path, path: Path) -> bool:
    """Whether a path, links followed, lies below the root. A link to itself does, and leads nowhere."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def data_root(wanted: str, obtain: str = "") -> Path:
    """The folder of data that the environment names."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        raise BadInput(f"{wanted}: set ${VARIABLE} to the folder of data. {obtain}".rstrip())
    return Path(folder)


def content(path: Path, limit: int) -> bytes:
    """The whole file, unfolded if it ends in .gz or .bz2; refused beyond `limit` bytes, without unfolding the rest."""
    opened: dict[str, Callable[..., gzip.GzipFile | bz2.BZ2File]] = {".gz": gzip.GzipFile, ".bz2": bz2.BZ2File}
    try:
        most = unfolded_limit(path.stat().st_size, limit)
        with opened.get(path.suffix, open)(path, "rb") as file:
            data: bytes = file.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"it cannot be read to its end ({error})") from error
    if len(data) > most:
        of_its_size = "" if most == limit else " of a file of its size"
        raise BadInput(f"it holds more than the {most} bytes that were expected{of_its_size}")
    return data


def stamps(root: Path, name: str) -> list[Stamp]:
    """Of every file of a set, in the order of their names."""
    found = {}
    for folder, names in (entry for top in folders(root, name) if inside(root, top) for entry in _below(top)):
        prefix = Path(folder).relative_to(root).as_posix()
        for file in names:
            with contextlib.suppress(OSError):  # it went away, or is a link to nothing: the reader will tell
                found[f"{prefix}/{file}"] = os.stat(os.path.join(folder, file))
    return [[path, status.st_size, status.st_mtime_ns] for path, status in sorted(found.items())]


def _below(top: Path) -> Iterator[tuple[str, list[str]]]:
    """Each folder with the names of its files; links to folders are not followed."""
    return ((folder, names) for folder, _, names in os.walk(top))


def say_if_fewer(where: str, found: int, published: int) -> None:
    if found < published:
        log.warning("%s: %d of the %d examples that were published are here", where, found, published)
