"""Tables: what is read, what is refused and where, and encoders that are fitted without pooling rows."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protofed.datasets.files import file_below
from protofed.datasets.tabular import (
    Encoder,
    Table,
    column_kinds,
    limits,
    read_csv,
    read_table,
    sum_of,
    summary_of,
)
from protofed.datasets.tabular.encoding import Moments, Numeric, OneHot
from protofed.errors import BadInput

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(text: str | bytes, name: str = "site.csv") -> Path:
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return written


def table(**columns: list[str | None]) -> Table:
    length = len(next(iter(columns.values())))
    return Table({name: tuple(cells) for name, cells in columns.items()}, "t.csv", range(2, 2 + length))


# ---- reading


def test_a_csv_file_is_read_by_column_with_missing_values_as_none(write: Write) -> None:
    path = write('age, ward ,bp\n 61 ,"north, old",?\n\n,NA,120.5\nNaN,south,nan\n')
    found = read_table(path)
    assert found.columns == {
        "age": ("61", None, None),
        "ward": ("north, old", None, "south"),
        "bp": (None, "120.5", None),
    }
    assert [found.place(row) for row in range(3)] == [f"{path}, line {n}" for n in (2, 4, 5)]


def test_a_byte_order_mark_is_no_part_of_the_first_name(write: Write) -> None:
    assert list(read_table(write("\ufeffage,bp\n1,2\n")).columns) == ["age", "bp"]


def test_names_can_be_given_for_a_file_without_a_header(write: Write) -> None:
    assert read_csv(write("1,2\n3,4\n", "x.data"), names=["a", "b"]).columns == {"a": ("1", "3"), "b": ("2", "4")}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n3\n", "line 3: has 1 fields, expected 2"),
        ("a,b\n1,2\n3,4,5\n", "line 3: has 3 fields, expected 2"),
        ("a,a\n1,2\n", "line 1: every column needs a name"),
        ("a,\n1,2\n", "line 1: every column needs a name"),
        ("", "line 1: every column needs a name"),
        ("a,b\n", "no rows"),
        ('a,b\n1,2\n3,"4\n', "after line 3: not a table in text"),
        (b"a,b\n1,\x81\n", "not text in UTF-8, UTF-16 or Windows-1252"),
        (b"a,b\n1,\xff\x07\n", "not text in UTF-8, UTF-16 or Windows-1252"),
        (b"\xff\xfea", "not a table in text"),
    ],
)
def test_a_damaged_csv_file_is_refused_with_file_and_line(write: Write, text: str | bytes, message: str) -> None:
    path = write(text)
    with pytest.raises(BadInput) as error:
        read_table(path)
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)


def test_sizes_are_bounded(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("a,b\n1,2\n3,4\n5,6\n")
    encoder = Encoder((Numeric("a", 0.0, 1.0, False),))
    read_table(path)
    for bound, most in (("MAX_ROWS", 2), ("MAX_COLUMNS", 1), ("MAX_CELLS", 5), ("MAX_BYTES", 10)):
        with monkeypatch.context() as patch:
            patch.setattr(limits, bound, most)
            with pytest.raises(BadInput, match="at most"):
                read_table(path)
    monkeypatch.setattr(limits, "MAX_CELLS", 2)
    with pytest.raises(BadInput, match="3 rows of 1 numbers"):
        encoder.encode(table(a=["1", "2", "3"]))


def test_a_file_of_another_kind_or_none_is_refused(write: Write, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"\.csv and \.parquet"):
        read_table(write("a\n1\n", "a.xlsx"))
    with pytest.raises(BadInput, match="no such file"):
        read_table(tmp_path / "absent.csv")


def test_a_file_must_lie_below_the_root(write: Write, tmp_path: Path) -> None:
    write("a\n1\n", "outside.csv")
    folder = tmp_path / "inside"
    folder.mkdir()
    (folder / "link.csv").symlink_to(tmp_path / "outside.csv")
    (folder / "own.csv").write_text("a\n1\n")
    assert file_below(folder, "own.csv", "") == folder / "own.csv"
    (folder / "elsewhere").symlink_to(tmp_path)
    for name in ("link.csv", "../outside.csv", "elsewhere/outside.csv"):
        with pytest.raises(BadInput, match="leads out of"):
            file_below(folder, name, "")
    with pytest.raises(BadInput, match=r"no such file\. Ask for it\."):
        file_below(folder, "absent.csv", "Ask for it.")


def test_a_parquet_file_gives_the_table_of_the_csv_file(write: Write, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"n": [1, None, 3], "x": [0.5, float("nan"), 2.0], "s": ["a ", "?", None], "b": [True, False, None]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "site.parquet")
    found = read_table(tmp_path / "site.parquet")
    assert found.columns == read_table(write("n,x,s,b\n1,0.5,a,True\n,NaN,?,False\n3,2,,\n")).columns
    assert found.place(1) == f"{tmp_path / 'site.parquet'}, row 2"


def test_a_parquet_file_that_is_damaged_nested_empty_or_large_is_refused(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "site.parquet"

    def refusal() -> str:
        with pytest.raises(BadInput) as error:
            read_table(path)
        assert str(error.value).startswith(str(path))
        return str(error.value)

    parquet.write_table(pyarrow.table({"a": [[1], [2]]}), path)
    assert "column 'a' is of type list" in refusal()
    parquet.write_table(pyarrow.table({"a": pyarrow.array([], pyarrow.int64())}), path)
    assert "no rows" in refusal()
    # 80 kB that compress to much less.
    parquet.write_table(pyarrow.table({"a": ["same"] * 10_000}), path, use_dictionary=False, compression="gzip")
    whole = path.read_bytes()
    read_table(path)
    path.write_bytes(whole[:-20])
    assert "cannot be read as Parquet" in refusal()
    path.write_bytes(whole)
    with monkeypatch.context() as patch:
        patch.setattr(limits, "MAX_BYTES", len(whole))
        assert f"at most {len(whole)}" in refusal()
    monkeypatch.setattr(limits, "MAX_ROWS", 9_999)
    assert "at most 9999 rows" in refusal()


def test_parquet_without_pyarrow_says_what_to_install(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BadInput, match=r"pip install 'protofed\[parquet\]'"):
        read_table(write("", "site.parquet"))


# ---- columns


@pytest.mark.parametrize("text", ["1", "-1.5", "+.5", "1.", "1e-3", "2E5"])
def test_numbers_are_read_in_their_usual_writings(text: str) -> None:
    assert table(a=[text]).numbers("a") == [float(text)]


@pytest.mark.parametrize("text", ["1_000", "inf", "1,5", "٣", "0x1", "1e31", "-1e400", "1 2", "e5"])
def test_what_is_not_a_number_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(BadInput, match=r"t\.csv, line 3: column 'a' has"):
        table(a=["1", text]).numbers("a")


def test_a_column_that_is_not_there_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(BadInput, match=r"t\.csv: there is no column 'agee'; did you mean 'age'"):
        table(age=["1"]).column("agee")


def test_a_column_is_numeric_if_all_sites_have_only_numbers_unless_told() -> None:
    tables = [
        table(a=["1", None], b=["1", "2"], c=["1", "2"], d=[None, None]),
        table(a=["2"], b=["x"], c=["3"], d=[None]),
    ]
    kinds = column_kinds(tables, given={"c": "categorical"})
    assert kinds == {"a": "numeric", "b": "categorical", "c": "categorical", "d": "numeric"}
    assert list(kinds) == ["a", "b", "c", "d"]


def test_sites_with_other_columns_are_refused() -> None:
    with pytest.raises(BadInput, match="only one has b"):
        column_kinds([table(a=["1"]), table(a=["1"], b=["2"])])
    with pytest.raises(BadInput, match="no column 'b'"):
        column_kinds([table(a=["1"])], given={"b": "numeric"})


# ---- encoding


def test_a_numeric_column_is_standardised_with_an_indicator_where_training_had_gaps() -> None:
    # Of 1, 3, 5 and 7 the mean is 4 and the variance (9 + 1 + 1 + 9) / 4 = 5.
    train = table(a=["1", "3", "5", "7", None], b=["1", "3", "5", "7", "4"])
    encoder = Encoder.fit(summary_of(train, {"a": "numeric", "b": "numeric"}))
    assert encoder.features == ("a", "a missing", "b")
    # b has mean 4 and variance 20 / 5 = 4. A gap that training did not have is filled all the same.
    found = encoder.encode(table(a=["9", None], b=[None, "8"]))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [[5 / np.sqrt(5), 0, 0], [0, 1, 2]], rtol=1e-6)


def test_a_categorical_column_is_one_hot_with_slots_for_other_and_missing() -> None:
    encoder = Encoder.fit(summary_of(table(w=["s", "n", None, "s"]), {"w": "categorical"}))
    assert encoder.features == ("w=n", "w=s", "w other", "w missing")
    found = encoder.encode(table(w=["s", "n", "east", None]))
    assert found.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def test_constant_and_empty_columns_become_zeros() -> None:
    train = table(c=["0.1"] * 7, e=[None] * 7)
    found = Encoder.fit(summary_of(train, {"c": "numeric", "e": "numeric"})).encode(train)
    np.testing.assert_allclose(found, [[0, 0, 1]] * 7, atol=1e-12)
    # Six sites of one row each: sums of 0.1 are not multiples of it, and the deviation comes out tiny.
    parts = [summary_of(table(c=["0.1"]), {"c": "numeric"})] * 6
    assert abs(Encoder.fit(sum_of(parts)).encode(table(c=["0.1"])).item()) < 1e-12


def test_a_large_mean_does_not_drown_a_small_deviation() -> None:
    # Deviation 1 at a mean of 1e12: the difference of squares of 1e24 would have lost it.
    sites = [table(a=["999999999999"]), table(a=["1000000000001"])]
    encoder = Encoder.fit(sum_of(summary_of(site, {"a": "numeric"}) for site in sites))
    assert encoder.encode(sites[1]).tolist() == [[1.0]]


cells = st.none() | st.integers(-1000, 1000).map(str) | st.floats(-1e6, 1e6).map(repr)
words = st.none() | st.sampled_from("abcde")


@given(st.lists(st.lists(st.tuples(cells, words), max_size=6), min_size=1, max_size=4))
def test_adding_summaries_of_sites_gives_the_encoder_of_the_pooled_rows(
    sites: list[list[tuple[str | None, str | None]]],
) -> None:
    def made(rows: list[tuple[str | None, str | None]]) -> Table:
        return Table({"x": tuple(x for x, _ in rows), "w": tuple(w for _, w in rows)}, "t.csv", range(len(rows)))

    federated = Encoder.fit(sum_of(summary_of(made(rows), {"x": "numeric", "w": "categorical"}) for rows in sites))
    numeric, onehot = federated.columns
    assert isinstance(numeric, Numeric)
    rows = [row for site in sites for row in site]
    values = np.array([float(x) for x, _ in rows if x is not None], dtype=np.float64)
    mean, deviation = (values.mean(), values.std()) if len(values) else (0.0, 0.0)
    assert numeric.mean == pytest.approx(mean, rel=1e-12, abs=1e-9)
    assert numeric.deviation == pytest.approx(deviation if deviation > 1e-6 else 1.0, rel=1e-9) or deviation <= 1e-6
    assert numeric.has_indicator == any(x is None for x, _ in rows)
    assert onehot == OneHot("w", tuple(sorted({w for _, w in rows if w is not None})))


def test_summaries_hold_no_rows_and_add_in_any_order() -> None:
    one = summary_of(table(a=["1", "2", None]), {"a": "numeric"})
    two = summary_of(table(a=["6"]), {"a": "numeric"})
    # Of 1, 2 and 6 the sum is 9, and the squared deviations from 3 are 4 + 1 + 9.
    assert one.columns == {"a": Moments(2, 1, 3.0, 0.5)}
    assert (one + two).columns == (two + one).columns == {"a": Moments(3, 1, 9.0, 14.0)}


def test_summaries_of_different_columns_or_kinds_cannot_be_added() -> None:
    site = table(a=["1"], b=["2"])
    with pytest.raises(BadInput, match="only one of them has the columns b"):
        summary_of(site, {"a": "numeric"}) + summary_of(site, {"a": "numeric", "b": "numeric"})
    with pytest.raises(BadInput, match="'a' is numeric in one"):
        summary_of(site, {"a": "numeric"}) + summary_of(site, {"a": "categorical"})


def test_a_column_of_too_many_categories_is_refused_by_name_at_a_site_and_in_the_sum() -> None:
    def site(first: int, last: int) -> Table:
        return table(pid=[f"p{k}" for k in range(first, last)])

    kinds = column_kinds([site(0, 200)])
    summary_of(site(0, 200), kinds)
    with pytest.raises(BadInput, match=r"t\.csv: column 'pid' has 201 categories; at most 200"):
        summary_of(site(0, 201), kinds)
    with pytest.raises(BadInput, match="column 'pid' has 210 categories"):
        summary_of(site(0, 110), kinds) + summary_of(site(100, 210), kinds)


def test_a_value_that_float32_cannot_hold_is_refused_with_its_place() -> None:
    encoder = Encoder((Numeric("a", 0.0, 1e-20, False),))
    with pytest.raises(BadInput, match=r"t\.csv, line 3: 'a' is too far"):
        encoder.encode(table(a=["0", "1e25"]))


def test_rows_can_be_taken_and_keep_their_places() -> None:
    found = table(a=["1", "2", "3"]).take(np.array([2, 0]))
    assert found.columns == {"a": ("3", "1")}
    assert found.place(0) == "t.csv, line 4"
