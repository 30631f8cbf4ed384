"""A file system with a volatile and a durable part: what a loss of power may leave behind.

Only fsync of a file makes its data durable, and only fsync of a folder makes the names in it durable. What was written
and not synced may be lost, be there in part, be there as zeros, or be there. Names that were made, changed or removed
and not synced may have been or not, each for itself: a later one may be there when an earlier one is not.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, combinations, product
from math import prod
from pathlib import Path
from typing import Any

from faults.shim import Operation

MOST = 10_000
TOO_MANY = "so many states are possible only if next to nothing was synced"

Remains = bytes | frozenset[tuple[str, Any]]
"""What is left of a file, or of a folder: its names, and what is left of each."""


@dataclass(eq=False)
class File:
    content: bytes = b""
    """What a program reads."""
    possible: set[bytes] = field(default_factory=lambda: {b""})
    """What the disk may hold."""

    def cut(self) -> None:
        self.content = b""
        self.possible.add(b"")

    def add(self, data: bytes) -> None:
        before, self.content = self.content, self.content + data
        self.possible |= {before + data[: len(data) // 2], before + bytes(len(data)), bytes(len(self.content))}
        self.possible.add(self.content)

    def sync(self) -> None:
        self.possible = {self.content}

    def remains(self) -> set[Remains]:
        return set(self.possible)


Edit = dict[str, "File | Folder | None"]


@dataclass(eq=False)
class Folder:
    names: Edit = field(default_factory=dict)
    """What a program sees."""
    durable: Edit = field(default_factory=dict)
    edits: list[Edit] = field(default_factory=list)
    """Those that are not durable, in their order; each takes place as a whole or not at all."""

    def edit(self, edit: Edit) -> None:
        self.names = _edited(self.names, [edit])
        self.edits.append(edit)

    def sync(self) -> None:
        self.durable, self.edits = _edited(self.durable, self.edits), []

    def remains(self) -> set[Remains]:
        assert 2 ** len(self.edits) < MOST, TOO_MANY
        found: set[Remains] = set()
        for chosen in chain.from_iterable(combinations(self.edits, k) for k in range(len(self.edits) + 1)):
            names = _edited(self.durable, chosen)
            inner = [[(name, left) for left in node.remains()] for name, node in names.items() if node is not None]
            assert prod(map(len, inner)) + len(found) < MOST, TOO_MANY
            found |= {frozenset(one) for one in product(*inner)}
        return found


def _edited(names: Edit, edits: Iterable[Edit]) -> Edit:
    merged = {name: node for edit in (names, *edits) for name, node in edit.items()}
    return {name: node for name, node in merged.items() if node is not None}


class Power:
    """Follows the operations on what is below `root`, a folder that is empty and durable when they begin."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tree = Folder()
        self._handles: dict[int, File | Folder] = {}

    def remains(self) -> set[Remains]:
        """Everything that may be left if power is lost now."""
        return self.tree.remains()

    def follow(self, operation: Operation) -> None:
        match operation.name, operation.arguments:
            case "open", (path, flags, *_):
                self._handles[operation.result] = self._opened(path, flags)
            case "write", (handle, data):
                node = self._handles[handle]
                assert isinstance(node, File)
                node.add(data[: operation.result])
            case "fsync", (Path() as folder,):
                self._at(folder).sync()
            case "fsync", (handle,):
                self._handles[handle].sync()
            case "close", (handle,):
                del self._handles[handle]
            case "mkdir", (path, *_):
                self._parent(path).edit({path.name: Folder()})
            case "replace" | "rename", (old, new):
                assert old.parent == new.parent, "a rename between folders is two edits, which this model has not"
                self._parent(old).edit({old.name: None, new.name: self._at(old)})
            case "unlink" | "rmdir", (path,):
                self._parent(path).edit({path.name: None})

    def _opened(self, path: Path, flags: int) -> File | Folder:
        if flags & os.O_CREAT and path.name not in self._parent(path).names:
            self._parent(path).edit({path.name: File()})
        node = self._at(path)
        if isinstance(node, File) and flags & os.O_TRUNC:
            node.cut()
        return node

    def _parent(self, path: Path) -> Folder:
        node = self._at(path.parent)
        assert isinstance(node, Folder)
        return node

    def _at(self, path: Path) -> File | Folder:
        """What is at a path; the folder that holds the root is durable and of no interest."""
        if path == self.root.parent:
            return Folder()
        node: File | Folder | None = self.tree
        for name in path.relative_to(self.root).parts:
            assert isinstance(node, Folder)
            node = node.names[name]
        assert node is not None
        return node


def lay_out(remains: Remains, path: Path) -> None:
    """What is left, as files."""
    if isinstance(remains, bytes):
        path.write_bytes(remains)
        return
    path.mkdir()
    for name, inner in remains:
        lay_out(inner, path / name)


def moments(root: Path, operations: Iterable[Operation]) -> Iterator[tuple[int, set[Remains]]]:
    """After how many operations power is lost, and what that may leave."""
    disk = Power(root)
    yield 0, disk.remains()
    for number, operation in enumerate(operations, 1):
        disk.follow(operation)
        if operation.name not in ("close", "listdir"):
            yield number, disk.remains()
