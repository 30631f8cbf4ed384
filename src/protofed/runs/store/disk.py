"""Files that are whole or not there. Every step of a save goes through the system calls named here, one by one, so that
a test can make any of them fail, stop the process at it, or say what a loss of power would leave."""

import contextlib
import os
from pathlib import Path


def write(path: Path, data: bytes) -> None:
    """The file, on the disk when this returns."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        left = memoryview(data)
        while left:  # guard: short-writes
            left = left[os.write(handle, left) :]  # guard: short-writes
        os.fsync(handle)  # guard: fsync-files
    finally:
        os.close(handle)


def sync(folder: Path) -> None:
    """Waits until a folder's list of names is on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)  # guard: fsync-folders
    finally:
        os.close(handle)  # guard: handles-closed


def make(folder: Path) -> None:
    """A folder and those that it lies in, if they are not there yet; its name is on the disk when this returns, also if
    a process made it that was killed before it could wait for that."""
    try:
        os.mkdir(folder)
    except FileExistsError:
        pass
    except FileNotFoundError:
        make(folder.parent)  # guard: folders-above-run-s-folder-synced
        os.mkdir(folder)
    sync(folder.parent)  # guard: folder-killed-process-made-synced


def put(path: Path, data: bytes) -> None:
    """The file is the old one or the new one, whatever happens."""
    temporary = path.with_name(f".writing-{path.name}")
    try:
        write(temporary, data)  # guard: rounds-jsonl-aside
        os.replace(temporary, path)  # guard: rounds-jsonl-aside
        sync(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)  # guard: put-cleans-up
        raise


def put_folder(path: Path, files: dict[str, bytes]) -> None:
    """A folder with these files appears at once; one that was there before is removed. What is written until then lies
    beside it, and stays there if this fails."""
    temporary = path.with_name(f".writing-{path.name}")
    # guard: what-killed-save-left-removed-first
    remove(temporary)  # left by a run that was killed while it wrote
    os.mkdir(temporary)
    for name, data in files.items():
        write(temporary / name, data)
    sync(temporary)  # guard: files-waited-for-before-rename-folder
    remove(path)  # guard: damaged-checkpoint-replaced
    os.rename(temporary, path)
    sync(path.parent)  # guard: rename-waited-for


def remove(path: Path) -> None:
    """A file, or a folder of files, if it is there."""
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        os.unlink(path)
        return
    for name in names:
        os.unlink(path / name)
    os.rmdir(path)
