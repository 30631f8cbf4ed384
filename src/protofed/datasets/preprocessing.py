"""How files become the examples that a task stores, so that a model reads new files as its training data were read."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from protofed.datasets import sites
from protofed.datasets.images import DEEP_BITS
from protofed.datasets.tabular import Encoder, Table, is_number
from protofed.datasets.tabular.encoding import OneHot


@dataclass(frozen=True)
class ImageFiles:
    """Image files, made square and resized."""

    pixels: int
    channels: int
    """3 for colour, 1 for grey."""
    bits: int = DEEP_BITS
    """Of 16-bit grey: 0 to 2^bits - 1 become 0 to 255."""

    @property
    def kind(self) -> Literal["images"]:
        return "images"

    def read(self, paths: Sequence[Path]) -> Tensor:
        """The images as they are stored, (N, C, H, W), uint8."""
        x = np.empty((len(paths), self.channels, self.pixels, self.pixels), np.uint8)
        for row, path in enumerate(paths):
            _, x[row] = sites.read_image(path, self.pixels, self.channels, self.bits)
        return torch.from_numpy(x)


@dataclass(frozen=True)
class TableRows:
    """Rows of tables with named columns, as vectors."""

    encoder: Encoder
    label: str = ""
    """The column of the class, if it is known."""
    zero_is_missing: tuple[str, ...] = ()
    """Columns in which 0 stands for a missing value."""

    @property
    def kind(self) -> Literal["table"]:
        return "table"

    def encoded(self, table: Table) -> Tensor:
        """The rows as they are stored, (N, F), float32. Columns that the encoder does not know are left alone."""
        codes = [column.column for column in self.encoder.columns if isinstance(column, OneHot)]
        cleaned = {name: tuple(map(_zero_to_none, table.column(name))) for name in self.zero_is_missing}
        table = sites.with_normalised_codes(replace(table, columns={**table.columns, **cleaned}), codes)
        return torch.from_numpy(self.encoder.encode(table))


def _zero_to_none(cell: str | None) -> str | None:
    return None if cell is not None and is_number(cell) and float(cell) == 0 else cell
