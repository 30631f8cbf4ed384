"""Memory without a name that two processes see: it is gone when its last user is. It needs Linux."""

import mmap
import os
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from protofed import tree
from protofed.errors import RunFailed
from protofed.tree import Tree

ALIGNMENT = 64
"""Bytes; a tensor of any type may begin at a multiple of them."""


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in a buffer. It travels instead of the tensor."""

    start: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class SharedBuffer:
    """Memory that two processes see. It holds one tree at a time, and grows."""

    def __init__(self) -> None:
        self._file = os.memfd_create("protofed")
        self._close = weakref.finalize(self, os.close, self._file)
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def write(self, value: Tree) -> Tree:
        """The tree with a place for each tensor, which lies there now."""
        end, laid = 0, list[tuple[Place, Tensor]]()

        def placed(leaf: Any) -> Any:
            nonlocal end
            if not isinstance(leaf, Tensor):
                return leaf
            like = torch.empty_like(leaf, device="meta")  # laid out as a copy would be
            place = Place(end, like.shape, like.stride(), like.dtype)
            laid.append((place, leaf.detach()))
            end += -(-like.nbytes // ALIGNMENT) * ALIGNMENT
            return place

        places = tree.map(placed, value)
        self._reserve(end)
        memory = self._mapped()
        for place, leaf in laid:
            _at(memory, place).copy_(leaf)
        return places

    def read(self, places: Tree) -> Tree:
        """A copy of the tree, since the next one will lie at the same place."""
        memory = self._mapped()
        return tree.map(lambda leaf: _at(memory, leaf).clone() if isinstance(leaf, Place) else leaf, places)

    def close(self) -> None:
        self._close()
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def _reserve(self, size: int) -> None:
        if size > os.fstat(self._file).st_size:
            try:  # pages that are only promised would kill whoever touches them first
                os.posix_fallocate(self._file, 0, size)
            except OSError as error:
                raise RunFailed(f"there is no shared memory for a record of {size} bytes: {error.strerror}") from error

    def _mapped(self) -> Tensor:
        """All its bytes; the other side may have made it grow."""
        size = os.fstat(self._file).st_size
        if size != self._bytes.numel():
            self._bytes = torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.uint8)
        return self._bytes


def _at(memory: Tensor, place: Place) -> Tensor:
    return memory.view(place.dtype).as_strided(place.shape, place.stride, place.start // place.dtype.itemsize)
