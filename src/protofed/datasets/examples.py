"""Labelled examples of each domain, split into training and test sets, as dataset readers return them."""

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
    """A published dataset, and how its files are read."""

    name: str
    classes: tuple[str, ...]
    pixels: int
    """Default side of the images."""
    counts: Mapping[str, tuple[int, int]]
    """Number of training and test examples of each domain, as published."""
    obtain: str
    """Where to get the publisher's files and where to put them below `$PROTOFED_DATA`. Error messages end with it."""
    read: Callable[[Path, int], Mapping[str, Split]]
    """Reads the files below a folder, with images at the given side, and returns a split for each domain. Errors say
    which file is missing or damaged, what was expected, and how to get it."""
