"""Opens what lies in a run's folder, and nothing else. A folder may come from somebody else, with links, pipes and
names in it that lead elsewhere.

The path of a folder is the user's word and may be a link. From there on every name is one of that folder, no link is
followed, and what is not an ordinary file is not waited for. Errors are OSErrors that say so.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

Kind = Literal["file", "folder", "link", "other"]

FOLDER = os.O_RDONLY | os.O_DIRECTORY
IN_FOLDER = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY  # guard: links-in-run-folder, pipes-in-run-folder
A_LINK = "it is a link, and in a run's folder none is followed"


@contextlib.contextmanager
def folder(path: Path, *names: str) -> Iterator[int]:
    """A handle of the folder to which the names lead from a path, one by one."""
    handle = os.open(path, FOLDER)
    try:
        for name in names:
            inner = _opened(handle, name, FOLDER)
            os.close(handle)
            handle = inner
        yield handle
    finally:
        os.close(handle)  # guard: handles-closed


@contextlib.contextmanager
def folder_in(handle: int, name: str) -> Iterator[int]:
    """A handle of a folder in one that is open."""
    inner = _opened(handle, name, FOLDER)
    try:
        yield inner
    finally:
        os.close(inner)


@contextlib.contextmanager
def file(path: Path, *names: str, flags: int = os.O_RDONLY) -> Iterator[int]:
    """A handle of the ordinary file to which the names lead from a path."""
    with folder(path, *names[:-1]) as own:
        handle = _opened(own, names[-1], flags)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):  # guard: ordinary-files-in-run-folder
            raise OSError(errno.EINVAL, "it is not a file", names[-1])
        yield handle
    finally:
        os.close(handle)


def read(path: Path, *names: str, most: int | None = None) -> bytes:
    """The content of a file; an error if it is longer than `most`."""
    with file(path, *names) as handle, open(handle, "rb", closefd=False) as content:
        data = content.read() if most is None else content.read(most + 1)
    if most is not None and len(data) > most:  # guard: small-files-in-run-folder
        raise OSError(errno.EFBIG, f"it is larger than {most} bytes", names[-1])
    return data


def read_part(begin: int, size: int, path: Path, *names: str) -> bytes:
    """Some bytes of a file, fewer if it ends before."""
    with file(path, *names) as handle, open(handle, "rb", closefd=False) as content:
        content.seek(begin)
        return content.read(size)


def names_in(path: Path, *names: str) -> list[str]:
    """What a folder holds; nothing if it is not there."""
    try:
        with folder(path, *names) as own:
            return os.listdir(own)
    except FileNotFoundError:
        return []


def refuse_strange(path: Path, name: str) -> None:
    """An error unless a name in a folder, and all below it, are ordinary files and folders, or it is not there. For
    what is then opened by its path."""
    with folder(path) as own:
        _refuse_strange_in(own, name)


def _refuse_strange_in(handle: int, name: str) -> None:
    what = kind(handle, name)
    if what in ("link", "other"):  # guard: privacy-folder-without-links
        raise OSError(errno.EINVAL, A_LINK if what == "link" else "it is not a file", name)
    if what == "folder":
        with folder_in(handle, name) as inner:
            for one in os.listdir(inner):
                _refuse_strange_in(inner, one)


def kind(handle: int, name: str) -> Kind | None:
    """What a name in an open folder is; None if it is not there."""
    facts = facts_of(handle, name)
    if facts is None:
        return None
    kinds: dict[int, Kind] = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
    return kinds.get(stat.S_IFMT(facts.st_mode), "other")


def facts_of(handle: int, name: str) -> os.stat_result | None:
    """What the system says of a name in an open folder, of a link itself; None if it is not there."""
    try:
        return os.stat(_plain(name), dir_fd=handle, follow_symlinks=False)
    except FileNotFoundError:
        return None


def reason(error: OSError) -> str:
    """What an error says, and of which file if it knows."""
    what = error.strerror or str(error)
    return f"{what} ({error.filename})" if error.filename else what


def _opened(handle: int, name: str, flags: int) -> int:
    try:
        return os.open(_plain(name), flags | IN_FOLDER | os.O_CLOEXEC, 0o600, dir_fd=handle)
    except OSError as error:
        # A link to a folder is "not a directory" to the system if it must not be followed.
        is_link = error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EMLINK) and kind(handle, name) == "link"
        if error.errno == errno.ENXIO:  # a pipe or a socket that nobody else has open
            raise OSError(errno.EINVAL, "it is not a file", name) from None
        raise OSError(error.errno, A_LINK if is_link else error.strerror, name) from None


def _plain(name: str) -> str:
    """The name, if it is one in a folder and not a way out of it."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:  # guard: names-in-run-folder
        raise OSError(errno.EINVAL, f"{name!r} is not the name of a file in a run's folder")
    return name
