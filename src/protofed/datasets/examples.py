"""What a source of data gives: labelled examples of each domain, split for training and testing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Examples:
    """Examples in the publisher's order."""

    x: NDArray[Any]  # (N, C, H, W), uint8 images; or (N, F), float32
    y: NDArray[np.int64]  # (N,)

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Split:
    train: Examples
    test: Examples


@dataclass(frozen=True)
class Dataset:
    """A published set of data, and how its files are read."""

    name: str
    classes: tuple[str, ...]
    pixels: int
    """The side of the images, unless a reader is asked for another."""
    counts: Mapping[str, tuple[int, int]]
    """How many training and test examples each domain has as published."""
    obtain: str
    """Where the publisher's files come from and where they go below `$PROTOFED_DATA`, for a reader of an error."""
    read: Callable[[Path, int], Mapping[str, Split]]
    """Reads the files below a folder, images at the given side: a split for each domain, one where there is one. Says
    which file is missing or damaged, what was expected, and how to get it."""
