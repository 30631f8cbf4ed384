"""The four hospitals: counts, labels, what is missing, and damaged files."""

import os
from pathlib import Path

import numpy as np
import pytest

from protofed.datasets import heart_disease
from protofed.errors import BadInput

needs_files = pytest.mark.skipif("PROTOFED_DATA" not in os.environ, reason="needs the published files: PROTOFED_DATA")

ROW = "63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0"


def written(root: Path, hospital: str = "", rows: dict[int, str] | None = None, drop: int = 0) -> Path:
    """Files of the published sizes, some rows of one hospital replaced."""
    folder = root / "heart_disease"
    folder.mkdir(exist_ok=True)
    for name, count in heart_disease.COUNTS.items():
        lines = [ROW] * count
        if name == hospital:
            lines = [(rows or {}).get(k, line) for k, line in enumerate(lines[: count - drop], 1)]
        (folder / f"processed.{name}.data").write_text("\n".join(lines) + "\n")
    return root


def test_findings_and_labels_are_read_in_one_writing(tmp_path: Path) -> None:
    rows = {1: "40,0,4,0,0,?,0,90,1,.7,?,?,7,3", 2: "40.0,1.0,4.0,95.0,0.0,0.0,0.0,90.0,1.0,0.0,1.0,2.0,3.0,1"}
    found = heart_disease.read(written(tmp_path, "va", rows))
    assert list(found) == ["cleveland", "hungarian", "switzerland", "va"]
    va = found["va"]
    assert va.y[:3].tolist() == [1, 1, 0]
    columns = va.table.columns
    assert tuple(columns) == tuple(heart_disease.KINDS)
    assert columns["cp"][:3] == ("4", "4", "1")
    assert columns["oldpeak"][:3] == ("0.7", "0", "2.3")
    assert columns["trestbps"][:3] == (None, "95", "145")
    assert columns["chol"][:3] == (None, None, "233")
    assert columns["fbs"][:3] == (None, "0", "1")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({7: ROW[:-2]}, "line 7: has 13 fields, expected 14"),
        ({7: ROW + ",1"}, "line 7: has 15 fields, expected 14"),
        ({7: ROW.replace("145.0", "high")}, "line 7: column 'trestbps' has 'high'"),
        ({7: ROW[:-1] + "5"}, "line 7: num is 5"),
        ({7: ROW[:-1] + "?"}, "line 7: num is None"),
    ],
)
def test_a_damaged_row_is_refused_with_file_and_line(tmp_path: Path, rows: dict[int, str], message: str) -> None:
    with pytest.raises(BadInput, match=f"processed.switzerland.data, {message}"):
        heart_disease.read(written(tmp_path, "switzerland", rows))


def test_a_file_that_is_short_or_missing_is_refused_with_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"va\.data: has 198 patients, expected 200\. Get heart\+disease\.zip"):
        heart_disease.read(written(tmp_path, "va", drop=2))
    (written(tmp_path) / "heart_disease" / "processed.hungarian.data").unlink()
    with pytest.raises(BadInput, match=r"hungarian\.data: there is no such file\. Get heart\+disease\.zip"):
        heart_disease.read(tmp_path)


@needs_files
def test_the_published_files_have_the_published_counts() -> None:
    found = heart_disease.read(Path(os.environ["PROTOFED_DATA"]))
    assert {name: np.bincount(h.y).tolist() for name, h in found.items()} == {
        "cleveland": [164, 139],
        "hungarian": [188, 106],
        "switzerland": [8, 115],
        "va": [51, 149],
    }
    assert found["switzerland"].table.columns["chol"] == (None,) * 123
