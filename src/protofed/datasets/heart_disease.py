"""UCI heart disease: patients of four hospitals, with thirteen findings each, and whether they have heart disease.

A. Janosi, W. Steinbrunn, M. Pfisterer and R. Detrano, *Heart Disease*, UCI Machine Learning Repository, 1989,
CC BY 4.0, <https://doi.org/10.24432/C52P4X>; described by Detrano et al., American Journal of Cardiology 64, 1989.

Changes to the published values:

1. `num` is 0 for no disease and 1 to 4 for its degree, which only some hospitals distinguish. The label is num > 0.
2. A cholesterol or blood pressure of 0 counts as missing: no patient has such a value. Switzerland's cholesterol values
   are all 0.
3. Codes are spelt the same at all hospitals: Cleveland's `1.0` becomes `1`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protofed.datasets.files import file_below
from protofed.datasets.tabular import Cells, Kind, Table, read_csv
from protofed.errors import BadInput

COUNTS = {"cleveland": 303, "hungarian": 294, "switzerland": 123, "va": 200}
"""Number of patients of each hospital, as published."""
CLASSES = ("healthy", "disease")
OBTAIN = (
    "Get heart+disease.zip from https://archive.ics.uci.edu/dataset/45/heart+disease and put processed.cleveland.data, "
    "processed.hungarian.data, processed.switzerland.data and processed.va.data into the folder heart_disease."
)
KINDS: dict[str, Kind] = {
    "age": "numeric",
    "sex": "categorical",
    "cp": "categorical",
    "trestbps": "numeric",
    "chol": "numeric",
    "fbs": "categorical",
    "restecg": "categorical",
    "thalach": "numeric",
    "exang": "categorical",
    "oldpeak": "numeric",
    "slope": "categorical",
    "ca": "numeric",
    "thal": "categorical",
}
"""The thirteen findings. `ca` is numeric because it counts vessels."""
LABEL = "num"
NEVER_ZERO = ("trestbps", "chol")


@dataclass(frozen=True)
class Hospital:
    table: Table  # N rows, columns of KINDS
    y: NDArray[np.int64]  # (N,), 1 for disease


def read(root: Path) -> Mapping[str, Hospital]:
    """The four hospitals, from the folder `heart_disease` below `root`."""
    return {name: _hospital(root, name, count) for name, count in COUNTS.items()}


def _hospital(root: Path, name: str, count: int) -> Hospital:
    path = file_below(root, f"heart_disease/processed.{name}.data", OBTAIN)
    table = read_csv(path, names=[*KINDS, LABEL])
    if len(table) != count:
        raise BadInput(f"{path}: has {len(table)} patients, expected {count}. {OBTAIN}")
    columns = {column: _cleaned(table, column) for column in KINDS}
    return Hospital(replace(table, columns=columns), _labels(table))


def _cleaned(table: Table, column: str) -> Cells:
    """A column of numbers, all in the same spelling."""
    values = table.numbers(column)
    if column in NEVER_ZERO:
        values = np.where(values == 0, np.nan, values)
    return tuple(None if np.isnan(value) else np.format_float_positional(value, trim="-") for value in values)


def _labels(table: Table) -> NDArray[np.int64]:
    degrees = table.numbers(LABEL)
    for row in np.flatnonzero(~np.isin(degrees, range(5))):
        raise BadInput(f"{table.place(int(row))}: num is {table.column(LABEL)[row]}; expected 0, 1, 2, 3 or 4")
    return (degrees > 0).astype(np.int64)
