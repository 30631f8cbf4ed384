"""The six regions: the published split, labels at a horizon, and damaged files."""

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from protofed.datasets import tcga_brca
from protofed.datasets.tabular import Table
from protofed.datasets.tcga_brca import COUNTS, Patients
from protofed.errors import BadInput

needs_files = pytest.mark.skipif("PROTOFED_DATA" not in os.environ, reason="needs the published files: PROTOFED_DATA")

PARTS = [f"{part}_{k}" for k in range(6) for part in ("train", "test")]
SIZES = [size for sizes in COUNTS.values() for size in sizes]
HEADER = ",".join(["pid", *(f"f{k}" for k in range(39)), "E", "T"])


def row(k: int, event: str = "0.0", time: str | None = None) -> str:
    return ",".join([f"p{k}", str(k), *["0"] * 38, event, f"{k}.0" if time is None else time])


def written(root: Path, table: dict[int, str] | None = None, split: dict[int, str] | None = None) -> Path:
    """Files of the published sizes, with some lines replaced; patients stand in the opposite order in the split."""
    folder = root / "tcga_brca"
    folder.mkdir(exist_ok=True)
    parts = np.repeat(PARTS, SIZES)
    lines = [HEADER, *(row(k) for k in range(len(parts) + 8))]
    lines = [(table or {}).get(n, line) for n, line in enumerate(lines, 1)]
    (folder / "brca.csv").write_text("\n".join(lines) + "\n")
    lines = ["pid,fold,fold2", *(f"p{k},{parts[k][:-2]},{parts[k]}" for k in reversed(range(len(parts))))]
    lines = [(split or {}).get(n, line) for n, line in enumerate(lines, 1)]
    (folder / "train_test_split.csv").write_text("\n".join(lines) + "\n")
    return root


def test_patients_are_where_the_split_puts_them_in_the_order_of_the_table(tmp_path: Path) -> None:
    regions = tcga_brca.read(written(tmp_path, {3: row(1, "1.0")}))
    found = [(region.train, region.test) for region in regions.values()]
    ages = [list(map(int, part.table.columns["f0"])) for pair in found for part in pair]
    starts = np.cumsum([0, *SIZES])
    assert ages == [list(range(a, b)) for a, b in pairwise(starts)]
    first = regions["northeast"].train
    assert tuple(first.table.columns) == tuple(f"f{k}" for k in range(39))
    assert first.time[:3].tolist() == [0, 1, 2]
    assert first.is_dead[:3].tolist() == [False, True, False]


def test_labels_say_who_was_dead_at_the_horizon_and_who_is_unknown() -> None:
    time, is_dead = [5.0, 10.0, 11.0, 5.0, 10.0, 11.0], [True, True, True, False, False, False]
    patients = Patients(Table({}, "t.csv", range(6)), np.array(time), np.array(is_dead))
    # Death on the day of the horizon counts; life must have been seen after it.
    assert patients.labels(10).tolist() == [1, 1, 0, -1, -1, 0]


@pytest.mark.parametrize(
    ("table", "split", "message"),
    [
        ({9: row(7) + ",1"}, {}, r"brca\.csv, line 9: has 43 fields, expected 42"),
        ({9: row(7, time="soon")}, {}, r"brca\.csv, line 9: column 'T' has 'soon'"),
        ({9: row(7, time="-1")}, {}, r"brca\.csv, line 9: expected E to be 0 or 1, and T"),
        ({9: row(7, event="2")}, {}, r"brca\.csv, line 9: expected E to be 0 or 1, and T"),
        ({9: row(8)}, {}, r"brca\.csv: a pid occurs twice"),
        ({1: HEADER.replace(",T", ",time")}, {}, r"brca\.csv: there is no column 'T'"),
        ({}, {1: "pid,fold,part"}, r"split\.csv: there is no column 'fold2'"),
        ({}, {9: "someone,train,train_0"}, r"split\.csv, line 9: patient someone is not in"),
        ({}, {9: "p0,train,train_0"}, r"split\.csv, line 1089: patient p0 is not in .*, or is twice here"),
        ({}, {9: "p1090,train,train_0"}, r"train of northeast has 249 patients, expected 248"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, table: dict[int, str], split: dict[int, str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        tcga_brca.read(written(tmp_path, table, split))


def test_another_number_of_features_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path) / "tcga_brca" / "brca.csv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line.replace(",", f",{'extra' if k == 0 else '1'},", 1) for k, line in enumerate(lines)))
    with pytest.raises(BadInput, match=r"has 40 features, expected 39\. Get brca\.csv"):
        tcga_brca.read(tmp_path)


@needs_files
def test_the_published_files_have_the_published_counts_and_both_classes_at_the_horizon() -> None:
    regions = tcga_brca.read(Path(os.environ["PROTOFED_DATA"]))
    assert {name: (len(r.train), len(r.test)) for name, r in regions.items()} == COUNTS

    def counts(patients: Patients) -> list[int]:
        return np.bincount(patients.labels(tcga_brca.HORIZON) + 1, minlength=3).tolist()

    # unknown, alive, dead
    assert {name: (counts(r.train), counts(r.test)) for name, r in regions.items()} == {
        "northeast": ([94, 138, 16], [25, 33, 5]),
        "south": ([79, 64, 13], [24, 15, 1]),
        "west": ([94, 59, 11], [28, 10, 4]),
        "midwest": ([48, 72, 9], [10, 22, 1]),
        "europe": ([105, 19, 5], [29, 2, 2]),
        "canada": ([38, 1, 1], [9, 1, 1]),
    }
