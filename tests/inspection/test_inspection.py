"""Inspecting users' own data: what is said of it, and a file that runs as it is."""

import itertools
import os
import re
import shutil
import struct
import tomllib
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from protofed import inspection
from protofed.datasets import sites
from protofed.errors import BadInput
from protofed.inspection import Inspection, inspect
from protofed.runs import compare
from protofed.runs.runner import execute
from protofed.tasks.custom import Custom

Draw = Callable[..., Path]


@pytest.fixture
def draw(tmp_path: Path) -> Draw:
    """Writes noise below the folder `data`, each image its own unless a seed is given."""
    seeds = iter(range(1000, 2000))

    def drawn(name: str, size: tuple[int, int] = (30, 30), mode: str = "RGB", seed: int | None = None) -> Path:
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(next(seeds) if seed is None else seed)
        Image.fromarray(noise.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).convert(mode).save(path)
        return path

    return drawn


@pytest.fixture
def scans(tmp_path: Path, draw: Draw) -> Path:
    """Two good sites, 6 and 5 images of two classes."""
    for k in range(6):
        for site, name in (("north", "a"), ("north", "b"), ("south", "a"), ("south", "b")):
            if site == "north" or k < 5:
                draw(f"{site}/{name}/{k}.png")
    return tmp_path / "data"


def lines(count: int, site: str) -> list[str]:
    """Patients of a site: identifier, age, sex, a constant, and an outcome."""
    return [f"{site}-{k},{40 + 7 * k % 31},{'fm'[k % 2]},7,{('well', 'ill')[k // 2 % 2]}" for k in range(count)]


HEADER = "patient,age,sex,device,outcome"


