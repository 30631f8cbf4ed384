"""The lock of a run's folder, which dies with its process."""

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from protofed.errors import BadInput, RunFailed
from protofed.runs.store import disk, opening

LOCK = "lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@dataclass(frozen=True)
class Lock:
    """A folder that is this process's."""

    path: Path
    handle: int

    def check(self) -> None:
        """Refuses to go on if the folder is not the one that was locked any more."""
        try:
            with opening.folder(self.path) as own:
                there = opening.facts_of(own, LOCK)
        except OSError:
            there = None
        mine = os.fstat(self.handle)
        if there is None or (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):  # guard: folder-still-there
            raise RunFailed(
                f"{self.path} was removed, moved or replaced while the run worked in it: nothing more is saved; "
                "put it back and resume, or start the run again"
            )


@contextlib.contextmanager
def locked(path: Path, steal: bool = False) -> Iterator[Lock]:
    """Holds a folder for this process; refused if another one has it. A lock that a process on another machine has left
    behind is taken only with `steal`: whether that process lives cannot be known here."""
    with contextlib.ExitStack() as stack:
        try:
            disk.make(path)
            handle = stack.enter_context(opening.file(path, LOCK, flags=os.O_RDWR | os.O_CREAT))
        except OSError as error:
            raise BadInput(f"cannot write to {path}: {error.strerror}; choose another folder with --out") from error
        if os.fstat(handle).st_nlink > 1:  # guard: lock-has-no-other-name
            raise BadInput(f"{path / LOCK} is also a file elsewhere, which would be overwritten: remove it")
        _take(path, handle, steal)
        stack.enter_context(_held(handle))
        try:  # guard: failed-run-gives-folder-back
            yield Lock(path, handle)  # guard: failed-run-gives-folder-back
        finally:  # guard: failed-run-gives-folder-back
            with contextlib.suppress(OSError):  # guard: failed-run-gives-folder-back
                # guard: failed-run-gives-folder-back
                os.ftruncate(handle, 0)  # nothing works here any more: nobody need wonder


_HELD: set[int] = set()


@contextlib.contextmanager
def _held(handle: int) -> Iterator[None]:
    _HELD.add(handle)
    try:
        yield
    finally:
        _HELD.discard(handle)


def _let_go() -> None:
    """A forked process, such as a worker, holds no lock of its parent's, which would then outlive the parent."""
    if _HELD:
        nothing = os.open(os.devnull, os.O_RDWR)
        while _HELD:
            os.dup2(nothing, _HELD.pop(), inheritable=False)  # guard: lock-not-inherited
        os.close(nothing)


os.register_at_fork(after_in_child=_let_go)


def _take(path: Path, handle: int, steal: bool) -> None:
    note = os.read(handle, 200).decode(errors="replace").strip()
    holder = "".join(one if one.isprintable() else "?" for one in note)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # guard: lock
    except BlockingIOError:
        raise BadInput(f"{path} is in use by another process ({holder or 'unknown'}); wait for it or stop it") from None
    except OSError as error:  # guard: no-locks-named
        what = "is on a file system without locks" if error.errno in NO_LOCKS else "cannot be locked"
        raise BadInput(
            f"{path} {what} ({error.strerror}), and two runs in one folder would destroy each other: "
            "choose a folder on another file system with --out or --folder"
        ) from error
    # guard: note-another-machine, steal-lock
    if holder and f" on {socket.gethostname()} since " not in holder and not steal:
        raise BadInput(
            f"{path} was in use on another machine ({holder}) and was not given back; "
            "if nothing runs there any more, take it with --steal-lock"
        )
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    with contextlib.suppress(OSError):  # the lock holds without the note on a full disk
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"pid {os.getpid()} on {socket.gethostname()} since {since}".encode(), 0)
