"""TCGA-BRCA with FLamby's split: clinical findings of breast cancer patients of six regions, and their survival.

The Cancer Genome Atlas Network, *Comprehensive molecular portraits of human breast tumours*, Nature 490, 2012; outcomes
by Liu et al., Cell 173, 2018; columns by Andreux et al., 2020, arXiv:2006.08997; regions and split by Ogier du Terrail
et al., *FLamby*, NeurIPS 2022. FLamby's files come under its MIT licence, the data under the terms of the GDC portal.

`T` is the number of days until death if `E` is 1, and until the patient was last seen if `E` is 0. Classification needs
a horizon. Patients who died up to that day have label 1; patients who were seen alive after it have label 0. Patients
who were last seen before the horizon have no label and are left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protofed.datasets.files import file_below
from protofed.datasets.tabular import Table, read_csv
from protofed.errors import BadInput

COUNTS = {
    "northeast": (248, 63),
    "south": (156, 40),
    "west": (164, 42),
    "midwest": (129, 33),
    "europe": (129, 33),
    "canada": (40, 11),
}
"""Number of training and test patients of each region, as published, in FLamby's order."""
CLASSES = ("alive", "dead")
HORIZON = 1095
"""Three years, in days. At one and two years, some regions have no deaths; from five years on, some have no survivors.
At three and four years, all six regions have both classes in training and in test. At three years, more patients have a
label."""
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
        """1 if the patient was dead at the horizon, 0 if alive, −1 if unknown."""
        dead_or_unknown = np.where(self.is_dead & (self.time <= horizon), 1, -1)
        return np.where(self.time > horizon, 0, dead_or_unknown).astype(np.int64)


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
    """The rows of the table in each part, such as `train_0`, in the order of the table."""
    rows = {pid: row for row, pid in enumerate(table.column("pid"))}
    if len(rows) < len(table):
        raise BadInput(f"{table.source}: a pid occurs twice; expected each once. {OBTAIN}")
    parts: dict[str, list[int]] = {}
    seen: set[str | None] = set()
    for line, (pid, part) in enumerate(zip(split.column("pid"), split.column("fold2"), strict=True)):
        if pid not in rows or pid in seen or part is None:
            raise BadInput(f"{split.place(line)}: patient {pid} is not in {table.source}, or is twice here. {OBTAIN}")
        seen.add(pid)
        parts.setdefault(part, []).append(rows[pid])
    return {part: sorted(part_rows) for part, part_rows in parts.items()}


def _patients(table: Table, rows: list[int], part: str, region: str) -> Patients:
    expected = COUNTS[region][part == "test"]
    if len(rows) != expected:
        raise BadInput(f"{table.source}: {part} of {region} has {len(rows)} patients, expected {expected}. {OBTAIN}")
    table = table.take(rows)
    time, event = table.numbers("T"), table.numbers("E")
    for row in np.flatnonzero(~((time >= 0) & np.isin(event, (0, 1)))):
        raise BadInput(f"{table.place(int(row))}: expected E to be 0 or 1, and T to be a number of days")
    features = {name: cells for name, cells in table.columns.items() if name not in ("pid", "E", "T")}
    if len(features) != NUM_FEATURES:
        raise BadInput(f"{table.source}: has {len(features)} features, expected {NUM_FEATURES}. {OBTAIN}")
    return Patients(Table(features, table.source, table.places), time, event == 1)
