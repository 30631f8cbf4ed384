"""Files that are whole or not there. Every step of a save goes through the system calls named here, one by one, so that
a test can make any of them fail, stop the process at it, or say what a loss of power would leave. A folder is a handle
that `opening` gives: a name in it is written and removed there and nowhere else, also if it is a link."""

import contextlib
import os
import shutil
from pathlib import Path

from protofed.runs.store import opening


def write(folder: int, name: str, data: bytes) -> None:
    """A new file, on the disk when this returns."""
    # guard: nothing-written-through-links
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666, dir_fd=folder)
    try:
        left = memoryview(data)
        while left:  # guard: short-writes
            left = left[os.write(handle, left) :]  # guard: short-writes
        os.fsync(handle)  # guard: fsync-files
    finally:
        os.close(handle)


def sync(folder: int) -> None:
    """Waits until a folder's list of names is on the disk."""
    os.fsync(folder)  # guard: fsync-folders


def make(path: Path) -> None:
    """A folder and those that it lies in, if they are not there yet; its name is on the disk when this returns, also if
    a process made it that was killed before it could wait for that."""
    try:
        os.mkdir(path)
    except FileExistsError:
        pass
    except FileNotFoundError:
        make(path.parent)  # guard: folders-above-run-s-folder-synced
        os.mkdir(path)
    with opening.folder(path.parent) as above:
        sync(above)


def make_in(folder: int, name: str) -> None:
    """The same for a folder in one that is open."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, dir_fd=folder)
    sync(folder)  # guard: folder-killed-process-made-synced


def put(folder: int, name: str, data: bytes) -> None:
    """The file is the old one or the new one, whatever happens."""
    temporary = f".writing-{name}"
    try:
        remove(folder, temporary)  # guard: what-lies-in-the-way-goes
        write(folder, temporary, data)  # guard: rounds-jsonl-aside
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)  # guard: rounds-jsonl-aside
        sync(folder)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)  # guard: put-cleans-up
        raise


def append(path: Path, name: str, line: bytes) -> None:
    """Adds a line to a file of a folder, or begins the file; it is on the disk when this returns. Of a line for which
    there is no room nothing stays: the next one would be spoiled."""
    with opening.file(path, name, flags=os.O_WRONLY | os.O_APPEND | os.O_CREAT) as handle:
        before = os.fstat(handle).st_size
        try:
            left = memoryview(line)
            while left:
                left = left[os.write(handle, left) :]
            os.fsync(handle)
        except OSError:
            os.ftruncate(handle, before)  # guard: no-half-line-stays
            raise


def put_folder(folder: int, name: str, files: dict[str, bytes]) -> None:
    """A folder with these files appears at once; one that was there before is removed. What is written until then lies
    beside it, and stays there if this fails."""
    temporary = f".writing-{name}"
    # guard: what-killed-save-left-removed-first
    remove(folder, temporary)  # left by a run that was killed while it wrote
    os.mkdir(temporary, dir_fd=folder)
    with opening.folder_in(folder, temporary) as inner:
        for each, data in files.items():
            write(inner, each, data)
        sync(inner)  # guard: files-waited-for-before-rename-folder
    discard(folder, name)  # guard: same-state-again-replaced
    os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    sync(folder)  # guard: rename-waited-for


def rename(folder: int, old: str, new: str) -> None:
    """Gives another name to what has one."""
    os.rename(old, new, src_dir_fd=folder, dst_dir_fd=folder)


def discard(folder: int, name: str) -> None:
    """Removes a folder that is whole: one of which only a part is left has another name by then."""
    if opening.kind(folder, name) is None:
        return
    old = f".removing-{name}"
    remove(folder, old)
    rename(folder, name, old)  # guard: never-half-there
    remove(folder, old)  # guard: never-half-there


def remove(folder: int, name: str) -> None:
    """A file, or a folder of files, if it is there. A link goes itself, and what it leads to stays."""
    kind = opening.kind(folder, name)
    if kind == "folder":
        with opening.folder_in(folder, name) as inner:
            for each in os.listdir(inner):
                os.unlink(each, dir_fd=inner)
        os.rmdir(name, dir_fd=folder)
    elif kind is not None:
        os.unlink(name, dir_fd=folder)


def free(path: Path) -> int:
    """The bytes that are free where a path is or would be."""
    return shutil.disk_usage(next(one for one in (path, *path.absolute().parents) if one.exists())).free
