"""Users' own folders and tables: what is found in them, and what is said of those that are not as expected."""

import os
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from protofed.datasets import sites
from protofed.datasets.sites import (
    column_faults,
    image_info,
    image_sites,
    kind_of,
    kinds_of,
    label_faults,
    labelled_rows,
    read_tables,
    sorted_classes,
    with_normalised_codes,
)
from protofed.datasets.tabular import Table
from protofed.errors import BadInput

CAFE = unicodedata.normalize("NFC", "Café")
CAFE_APART = unicodedata.normalize("NFD", "Café")


def draw(path: Path, side: int = 4, value: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((side, side, 3), value, np.uint8)).save(path)
    return path


def table(name: str = "t", **columns: list[str | None]) -> Table:
    length = len(next(iter(columns.values())))
    return Table({key: tuple(cells) for key, cells in columns.items()}, f"{name}.csv", range(2, 2 + length))


def refusal(root: Path) -> str:
    with pytest.raises(BadInput) as error:
        kind_of(root)
    return str(error.value)


# ---- folders of images


def test_images_are_found_by_site_and_class_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("south/b/2.png", "south/b/10.png", "north/b/1.PNG", "south/a/1.jpg"):
        draw(tmp_path / name)
    found = image_sites(tmp_path)
    assert [*found.files] == ["north", "south"]
    assert [*found.files["south"]] == ["a", "b"]
    assert found.files["south"]["b"] == (tmp_path / "south/b/10.png", tmp_path / "south/b/2.png")
    assert (found.count, found.ignored) == (4, ())
    assert kind_of(tmp_path) == "images"


def test_both_unicode_spellings_of_a_class_are_one_class_and_the_files_are_found(tmp_path: Path) -> None:
    draw(tmp_path / "a" / CAFE / "1.png")
    draw(tmp_path / "b" / CAFE_APART / "1.png")
    found = image_sites(tmp_path)
    assert [[*classes] for classes in found.files.values()] == [[CAFE], [CAFE]]
    assert all(path.exists() for classes in found.files.values() for path in classes[CAFE])


def test_two_spellings_of_one_site_are_refused(tmp_path: Path) -> None:
    draw(tmp_path / CAFE / "a/1.png")
    draw(tmp_path / CAFE_APART / "a/1.png")
    with pytest.raises(BadInput, match="move their files into one"):
        image_sites(tmp_path)


def test_what_is_passed_over_is_named_but_for_hidden_names(tmp_path: Path) -> None:
    draw(tmp_path / "a/x/1.png")
    draw(tmp_path / "a/loose.png")
    draw(tmp_path / "a/x/deeper/1.png")
    draw(tmp_path / "a/.hidden/1.png")
    for name in ("readme.md", "a/x/notes.txt", "a/x/.DS_Store", ".cache"):
        (tmp_path / name).write_text("x", encoding="utf-8")
    found = image_sites(tmp_path)
    names = {str(path.relative_to(tmp_path)) for path in found.ignored}
    assert names == {"readme.md", "a/loose.png", "a/x/notes.txt", "a/x/deeper"}
    assert found.count == 1


def test_empty_class_folders_and_sites_without_images_are_listed_as_such(tmp_path: Path) -> None:
    draw(tmp_path / "a/x/1.png")
    (tmp_path / "a/y").mkdir()
    (tmp_path / "b").mkdir()
    files = image_sites(tmp_path).files
    assert (files["a"]["y"], dict(files["b"])) == ((), {})


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    draw(tmp_path / "outside/x/1.png")
    (tmp_path / "root").mkdir()
    (tmp_path / "root/site").symlink_to(tmp_path / "outside")
    with pytest.raises(BadInput, match="a link out of"):
        image_sites(tmp_path / "root")


@pytest.mark.skipif(os.name != "posix", reason="other systems have no such names")
def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    try:
        os.mkdir(os.fsencode(tmp_path) + b"/\xff")
    except OSError:
        pytest.skip("this file system has no such names")
    with pytest.raises(BadInput, match="is not UTF-8"):
        image_sites(tmp_path)


def test_an_image_is_described_by_its_stored_size_its_mode_and_its_content(tmp_path: Path) -> None:
    grey = Image.fromarray(np.arange(6, dtype=np.uint16).reshape(2, 3) * 10_000)
    grey.save(tmp_path / "grey.png")
    found = image_info(tmp_path / "grey.png")
    assert (found.size, found.mode) == ((3, 2), "I;16")
    same, other = draw(tmp_path / "a.png", value=1), draw(tmp_path / "b.png", value=2)
    (tmp_path / "c.png").write_bytes(same.read_bytes())
    assert image_info(same).digest == image_info(tmp_path / "c.png").digest != image_info(other).digest


