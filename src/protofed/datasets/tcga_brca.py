"""TCGA-BRCA as FLamby divides it: clinical findings of breast cancer patients of six regions, and their survival.

The Cancer Genome Atlas Network, *Comprehensive molecular portraits of human breast tumours*, Nature 490, 2012; outcomes
by Liu et al., Cell 173, 2018; columns by Andreux et al., 2020, arXiv:2006.08997; regions and split by Ogier du Terrail
et al., *FLamby*, NeurIPS 2022. FLamby's files come under its MIT licence, the data under the terms of the GDC portal.

`T` is in days: until death where `E` is 1, until the patient was last seen where it is 0. A classification needs a
horizon: who died up to that day has label 1, who was seen alive after it label 0. Whoever was lost from sight before
the horizon has no label and is left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protofed.datasets.tabular import Table, file_below, read_csv
from protofed.errors import BadInput

COUNTS = {
    "northeast": (248, 63),
    "south": (156, 40),
    "west": (164, 42),
    "midwest": (129, 33),
    "europe": (129, 33),
    "canada": (40, 11),
}
"""Training and test patients of each region, as published, in FLamby's order."""
CLASSES = ("alive", "dead")
HORIZON = 1095
"""Three years, in days. At one and two years some regions have no deaths, from five years on some have nobody who was
seen later; at three and four years all six have both classes, in training and in test, and at three fewer patients have
been lost from sight."""
NUM_FEATURES = 39
OBTAIN = (
    "Get brca.csv and train_test_split.csv from flamby/datasets/fed_tcga_brca of https://github.com/owkin/FLamby and "
    "put them into the folder tcga_brca."
)


@dataclass(frozen=True)
class Patients:
    table: Table  # N rows, 39 columns
    time: NDArray[np.float64]  # (N,), days
    is_dead: NDArray[np.bool_]  # (N,), at that time

    def __len__(self) -> int:
        return len(self.table)

    def labels(self, horizon: float) -> NDArray[np.int64]:
        """Whether each patient was dead at the horizon; −1 where nobody knows."""
        known = np.where(self.is_dead & (self.time <= horizon), 1, -1)
        return np.where(self.time > horizon, 0, known).astype(np.int64)


@dataclass(frozen=True)
class Region:
    train: Patients
    test: Patients


def read(root: Path) -> Mapping[str, Region]:
    """The six regions, from the folder `tcga_brca` below `root`. Eight patients are in no part of the split."""
    table = read_csv(file_below(root, "tcga_brca/brca.csv", OBTAIN))
    split = read_csv(file_below(root, "tcga_brca/train_test_split.csv", OBTAIN))
    rows = _rows_of_parts(table, split)
    return {
        name: Region(*(_patients(table, rows.get(f"{part}_{k}", []), part, name) for part in ("train", "test")))
        for k, name in enumerate(COUNTS)
    }


def _rows_of_parts(table: Table, split: Table) -> dict[str, list[int]]:
    """Rows of the table in each part, such as `train_0`, in the order of the table."""
    rows = {pid: row for row, pid in enumerate(table.column("pid"))}
    if len(rows) < len(table):
        raise BadInput(f"{table.source}: a patient is there twice; expected each pid once. {OBTAIN}")
    parts: dict[str, list[int]] = {}
    seen: set[str | None] = set()
    for line, (pid, part) in enumerate(zip(split.column("pid"), split.column("fold2"), strict=True)):
        if pid not in rows or pid in seen or part is None:
            raise BadInput(f"{split.place(line)}: patient {pid} is not in {table.source}, or twice here. {OBTAIN}")
        seen.add(pid)
        parts.setdefault(part, []).append(rows[pid])
    return {part: sorted(own) for part, own in parts.items()}


def _patients(table: Table, rows: list[int], part: str, region: str) -> Patients:
    expected = COUNTS[region][part == "test"]
    if len(rows) != expected:
        raise BadInput(f"{table.source}: {part} of {region} has {len(rows)} patients, expected {expected}. {OBTAIN}")
    own = table.take(rows)
    time, event = own.numbers("T"), own.numbers("E")
    for row in np.flatnonzero(~((time >= 0) & np.isin(event, (0, 1)))):
        raise BadInput(f"{own.place(int(row))}: expected E to be 0 or 1, and T a number of days")
    features = {name: cells for name, cells in own.columns.items() if name not in ("pid", "E", "T")}
    if len(features) != NUM_FEATURES:
        raise BadInput(f"{own.source}: has {len(features)} features, expected {NUM_FEATURES}. {OBTAIN}")
    return Patients(Table(features, own.source, own.places), time, event == 1)