def write(path: Path, *rows: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    write(tmp_path / "data/north.csv", HEADER, *lines(20, "n"))
    write(tmp_path / "data/south.csv", HEADER, *lines(16, "s"))
    return tmp_path / "data"


def said(found: Inspection, severity: str, words: str) -> str:
    """The one finding with these words."""
    texts = [f"{finding.what}\n{finding.advice}" for finding in found.findings if finding.severity == severity]
    matching = [text for text in texts if words in text]
    assert len(matching) == 1, (words, texts)
    return matching[0]


# ---- images


def deepen(folder: Path, brightest: int) -> None:
    """Makes the images of a folder 16-bit grey, of values up to the given one."""
    for seed, path in enumerate(sorted(folder.rglob("*.png"))):
        values = np.random.default_rng(seed).integers(0, brightest, (30, 30), dtype=np.uint16)
        values[0, 0] = brightest
        Image.fromarray(values).save(path)


def test_the_bits_of_16_bit_grey_are_shown_and_written(scans: Path, tmp_path: Path) -> None:
    deepen(scans, 4095)
    found = inspect(scans, write=tmp_path / "x.toml")
    assert (
        "modes    I;16 22\ngrey     16-bit files use 12 bits: 0 to 4095 become 0 to 255, in every image" in found.text
    )
    written = tomllib.loads((tmp_path / "x.toml").read_text(encoding="utf-8"))["common"]["task"]
    assert (written["bits"], written["channels"]) == (12, 1)
    task = compare.load(tmp_path / "x.toml").configs[0].task
    assert isinstance(task, Custom)
    assert task.build().clients["north"].x.max() > 200


def test_sites_whose_16_bit_grey_uses_other_bits_are_warned_of(scans: Path) -> None:
    deepen(scans / "north", 4095)
    deepen(scans / "south", 65535)
    (warning,) = [finding for finding in inspect(scans).findings if "bits" in finding.what]
    assert warning.what.split("\n") == [
        "16-bit grey uses different numbers of bits:",
        "       north: 12",
        "       south: 16",
    ]
    assert "sites with fewer bits are darker" in warning.advice


def test_images_of_eight_bits_have_no_line_about_bits(scans: Path) -> None:
    assert " bits" not in inspect(scans).text
    assert "bits =" not in inspect(scans).toml


def test_colours_of_16_bits_are_warned_of(scans: Path) -> None:
    rows = b"".join(b"\0" + struct.pack(">6H", *[700 * k] * 6) for k in range(2))
    parts = ((b"IHDR", struct.pack(">IIBBBBB", 2, 2, 16, 2, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    )
    (scans / "north/a/deep.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
    (warning,) = [finding for finding in inspect(scans).findings if "16 bits" in finding.what]
    assert warning.what == "1 image with 16 bits for each colour:\n       north/a/deep.png"


def test_good_images_give_counts_sizes_modes_and_nothing_to_complain_of(scans: Path) -> None:
    found = inspect(scans)
    assert found.findings == ()
    table = found.text.split("\n\n")[1].splitlines()
    assert [line.split() for line in table] == [
        ["a", "b", "all", "train", "test", "majority"],
        ["north", "6", "6", "12", "9", "3", "50%"],
        ["south", "5", "5", "10", "7", "3", "50%"],
    ]
    assert found.text.startswith(f"{scans}: images of 2 sites, 2 classes, 22 examples\n")
    assert "sizes    smallest 30 × 30, median 30 × 30, largest 30 × 30\nmodes    RGB 22" in found.text
    assert "ignored" not in found.text


def test_what_is_said_of_both_sides_is_what_the_task_does(scans: Path, draw: Draw) -> None:
    shutil.copy(scans / "north/a/0.png", scans / "south/a/copy.png")
    shutil.copy(scans / "north/a/1.png", scans / "north/a/copy.png")
    draw("north/c/1.png").write_bytes(b"damaged")
    found = inspect(scans, skip_damaged=True)
    task = found.settings.build()
    assert {site: len(data) for site, data in task.clients.items()} == {s: len(r.train) for s, r in found.rows.items()}
    for site, rows in found.rows.items():
        assert task.tests[site].index.tolist() == rows.test.tolist()
    assert task.num_classes == 2


@pytest.mark.parametrize(
    ("sizes", "pixels", "model"),
    [
        ([(20, 20)], 28, "small_cnn"),
        ([(31, 40)], 28, "small_cnn"),
        ([(32, 40)], 32, "cnn_norm"),
        ([(20, 20), (100, 97), (400, 400)], 96, "cnn_norm"),  # the median of the shorter sides is 97
        ([(900, 300)], 128, "cnn_norm"),
    ],
)
def test_the_side_is_the_largest_known_one_not_above_the_median(
    tmp_path: Path, draw: Draw, sizes: list[tuple[int, int]], pixels: int, model: str
) -> None:
    for name in "ab":
        for k, size in enumerate(sizes * 2):
            draw(f"north/{name}/{k}.png", size=size)
    settings = inspect(tmp_path / "data").settings
    assert (settings.pixels, settings.model) == (pixels, model)


def test_the_share_of_the_most_frequent_class_is_said_of_each_site_and_over_all(tmp_path: Path, draw: Draw) -> None:
    counts = {"north": {"a": 6, "b": 2}, "south": {"b": 9}, "west": {"a": 4, "b": 4}}
    for site, classes in counts.items():
        for name, count in classes.items():
            for k in range(count):
                draw(f"{site}/{name}/{k}.png", size=(4, 4))
    _, table, note, *_ = inspect(tmp_path / "data").text.split("\n\n")
    assert [line.split()[-1] for line in table.splitlines()] == ["majority", "75%", "100%", "50%"]
    # 10 of class a, 15 of class b.
    assert "over all sites, 60% of the examples are of class 'b'" in note


def test_sizes_are_ordered_by_their_shorter_side(tmp_path: Path, draw: Draw) -> None:
    for k, size in enumerate([(90, 10), (20, 20), (30, 40)]):
        draw(f"north/a/{k}.png", size=size)
    assert "smallest 90 × 10, median 20 × 20, largest 30 × 40" in inspect(tmp_path / "data").text


def test_grey_images_have_one_channel_and_one_in_colour_makes_three(scans: Path, draw: Draw) -> None:
    for path in scans.rglob("*.png"):
        Image.open(path).convert("L").save(path)
    assert inspect(scans).settings.channels == 1
    draw("north/a/colour.png", mode="RGBA")
    found = inspect(scans)
    assert found.settings.channels == 3
    assert "modes    L 22, RGBA 1" in found.text


def test_damaged_images_are_an_error_with_ten_names_unless_they_may_be_skipped(scans: Path) -> None:
    for k in range(12):
        (scans / f"north/a/broken{k:02}.png").write_bytes(b"\x89PNG")
    found = inspect(scans)
    what = said(found, "error", "12 images cannot be decoded")
    assert "broken09.png" in what
    assert "broken10.png" not in what
    assert "… and 2 more" in what
    assert "--skip-damaged" in what
    skipped = inspect(scans, skip_damaged=True)
    said(skipped, "warning", "12 images cannot be decoded")
    assert (skipped.errors, skipped.settings.skip_damaged) == ((), True)


def test_copies_are_named_by_what_they_spoil(scans: Path) -> None:
    shutil.copy(scans / "north/a/0.png", scans / "south/a/x.png")
    shutil.copy(scans / "north/a/1.png", scans / "north/b/y.png")
    shutil.copy(scans / "north/a/2.png", scans / "north/a/z.png")
    found = inspect(scans)
    assert "north/a/0.png = south/a/x.png" in said(found, "warning", "1 image at more than one site")
    assert "north/a/1.png = north/b/y.png" in said(found, "warning", "1 image in more than one class")
    assert "north/a/2.png = north/a/z.png" in said(found, "warning", "1 image more than once in a class")


def test_what_is_not_read_is_named_by_what_it_is(scans: Path, draw: Draw) -> None:
    draw("north/loose.png")
    draw("north/a/deeper/1.png")
    write(scans / "labels.csv", "x")
    write(scans / "north/a/scan.nii", "x")
    write(scans / "north/a/.DS_Store", "x")
    found = inspect(scans)
    assert "north/loose.png" in said(found, "warning", "images outside class folders")
    assert "north/a/deeper" in said(found, "warning", "folders inside class folders")
    assert "labels.csv" in said(found, "warning", "tables among the images")
    assert "north/a/scan.nii" in said(found, "warning", "files of other kinds")
    assert "ignored  4 names" in found.text
    assert "DS_Store" not in found.text


def test_what_is_scarce_is_said(scans: Path, draw: Draw) -> None:
    draw("south/rare/1.png")
    draw("west/a/1.png")
    (scans / "north/unused").mkdir()
    (scans / "east").mkdir()
    found = inspect(scans)
    assert "north: rare" in said(found, "warning", "classes that a site does not have")
    assert "south: rare\n       west: a" in said(found, "warning", "classes with a single example at a site")
    assert "west: 1, 0 of them for testing" in said(found, "warning", "sites with fewer than 10 examples")
    said(found, "warning", "no site can test rare")
    said(found, "warning", "east has no images")
    said(found, "warning", "north has empty class folders: unused")
    assert found.errors == ()


def test_classes_that_a_person_would_take_for_one_are_said(scans: Path, draw: Draw) -> None:
    (scans / "south/a").rename(scans / "south/A ")
    assert "'A ', 'a'" in said(inspect(scans), "warning", "differ only in case or spaces")


def test_one_site_is_a_warning_and_one_class_an_error(scans: Path) -> None:
    shutil.rmtree(scans / "south")
    said(inspect(scans), "warning", "only one site")
    shutil.rmtree(scans / "north/b")
    said(inspect(scans), "error", "all examples are of class 'a'")


def test_sites_that_are_copies_of_each_other_cannot_be_tested(scans: Path) -> None:
    shutil.rmtree(scans / "south")
    shutil.copytree(scans / "north", scans / "south")
    said(inspect(scans), "error", "no site has an example for testing")


def test_nothing_but_damage_is_an_error_even_if_it_may_be_skipped(scans: Path) -> None:
    for path in scans.rglob("*.png"):
        path.write_bytes(b"x")
    found = inspect(scans, skip_damaged=True, write=scans / "x.toml")
    said(found, "error", "nothing left to learn from")
    assert not (scans / "x.toml").exists()


def test_a_label_for_images_is_said_to_be_of_no_use(scans: Path) -> None:
    found = inspect(scans, label="diagnosis")
    said(found, "warning", "label column")
    assert found.settings.label is None


def test_many_classes_go_down_and_many_sites_are_cut(tmp_path: Path, draw: Draw) -> None:
    for site in range(14):
        for name in range(10):
            draw(f"s{site:02}/c{name}/1.png", size=(4, 4))
    table = inspect(tmp_path / "data").text.split("\n\n")[1].splitlines()
    assert table[0].split() == [f"s{site:02}" for site in range(12)]
    assert table[1].split() == ["c0", *["1"] * 12]
    assert [line.split()[0] for line in table[-4:]] == ["train", "test", "majority", "…"]
    assert table[-1] == "… and 2 more columns"


def test_names_cannot_command_a_terminal(scans: Path, draw: Draw) -> None:
    draw("\x1b[31mred/a/1.png")
    text = inspect(scans).text
    assert "\x1b" not in text
    assert "\\x1b[31mred" in text


# ---- tables


def test_good_tables_give_counts_and_columns(tables: Path) -> None:
    found = inspect(tables, label="outcome")
    assert found.text.startswith(f"{tables}: tables of 2 sites, 2 classes, 36 examples\n")
    _, grid, _, columns, *_ = found.text.split("\n\n")
    assert [line.split() for line in grid.splitlines()] == [
        ["ill", "well", "all", "train", "test", "majority"],
        ["north", "10", "10", "20", "15", "5", "50%"],
        ["south", "8", "8", "16", "12", "4", "50%"],
    ]
    rows = {line.split()[0]: line.split()[1:] for line in columns.splitlines()[1:]}
    assert rows["age"] == ["numeric", "0%", "40", "to", "69"]
    assert rows["sex"] == ["categorical", "0%", "f,", "m"]
    assert "outcome" not in rows
    assert found.errors == ()


def test_identifiers_and_constants_are_left_out_and_said(tables: Path) -> None:
    found = inspect(tables, label="outcome")
    assert "identifier" in said(found, "warning", "column 'patient'")
    assert "the same value everywhere, '7'" in said(found, "warning", "column 'device'")
    assert found.settings.leave_out == ("patient", "device")


@pytest.mark.parametrize(
    ("name", "value", "is_left_out"),
    [
        ("visit", lambda k: k + 1, True),  # counts from 1 at every site
        ("patient_id", lambda k: 1000 + 37 * k, True),
        ("steps", lambda k: 1000 + 37 * k, False),  # whole and all different, but neither a count nor named as one
        ("id", lambda k: k // 2, False),  # repeats
        ("weight", lambda k: 50.5 + k, False),
        ("note", lambda k: f"seen on day {k}", True),
        ("town", lambda k: f"t{k // 2}", False),
    ],
)
def test_an_identifier_is_told_from_a_measurement(
    tmp_path: Path, name: str, value: Callable[[int], object], is_left_out: bool
) -> None:
    for site in ("north", "south"):
        rows = [f"{value(k)},{(7 * k) % 5},{'pq'[k % 2]}" for k in range(12)]
        write(tmp_path / f"data/{site}.csv", f"{name},dose,y", *rows, f",{site == 'north':d},p")
    assert (name in inspect(tmp_path / "data", label="y").settings.leave_out) == is_left_out


def test_a_column_with_too_many_words_is_left_out(tmp_path: Path) -> None:
    rows = [f"w{k // 2},{k % 7},{'pq'[k % 2]}" for k in range(402)]
    write(tmp_path / "data/north.csv", "word,dose,y", *rows)
    found = inspect(tmp_path / "data", label="y")
    assert "201 different words" in said(found, "warning", "column 'word'")
    found.settings.build()


def test_without_a_label_the_columns_that_could_be_it_are_named_the_likeliest_first(tables: Path) -> None:
    found = inspect(tables)
    text = said(found, "error", "which column is the label?")
    assert "It could be 'outcome' (ill, well); or 'sex' (f, m)\n" in text
    assert "patient" not in text
    assert f"{tables}: tables of 2 sites\n" in found.text


def test_a_label_that_is_misspelt_is_an_error(tables: Path) -> None:
    assert "did you mean 'outcome'" in said(inspect(tables, label="outcom"), "error", "no column 'outcom'")


def test_values_are_counted_by_what_they_are_not_by_how_they_are_written(tables: Path) -> None:
    rows = [f"e-{k},{k * 3 % 10}{'.0' * (k % 2)},f,7.0,{('well', 'ill')[k // 2 % 2]}" for k in range(20)]
    write(tables / "east.csv", HEADER, *rows, *(row.replace("e-", "x-") for row in rows))
    for name in ("north", "south"):
        (tables / f"{name}.csv").unlink()
    found = inspect(tables, label="outcome")
    assert [line.split()[3:] for line in found.facts if line.startswith("age")] == [
        ["0", "to", "9", "(10", "different)"]
    ]
    said(found, "warning", "column 'device' has the same value everywhere")


def test_missing_labels_and_values_are_counted(tables: Path) -> None:
    write(tables / "east.csv", HEADER, *(line.replace("f,7", ",7") for line in lines(10, "e")), "e-x,50,m,7,")
    found = inspect(tables, label="outcome")
    assert "east: 1 of 11" in said(found, "warning", "rows without a label")
    # 5 of 47 cells.
    assert [line.split()[2] for line in found.facts if line.startswith("sex")] == ["11%"]


def test_a_column_without_values_at_a_site_is_said(tables: Path) -> None:
    write(tables / "east.csv", HEADER, *(f"e-{k},,f,7,{('well', 'ill')[k % 2]}" for k in range(10)))
    said(inspect(tables, label="outcome"), "warning", "column 'age' has no value at east")


def test_a_word_in_a_column_of_measurements_is_an_error_with_file_and_line(tables: Path) -> None:
    write(tables / "east.csv", HEADER, *lines(10, "e"), "e-x,unknown,f,7,ill")
    found = inspect(tables, label="outcome")
    said(found, "error", f"{tables / 'east.csv'}, line 12: column 'age' has 'unknown'")
    assert inspect(tables, label="outcome", categorical=["age"]).errors == ()


def test_a_number_that_is_too_large_is_an_error_with_file_and_line(tables: Path) -> None:
    write(tables / "east.csv", HEADER, *lines(10, "e"), "e-x,1e40,f,7,ill")
    said(inspect(tables, label="outcome"), "error", f"{tables / 'east.csv'}, line 12: column 'age' has '1e40'")


def test_words_and_numbers_in_a_column_of_few_values_are_taken_for_codes(tmp_path: Path) -> None:
    for site, wards in (("north", "123"), ("south", "12A")):
        rows = [f"{wards[k % 3]},{k * 3 % 11},{'pq'[k % 2]}" for k in range(12)]
        write(tmp_path / f"data/{site}.csv", "ward,dose,y", *rows)
    found = inspect(tmp_path / "data", label="y")
    said(found, "warning", "line 4: column 'ward' has 'A', but only numbers at north")
    assert found.settings.categorical == ("ward",)
    found.settings.build()


def test_a_column_that_a_site_lacks_is_an_error_unless_it_is_left_out(tables: Path) -> None:
    write(
        tables / "east.csv", "patient,sex,device,outcome", *(f"e-{k},f,7,{('well', 'ill')[k % 2]}" for k in range(10))
    )
    said(inspect(tables, label="outcome"), "error", "column 'age' is at north, south, but not at east")
    found = inspect(tables, label="outcome", leave_out=["age"])
    assert found.errors == ()
    found.settings.build()


def test_every_table_that_cannot_be_read_is_named_and_so_is_what_is_no_table(tables: Path) -> None:
    write(tables / "east.csv", HEADER, "1,2")
    (tables / "west.csv").write_bytes(b"a,y\n1,\x00\n")
    write(tables / "old.xlsx", "x")
    found = inspect(tables, label="outcome")
    said(found, "error", "east.csv, line 2: has 2 fields")
    said(found, "error", "west.csv: not text in UTF-8, UTF-16 or Windows-1252")
    assert "old.xlsx" in said(found, "warning", "not read")


def test_the_same_table_at_two_sites_is_an_error_and_repeated_rows_a_warning(tables: Path) -> None:
    shutil.copy(tables / "north.csv", tables / "west.csv")
    found = inspect(tables, label="outcome")
    assert f"{tables / 'north.csv'} = {tables / 'west.csv'}" in said(found, "error", "the same file at several sites")
    said(found, "warning", "20 rows repeat another row")


def test_columns_that_are_not_there_cannot_be_left_out(tables: Path) -> None:
    said(inspect(tables, label="outcome", leave_out=["agee"]), "error", "no column 'agee'")


def test_tables_with_no_useful_column_are_an_error(tmp_path: Path) -> None:
    write(tmp_path / "data/north.csv", "device,y", *(f"7,{'pq'[k % 2]}" for k in range(12)))
    said(inspect(tmp_path / "data", label="y"), "error", "no column is left to learn from")


# ---- the file


@pytest.mark.parametrize("kind", ["scans", "tables"])
def test_the_file_runs_as_it_is(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request.getfixturevalue(kind)
    monkeypatch.chdir(tmp_path)
    found = inspect(Path("data"), label="outcome" if kind == "tables" else None, write=Path("our own.toml"))
    written = "Written: our own.toml\nRun it with: protofed compare 'our own.toml'\nIt takes "
    assert written in found.text
    loaded = compare.load(Path("our own.toml"), overrides=["training.rounds=1", "training.epochs=1"])
    assert [*loaded.runs["data"]] == ["local", "fedavg", "fedbn", "fpl", "fedproto"]
    for seeds in loaded.runs["data"].values():
        task = seeds[0].task
        assert isinstance(task, Custom)
        assert replace(task, leave_out=tuple(task.leave_out), categorical=(), hold_out=()) == found.settings
        result = execute(seeds[0].experiment())
        assert set(result.rounds[-1].domains) == {"north", "south"}


def test_awkward_names_come_back_from_the_file_as_they_were(tmp_path: Path) -> None:
    name = 'a "b" \\ ü\x7f'
    column = f'"{name.replace(chr(34), chr(34) * 2)}"'
    for site, step in (("north", 3), ("south", 4)):
        rows = [f"7,{k * step % 11},{'pq'[k % 2]}" for k in range(12)]
        write(tmp_path / name / f"{site}.csv", f"{column},dose,y", *rows)
    inspect(tmp_path / name, label="y", write=tmp_path / "own.toml")
    loaded = compare.load(tmp_path / "own.toml").configs[0].task
    assert isinstance(loaded, Custom)
    assert (loaded.path, list(loaded.leave_out)) == (str(tmp_path / name), [name])
    loaded.build()


def test_the_file_on_the_page_for_users_is_an_experiment() -> None:
    page = Path(__file__).parents[2] / "docs" / "your-data.md"
    [toml] = re.findall(r"^```toml\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    task = compare.parse(tomllib.loads(toml), "your-data.md").configs[0].task
    assert isinstance(task, Custom)
    assert (task.label, task.model) == ("outcome", "mlp_norm")


@pytest.mark.parametrize("kind", ["scans", "tables"])
def test_what_is_said_does_not_depend_on_the_order_in_which_the_system_lists(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = request.getfixturevalue(kind)
    for name in ("z.txt", "y.txt"):
        write(folder / name, "x")
        if kind == "scans":
            write(folder / "north/a" / name, "x")
    texts = []
    listed = os.listdir
    for order in (1, -1):
        monkeypatch.setattr(os, "listdir", lambda path, order=order: sorted(listed(path))[::order])
        texts.append(inspect(folder, label="outcome").text)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", ["scans", "tables"])
def test_every_setting_of_the_file_is_explained(kind: str, request: pytest.FixtureRequest) -> None:
    text = inspect(request.getfixturevalue(kind), label="outcome").toml
    lines = text.splitlines()
    keys = [line.split(" = ")[0] for line in lines if " = " in line and not line.startswith("#")]
    images = ["pixels", "channels", "skip_damaged", "max_damaged"]
    own = images if kind == "scans" else ["label", "leave_out", "categorical"]
    first = ["title", "seeds", "summary", "name", "path", "kind", *own, "model"]
    assert keys[: len(first)] == first
    rest = ["balance", "test_fraction", "seed", "rounds", "epochs", "batch_size", "optimizer"]
    assert keys[len(first) :] == [*rest, "name", *["name"] * 5]
    unexplained = [b for a, b in itertools.pairwise(lines) if " = " in b and not a.startswith("#") and b[0] != "#"]
    # The kind follows from the path, and one comment is for the share and the seed of its draw.
    assert [line.split(" = ")[0] for line in unexplained] == ["name", "kind", "seed", "name"]


def test_batches_are_no_larger_than_most_sites(tmp_path: Path, draw: Draw) -> None:
    for name, count in (("north", 24), ("south", 8), ("west", 30)):
        for k in range(count):
            draw(f"{name}/{'ab'[k % 2]}/{k}.png", size=(4, 4))
    # 18, 6 and 22 or 23 of them are for training.
    assert tomllib.loads(inspect(tmp_path / "data").toml)["common"]["training"]["batch_size"] == 16


def test_a_file_that_is_there_is_never_written_over(
    scans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write(tmp_path / "own.toml", "mine")
    monkeypatch.setattr(sites, "kind_of", lambda path: pytest.fail("the target is checked before anything is read"))
    with pytest.raises(BadInput, match=r"own\.toml: exists already"):
        inspect(scans, write=target)
    with pytest.raises(BadInput, match="exists already"):
        inspection.write_new(target, "other")
    assert target.read_text(encoding="utf-8") == "mine\n"


def test_a_dangling_link_counts_as_a_file(scans: Path, tmp_path: Path) -> None:
    (tmp_path / "own.toml").symlink_to(tmp_path / "nowhere")
    with pytest.raises(BadInput, match="exists already"):
        inspect(scans, write=tmp_path / "own.toml")


def test_a_file_that_cannot_be_written_is_refused_and_leaves_nothing_behind(scans: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no folder"):
        inspect(scans, write=tmp_path / "nowhere/own.toml")
    # Short enough to be looked for, too long for the name under which it would be written first.
    with pytest.raises(BadInput, match="cannot be written"):
        inspect(scans, write=tmp_path / ("x" * 250))
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_nothing_is_written_while_there_are_errors(scans: Path, tmp_path: Path) -> None:
    (scans / "north/a/0.png").write_bytes(b"x")
    found = inspect(scans, write=tmp_path / "own.toml")
    assert "No experiment was written" in found.text.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    with pytest.raises(BadInput, match="1 error"):
        found.toml  # noqa: B018


# ---- what clinics' tables look like


def measured(site: str, count: int = 24) -> list[str]:
    """Rows with decimals and a word with an accent."""
    return [f"{k % 7}.{k % 10},{'Größe' if k % 3 else 'é'},{('well', 'ill')[k // 2 % 2]}" for k in range(count)]


def exported(path: Path, rows: list[str], separator: str, decimal: str, encoding: str) -> Path:
    """The rows as another program would write them."""
    lines = [
        separator.join(cell.replace(".", decimal) for cell in row.split(",")) for row in ("dose,kind,outcome", *rows)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(("\r\n".join(lines) + "\r\n").encode(encoding))
    return path


def inputs(folder: Path) -> dict[str, list[list[float]]]:
    return {s: d.x.tolist() for s, d in Custom(str(folder), "tables", label="outcome").build().clients.items()}


@pytest.mark.parametrize(
    ("separator", "decimal", "encoding", "words"),
    [
        (";", ",", "cp1252", "semicolons between columns, decimal commas, text in Windows-1252 (Latin-1)"),
        ("\t", ",", "utf-16", "tabs between columns, decimal commas, text in UTF-16"),
        ("|", ".", "utf-16-le", "bars between columns, text in UTF-16"),
        (";", ".", "utf-8-sig", "semicolons between columns"),
        (",", ".", "latin-1", "text in Windows-1252 (Latin-1)"),
        (",", ".", "utf-8-sig", ""),
    ],
)
def test_tables_of_other_formats_are_read_as_they_are_meant_and_said(
    tmp_path: Path, separator: str, decimal: str, encoding: str, words: str
) -> None:
    usual, other = tmp_path / "usual", tmp_path / "other"
    for folder in (usual, other):
        exported(folder / "north.csv", measured("n"), ",", ".", "utf-8")
    exported(usual / "south.csv", measured("s", 20), ",", ".", "utf-8")
    exported(other / "south.csv", measured("s", 20), separator, decimal, encoding)
    assert inputs(usual) == inputs(other)
    formats = [f.what for f in inspect(other, label="outcome").findings if "unusual format" in f.what]
    assert formats == ([f"tables that are read in an unusual format:\n       {other}/south.csv: {words}"] * bool(words))
    # The advice is to export the file as the other folder has it: then nothing is said.
    assert not [f for f in inspect(usual, label="outcome").findings if "format" in f.what]


@pytest.mark.parametrize(
    ("rows", "words", "corrected"),
    [
        (["1,5;a", "2.5;b"], "decimals are written with a comma .* and with a point .*: write all of them with a point",
         ["1.5;a", "2.5;b"]),
        (["1,500;a", "2,750;b"], "'1,500', whose comma may stand before decimals or thousands: .*with a point",
         ["1.500;a", "2.750;b"]),
        (["1,500;a", "2,750;b"], "thousands without a sign", ["1500;a", "2750;b"]),
    ],
)  # fmt: skip
def test_decimals_that_may_be_meant_otherwise_are_refused_until_the_advice_is_followed(
    tmp_path: Path, rows: list[str], words: str, corrected: list[str]
) -> None:
    path = write(tmp_path / "data/north.csv", "dose;y", *rows * 8)
    (error,) = [f for f in inspect(tmp_path / "data", label="y").errors if "north.csv" in f.what]
    assert re.search(words, error.what)
    write(path, "dose;y", *corrected * 8)
    assert inspect(tmp_path / "data", label="y").errors == ()


def test_a_zero_before_the_comma_or_other_digits_behind_it_are_decimals(tmp_path: Path) -> None:
    write(tmp_path / "data/north.csv", "dose;weight;y", *["0,125;1,500;a", "0,250;71,25;b"] * 8)
    found = inspect(tmp_path / "data", label="y")
    assert found.errors == ()
    assert "0.125 to 0.25" in found.text
    assert "1.5 to 71.25" in found.text


def test_rare_classes_are_said_and_the_file_repeats_them(tmp_path: Path) -> None:
    rows = [f"{k % 16},{'rare' if k % 8 == 0 else 'usual'}" for k in range(48)]
    write(tmp_path / "data/north.csv", "x,y", *rows)
    write(
        tmp_path / "data/south.csv",
        "x,y",
        *(row.replace("usual", "rare") if k % 2 else row for k, row in enumerate(rows)),
    )
    found = inspect(tmp_path / "data", label="y")
    what = said(found, "warning", "classes that are much rarer than others")
    assert "north: 42 of class 'usual', 6 of class 'rare'" in what
    assert "south" not in what
    assert "balance = true" in found.toml
    write(tmp_path / "data/north.csv", "x,y", *(f"{k % 16},{'rare' if k % 3 == 0 else 'usual'}" for k in range(48)))
    assert "balance = false" in inspect(tmp_path / "data", label="y").toml


def test_people_with_several_rows_are_found_and_kept_together(tmp_path: Path) -> None:
    for site in ("north", "south"):
        rows = [f"{site}{k // 2},{k % 9},{'pq'[k // 2 % 2]}" for k in range(60)]
        write(tmp_path / f"data/{site}.csv", "patient_id,x,y", *rows, "both,3,p", "both,4,p")
    found = inspect(tmp_path / "data", label="y")
    assert "add --group COLUMN" in said(found, "warning", "column 'patient_id' may name people who have several rows")
    grouped = inspect(tmp_path / "data", label="y", group="patient_id")
    assert not [f for f in grouped.findings if "may name people" in f.what]
    assert "both: north, south" in said(grouped, "warning", "1 group (patients) at more than one site")
    assert 'group = "patient_id"' in grouped.toml
    patients = {
        side: {grouped.examples["north"].groups[row] for row in rows.tolist()}
        for side, rows in vars(grouped.rows["north"]).items()
    }
    assert not patients["train"] & patients["test"]
    assert "both" in patients["train"]
    said(inspect(tmp_path / "data", label="y", group="patient"), "error", "there is no column 'patient' to keep")
    said(inspect(tmp_path / "data", label="y", group="y"), "error", "'y' is the label: it cannot keep rows together")


def test_a_pattern_finds_the_patients_of_images(scans: Path, draw: Draw) -> None:
    for site in ("north", "south"):  # otherwise every patient would be at both
        for path in (scans / site).rglob("*.png"):
            path.rename(path.with_name(f"{site}{path.name}"))
    pattern = r"^([a-z]+\d)\.png"
    found = inspect(scans, group=pattern)
    assert found.errors == ()
    assert found.examples["north"].groups[:3] == ("north0", "north1", "north2")
    assert "group = " in found.toml
    draw("north/a/overview.png")
    assert "such as" in said(inspect(scans, group=pattern), "error", "overview.png: group =")


def test_enough_examples_give_a_validation_share_and_few_do_not(tmp_path: Path) -> None:
    write(tmp_path / "data/north.csv", "x,y", *(f"{k % 17},{'pq'[k % 2]}" for k in range(200)))
    found = inspect(tmp_path / "data", label="y")
    assert "validation" in found.text.split("\n\n")[1].splitlines()[0]
    written = tomllib.loads(found.toml)
    assert (written["summary"], written["common"]["task"]["validation_fraction"]) == ("validation", 0.15)
    assert written["common"]["evaluation"]["patience"] > 0
    assert len(found.rows["north"].validation) == 30
    write(tmp_path / "data/north.csv", "x,y", *(f"{k % 17},{'pq'[k % 2]}" for k in range(199)))
    assert "validation" not in tomllib.loads(inspect(tmp_path / "data", label="y").toml)["summary"]