def test_an_image_that_is_cut_short_is_not_described_by_its_header(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "x.png")
    whole = (tmp_path / "x.png").read_bytes()
    (tmp_path / "x.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadInput, match=r"x\.png: damaged"):
        image_info(tmp_path / "x.png")


# ---- folders with mistakes


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("train/north/benign/1.png", "give {root}/train"),
        ("benign/1.png", "make a folder for each site"),
        ("1.png", "make a folder for each site"),
        ("north.xlsx", "export the table of each site as CSV"),
        ("north/data.csv", "lies too deep"),
        (".hidden/benign/1.png", "nothing to read; expected folder/site/class/image"),
    ],
)
def test_a_folder_with_nothing_to_read_is_refused_with_the_likeliest_mistake(
    tmp_path: Path, name: str, said: str
) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(b"x")
    assert said.format(root=tmp_path) in refusal(tmp_path)


def test_a_missing_folder_and_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    assert "there is no such folder" in refusal(tmp_path / "nowhere")
    assert "not a folder" in refusal(tmp_path / "file")


def test_tables_beside_images_do_not_make_it_a_folder_of_tables(tmp_path: Path) -> None:
    (tmp_path / "north.csv").write_text("a,y\n1,2\n", encoding="utf-8")
    assert kind_of(tmp_path) == "tables"
    draw(tmp_path / "north/x/1.png")
    assert kind_of(tmp_path) == "images"


# ---- tables


def test_tables_are_read_by_site_and_all_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "north.csv").write_text("a,y\n1,2\n", encoding="utf-8")
    (tmp_path / "south.CSV").write_bytes(b"a,y\n1,\x00\n")
    (tmp_path / "west.csv").write_text("a,y\n1\n", encoding="utf-8")
    (tmp_path / ".hidden.csv").write_text("a,y\n1,2\n", encoding="utf-8")
    (tmp_path / "notes.txt").write_text("x", encoding="utf-8")
    tables, faults = read_tables(tmp_path)
    assert [*tables] == ["north"]
    assert len(faults) == 2
    assert "south.CSV: not text" in faults[0]
    assert "west.csv, line 2: has 1 fields" in faults[1]
    assert sites.other_files(tmp_path) == (tmp_path / "notes.txt",)


def test_a_site_with_two_tables_and_a_link_out_are_said(tmp_path: Path) -> None:
    outside = tmp_path / "outside.csv"
    outside.write_text("a,y\n1,2\n", encoding="utf-8")
    root = tmp_path / "root"
    root.mkdir()
    (root / f"{CAFE}.csv").write_text("a,y\n1,2\n", encoding="utf-8")
    (root / f"{CAFE_APART}.csv").write_text("a,y\n1,2\n", encoding="utf-8")
    (root / "link.csv").symlink_to(outside)
    tables, faults = read_tables(root)
    assert [*tables] == [CAFE]
    assert ["has another table" in fault for fault in faults] == [True, False]
    assert "a link out of" in faults[1]


def test_a_parquet_file_is_a_site_like_any_other(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"a": [1, 2], "y": ["p", None]}), tmp_path / "north.parquet")
    tables, faults = read_tables(tmp_path)
    assert not faults
    assert dict(tables["north"].columns) == {"a": ("1", "2"), "y": ("p", None)}


def test_a_column_that_only_some_sites_have_is_named_with_the_sites_unless_it_is_left_out() -> None:
    tables = {"north": table(a=["1"], bmi=["2"]), "south": table(bmi=["2"], a=["1"]), "east": table(a=["1"])}
    [fault] = column_faults(tables)
    assert fault.startswith("column 'bmi' is at north, south, but not at east: add it there")
    assert column_faults(tables, ["bmi"]) == []


def test_a_numeric_column_with_words_at_one_site_is_said_with_file_and_line() -> None:
    tables = {"north": table("north", age=["1", "2"]), "south": table("south", age=["3", None, "unknown", "old"])}
    _, faults = kinds_of(tables, ["age"])
    assert faults["age"].startswith("south.csv, line 4: column 'age' has 'unknown', but only numbers at north")
    assert "(1 more such values)" in faults["age"]


