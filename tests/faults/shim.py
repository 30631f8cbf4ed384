"""A stand-in for the `os` of `protofed.runs.store.disk`: steps of a save are counted and written down, and any of them
can be made to fail."""

import os
import signal
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

OPERATIONS = ("open", "write", "fsync", "close", "mkdir", "replace", "rename", "unlink", "rmdir", "listdir")


@dataclass(frozen=True)
class Operation:
    name: str
    arguments: tuple[Any, ...]
    """With paths in the place of folders' handles and of the names in them."""
    result: Any = None


Fault = Callable[[int, Operation], None]
"""Is told the number of an operation, from 1 on, and the operation, before it takes place."""


class Shim:
    """Passes operations on; no write takes more than `most` bytes, so that a file is also cut in its middle."""

    def __init__(self, fault: Fault = lambda number, operation: None, most: int = 1000) -> None:
        self.fault = fault
        self.most = most
        self.tried: list[Operation] = []
        self.done: list[Operation] = []
        """Those that took place."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("O_"):
            return getattr(os, name)
        assert name in OPERATIONS, f"disk.py uses os.{name}, which no test can make fail: add it to the shim"
        return partial(self._do, name)

    def _do(self, name: str, *arguments: Any, **folders: int) -> Any:
        if name == "close":
            os.close(arguments[0])  # whatever it says, the handle is gone
        if name == "write":
            arguments = (arguments[0], bytes(arguments[1][: self.most]))
        told = (*map(place, folders.values(), arguments), *arguments[len(folders) :])
        if name in ("fsync", "listdir") and stat.S_ISDIR(os.fstat(arguments[0]).st_mode):
            told = (place(arguments[0]),)
        self.tried.append(Operation(name, told))
        self.fault(len(self.tried), self.tried[-1])
        result = None if name == "close" else getattr(os, name)(*arguments, **folders)
        self.done.append(Operation(name, told, result))
        return result


def place(folder: int, name: str = "") -> Path:
    """The path of an open folder, or of a name in it."""
    return Path(os.readlink(f"/proc/self/fd/{folder}")) / name


def fails(at: int, number: int) -> Fault:
    """One operation fails."""

    def fault(count: int, operation: Operation) -> None:
        if count == at:
            raise OSError(number, os.strerror(number))

    return fault


def fails_from(at: int, number: int, names: tuple[str, ...] = OPERATIONS) -> Fault:
    """From one operation on, all with these names fail, as on a disk that is full and stays full."""

    def fault(count: int, operation: Operation) -> None:
        if count >= at and operation.name in names:
            raise OSError(number, os.strerror(number))

    return fault


def kills(at: int) -> Fault:
    """The process is killed before one operation."""

    def fault(count: int, operation: Operation) -> None:
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)

    return fault


class Killed(BaseException):
    """Stands for the end of a process, inside one that goes on."""


def ends(at: int) -> Fault:
    """From one operation on nothing takes place, as if the process had been killed; handles are closed, as then."""

    def fault(count: int, operation: Operation) -> None:
        if count >= at and operation.name != "close":
            raise Killed

    return fault