def test_a_few_words_among_numbers_are_said_even_if_every_site_has_them() -> None:
    tables = {site: table(site, age=["1", "2", "n/a"]) for site in ("north", "south")}
    assert "has 'n/a', but numbers elsewhere" in kinds_of(tables, ["age"])[1]["age"]


def test_decimal_commas_are_numbers_that_are_written_wrongly() -> None:
    _, faults = kinds_of({"north": table("north", bmi=["27,5", "31,2", None])}, ["bmi"])
    assert faults["bmi"].startswith("north.csv, line 2: column 'bmi' has '27,5', but numbers elsewhere")
    assert "write decimals with a point" in faults["bmi"]


def test_kinds_are_found_where_sites_agree_and_told_where_they_do_not() -> None:
    tables = {
        "north": table(age=["1"], sex=["f"], ward=["1"], empty=[None]),
        "south": table(age=[None], sex=["1"], ward=["A"], empty=[None]),
    }
    kinds, faults = kinds_of(tables, ["age", "empty", "ward"], categorical=["ward"])
    assert kinds == {"age": "numeric", "empty": "numeric", "ward": "categorical"}
    assert faults == {}
    words = {"north": table(sex=["f", "m"]), "south": table(sex=["m", "1", "f"])}
    assert kinds_of(words, ["sex"]) == ({"sex": "categorical"}, {})


def test_rows_without_a_label_are_dropped_and_counted() -> None:
    rows = labelled_rows({"north": table(a=["1", "2", "3"], y=["p", None, "q"])}, "y")["north"]
    assert (rows.labels, rows.dropped, rows.table.column("a")) == (("p", "q"), 1, ("1", "3"))
    assert [*rows.table.places] == [2, 4]


def test_labels_that_are_equal_numbers_are_one_class_however_they_are_written() -> None:
    rows = labelled_rows({"north": table(y=["1", "0"]), "south": table(y=["1.0", "0.50", "1e0"])}, "y")
    assert [own.labels for own in rows.values()] == [("1", "0"), ("1", "0.5", "1")]


def test_codes_are_written_alike_where_a_program_has_added_a_fraction() -> None:
    codes: list[str | None] = ["1.0", "1", None, "01.0", "1.00", "-2.0", "1.0a", CAFE_APART]
    found = with_normalised_codes(table(a=codes, b=codes), ["a"])
    assert found.column("a") == ("1", "1", None, "01.0", "1.00", "-2", "1.0a", CAFE)
    assert found.column("b") == tuple(codes)


def test_labels_that_look_like_numbers_stay_as_they_are_among_words() -> None:
    assert labelled_rows({"north": table(y=["1.0", "high"])}, "y")["north"].labels == ("1.0", "high")


def test_both_unicode_spellings_of_a_label_are_one_class() -> None:
    rows = labelled_rows({"north": table(y=[CAFE]), "south": table(y=[CAFE_APART])}, "y")
    assert rows["north"].labels == rows["south"].labels == (CAFE,)


def test_labels_that_are_numbers_at_one_site_and_words_at_another_are_said() -> None:
    tables = {"north": table("north", y=["0", "1"]), "south": table("south", y=[None, "yes"])}
    [fault] = label_faults(tables, "y")
    assert fault.startswith("south.csv, line 3: the label 'y' is 'yes', but only numbers at north: write")


def test_a_site_without_any_label_is_said() -> None:
    [fault] = label_faults({"north": table("north", y=["a"]), "south": table("south", y=[None])}, "y")
    assert fault.startswith("south.csv: no row has a label in column 'y'")


def test_a_label_with_a_value_of_its_own_for_most_rows_is_no_class() -> None:
    measured: list[str | None] = [f"{k / 7:.3f}" for k in range(24)]
    [fault] = label_faults({"north": table(y=measured)}, "y")
    assert "24 different values in 24 rows" in fault
    assert label_faults({"north": table(y=["a", "b", "c", "d"])}, "y") == []


def test_a_missing_label_column_is_refused_with_the_file() -> None:
    with pytest.raises(BadInput, match=r"north\.csv: there is no column 'outcom'; did you mean 'outcome'"):
        label_faults({"north": table("north", outcome=["a"])}, "outcom")


def test_classes_are_ordered_as_numbers_if_they_all_are() -> None:
    assert sorted_classes(["10", "9", "-1", "9"]) == ("-1", "9", "10")
    assert sorted_classes(["b", "10", "9"]) == ("10", "9", "b")
