"""Files that were made to do harm (row S7): none runs code, none ends the process, each ends in an error with a name.

A door is a way by which bytes come in: the wire, the kept sets, and each reader of files. Behind the pickles stands a
canary: whoever loads one of them makes a file.
"""

import contextlib
import gzip
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from clocks import PATIENCE, processor_time_below
from faults.parquet_files import MOST, Claims, column_file, honest
from protofed import wire
from protofed.datasets import cache, formats, images, tabular
from protofed.datasets.examples import Dataset, Examples, Split
from protofed.datasets.hub import hub_split
from protofed.datasets.tabular import parquet_pages, parquet_reader
from protofed.datasets.tabular.parquet_pages import pages_of
from protofed.errors import BadInput
from protofed.wire import WireError

SECONDS = 1.0
"""The most processor time that a refusal may take."""
LIKE = {"a": torch.zeros(1, dtype=torch.uint8)}


class Canary:
    """What makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


# ---- doors


def through_the_wire(content: bytes, folder: Path) -> None:
    wire.decode(content, LIKE)


def through_the_arrays_of_the_wire(content: bytes, folder: Path) -> None:
    wire.decode_arrays(content)


def through_a_csv(content: bytes, folder: Path) -> None:
    (folder / "x.csv").write_bytes(content)
    tabular.read_table(folder / "x.csv")


def through_a_parquet(content: bytes, folder: Path) -> None:
    pytest.importorskip("pyarrow")
    (folder / "x.parquet").write_bytes(content)
    tabular.read_table(folder / "x.parquet")


def through_a_matlab_file(content: bytes, folder: Path) -> None:
    formats.matlab_images(content, 1 << 20)


def through_an_idx_file(content: bytes, folder: Path) -> None:
    formats.idx(content, 3)


def through_a_libsvm_file(content: bytes, folder: Path) -> None:
    formats.libsvm(content, 3, 256, 10)


def through_a_cifar_file(content: bytes, folder: Path) -> None:
    formats.cifar(content, (10,))


def through_an_image(content: bytes, folder: Path) -> None:
    (folder / "x.png").write_bytes(content)
    images.decoded(folder / "x.png", 8)


DOORS: dict[str, Callable[[bytes, Path], None]] = {
    "wire": through_the_wire,
    "arrays": through_the_arrays_of_the_wire,
    "csv": through_a_csv,
    "parquet": through_a_parquet,
    "matlab": through_a_matlab_file,
    "idx": through_an_idx_file,
    "libsvm": through_a_libsvm_file,
    "cifar": through_a_cifar_file,
    "image": through_an_image,
}


@pytest.fixture(autouse=True, scope="module")
def _imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What the doors import when they are first used is not part of a refusal."""
    for door in DOORS.values():
        with contextlib.suppress(WireError, BadInput, pytest.skip.Exception):
            door(b"", tmp_path_factory.mktemp("imported"))


def refused(door: str, content: bytes, folder: Path) -> str:
    """What is said of bytes at a door; they must be refused there, and soon."""
    with processor_time_below(SECONDS), pytest.raises((WireError, BadInput)) as error:
        DOORS[door](content, folder)
    assert len(str(error.value)) < 2000
    return str(error.value)


# ---- pickles under every name


def torch_file(canary: Canary) -> bytes:
    """As torch.save would write it."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(canary, protocol=2))
        file.writestr("archive/version", "3\n")
    return content.getvalue()


def npy_file(canary: Canary) -> bytes:
    content = io.BytesIO()
    np.save(content, np.array([canary], dtype=object), allow_pickle=True)
    return content.getvalue()


def npz_file(canary: Canary) -> bytes:
    content = io.BytesIO()
    np.savez(content, a=np.array([canary], dtype=object))
    return content.getvalue()


PICKLES: dict[str, Callable[[Canary], bytes]] = {
    "protocol 2": lambda canary: pickle.dumps(canary, protocol=2),
    "protocol 5": lambda canary: pickle.dumps(canary, protocol=5),
    "torch.save": torch_file,
    ".npy": npy_file,
    ".npz": npz_file,
    "compressed": lambda canary: gzip.compress(pickle.dumps(canary, protocol=5)),
    "in a header": lambda canary: safetensors(pickle.dumps(canary, protocol=5)),
    "behind a header": lambda canary: safetensors(b"{}") + pickle.dumps(canary, protocol=5),
}


def test_the_canary_sings_where_pickles_are_loaded(tmp_path: Path) -> None:
    for number, kind in enumerate(("protocol 2", "protocol 5")):
        pickle.loads(PICKLES[kind](Canary(tmp_path / str(number))))  # noqa: S301
        assert (tmp_path / str(number)).exists()
    np.load(io.BytesIO(npy_file(Canary(tmp_path / "npy"))), allow_pickle=True)
    assert (tmp_path / "npy").exists()


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("kind", PICKLES)
def test_a_pickle_is_refused_at_every_door_and_not_loaded(tmp_path: Path, kind: str, door: str) -> None:
    refused(door, PICKLES[kind](Canary(tmp_path / "canary")), tmp_path)
    assert not (tmp_path / "canary").exists()


def test_a_pickle_that_is_text_is_text_to_a_table(tmp_path: Path) -> None:
    content = pickle.dumps(Canary(tmp_path / "canary"), protocol=0).replace(b",", b"")
    (tmp_path / "x.csv").write_bytes(content)
    assert len(tabular.read_table(tmp_path / "x.csv")) > 0
    assert not (tmp_path / "canary").exists()


# ---- safetensors


def safetensors(header: bytes | str, data: bytes = b"") -> bytes:
    header = header if isinstance(header, bytes) else header.encode()
    return len(header).to_bytes(8, "little") + header + data


def one(dtype: Any = "U8", shape: Any = (1,), offsets: Any = (0, 1)) -> str:
    return json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}})


def entry(begin: int, end: int) -> str:
    return f'{{"dtype":"U8","shape":[{end - begin}],"data_offsets":[{begin},{end}]}}'


HEADERS: dict[str, bytes] = {
    "nothing": b"",
    "half a length": b"\x10\0\0\0",
    "length 0": (0).to_bytes(8, "little") + b"{}",
    "length 1": (1).to_bytes(8, "little") + b"{}",
    "length beyond the end": (100).to_bytes(8, "little") + b"{}",
    "length 2^62": (2**62).to_bytes(8, "little") + b"{}",
    "length 2^63 - 1": (2**63 - 1).to_bytes(8, "little") + b"{}",
    "length -1": (-1).to_bytes(8, "little", signed=True) + b"{}",
    "overlapping": safetensors(f'{{"a":{entry(0, 2)},"b":{entry(1, 3)}}}', b"abc"),
    "the same bytes twice": safetensors(f'{{"a":{entry(0, 1)},"b":{entry(0, 1)}}}', b"a"),
    "a hole": safetensors(f'{{"a":{entry(0, 1)},"b":{entry(2, 3)}}}', b"abc"),
    "offsets beyond the end": safetensors(one(offsets=(0, 2**40), shape=(2**40,)), b"a"),
    "offsets turned": safetensors(one(offsets=(1, 0)), b"a"),
    "offsets below zero": safetensors(one(offsets=(-1, 0)), b"a"),
    "offsets of 2^64": safetensors(one(offsets=(0, 2**64)), b"a"),
    "three offsets": safetensors(one(offsets=(0, 1, 2)), b"a"),
    "no offsets": safetensors('{"a":{"dtype":"U8","shape":[1]}}', b"a"),
    "a name twice": safetensors(f'{{"a":{entry(0, 1)},"a":{entry(0, 1)}}}', b"a"),
    "a name twice, escaped": safetensors(f'{{"a":{entry(0, 1)},"\\u0061":{entry(0, 1)}}}', b"a"),
    "a shape twice": safetensors('{"a":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}}', b"a"),
    "an unknown type": safetensors(one("Q7"), b"a"),
    "a type of four bits": safetensors(one("F4", (1,)), b"a"),
    "a type that is a number": safetensors(one(7), b"a"),
    "a type that is Python": safetensors(one("__import__('os').system('true')"), b"a"),
    "a shape below zero": safetensors(one(shape=(-1,)), b"a"),
    "a shape that overflows": safetensors(one("F32", (2**62, 4), (0, 1)), b"a"),
    "a shape that overflows to nothing": safetensors(one("U8", (2**63, 2), (0, 0))),
    "a shape of zero and much": safetensors(one("U8", (2**62, 2**62, 0), (0, 0))),
    "a shape of fractions": safetensors(one(shape=(1.0,)), b"a"),
    "a shape of text": safetensors(one(shape="1"), b"a"),
    "too few bytes": safetensors(one(shape=(4,), offsets=(0, 4)), b"a"),
    "bytes that trail": safetensors(one(), b"ab"),
    "a header that is a list": safetensors("[]"),
    "a header that is a number": safetensors("7"),
    "an array that is a list": safetensors('{"a":[]}'),
    "an array that is null": safetensors('{"a":null}'),
    "NaN": safetensors('{"a":NaN}'),
    "a number of 5000 digits": safetensors('{"a":' + "1" * 5000 + "}"),
    "not UTF-8": safetensors(b'{"\xff":' + entry(0, 1).encode() + b"}", b"a"),
    "half a character": safetensors('{"\\ud800":' + entry(0, 1) + "}", b"a"),
    "UTF-16": safetensors(one().encode("utf-16"), b"a"),
    "a mark before the header": safetensors(b"\xef\xbb\xbf" + one().encode(), b"a"),
    "lists 100 000 deep": safetensors('{"a":' + "[" * 100_000 + "]" * 100_000 + "}"),
    "objects 100 000 deep": safetensors('{"a":' * 100_000 + "1" + "}" * 100_000),
    "half an object": safetensors('{"a":{"dtype":"U8"'),
    "metadata that are no text": safetensors(f'{{"__metadata__":{{"x":7}},"a":{entry(0, 1)}}}', b"a"),
}


def test_the_file_that_these_are_made_of_is_good() -> None:
    assert wire.decode(safetensors(one(), b"\7"), LIKE)["a"].tolist() == [7]


@pytest.mark.parametrize("door", ["wire", "arrays"])
@pytest.mark.parametrize("case", HEADERS)
def test_a_crafted_header_is_refused(tmp_path: Path, case: str, door: str) -> None:
    refused(door, HEADERS[case], tmp_path)


def test_a_header_of_a_million_names_is_refused_before_it_is_read(tmp_path: Path) -> None:
    names = ",".join(f'"{k}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for k in range(10**6))
    assert "its header says" in refused("wire", safetensors(f"{{{names}}}"), tmp_path)


def test_an_array_of_a_hundred_thousand_dimensions_is_refused(tmp_path: Path) -> None:
    refused("wire", safetensors(one(shape=[1] * 100_000), b"a"), tmp_path)


def test_the_room_for_a_header_is_enough_for_every_tree() -> None:
    """Names that JSON escapes, shapes of many and long numbers, empty trees."""
    for like in (
        {},
        {"\x01\x02é" * 50: torch.zeros((1,) * 20, dtype=torch.bool)},
        {f"client-{k}": {f"features.{k}.running_mean": torch.zeros(0, 2**20, 2**20)} for k in range(200)},
    ):
        assert wire.decode(wire.encode(like), like).keys() == like.keys()


# ---- files cut off, and files with changed bytes


def good_files() -> dict[str, bytes]:
    matrix = np.zeros((32, 32, 3, 2), np.uint8)
    image = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)).save(image, "PNG")
    return {
        "wire": wire.encode({"a": torch.arange(200, dtype=torch.uint8)}),
        "matlab": matlab(matrix, np.ones((2, 1), np.uint8)),
        "idx": b"\0\0\x08\x03" + struct.pack(">3I", 3, 20, 20) + bytes(1200),
        "cifar": bytes(3073 * 2),
        "image": image.getvalue(),
        "parquet": parquet_file(),
    }


def matlab(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> bytes:
    def element(kind: int, body: bytes) -> bytes:
        return struct.pack("<II", kind, len(body)) + body + bytes(-len(body) % 8)

    def variable(name: str, array: np.ndarray[Any, Any]) -> bytes:
        parts = [(6, b"\x09\0\0\0\0\0\0\0"), (5, struct.pack(f"<{array.ndim}i", *array.shape)), (1, name.encode())]
        return element(14, b"".join(element(*part) for part in parts) + element(2, array.tobytes("F")))

    return bytes(124) + formats.MATLAB_VERSION + variable("X", x) + variable("y", y)


def parquet_file() -> bytes:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    content = io.BytesIO()
    columns = {"a": ["x", "yy", None] * 20, "b": [*range(60)], "c": [0.5] * 60, "d": [True, None, False] * 20}
    parquet.write_table(pyarrow.table(columns), content)
    return content.getvalue()


@pytest.mark.parametrize("door", ["wire", "matlab", "idx", "cifar", "image", "parquet"])
def test_a_file_cut_off_at_every_64th_byte_is_refused(tmp_path: Path, door: str) -> None:
    content = good_files()[door]
    DOORS[door](content, tmp_path)
    lengths = range(0, len(content), 64)
    assert len(lengths) >= 5
    for length in lengths:
        if door == "cifar" and length == 0:
            continue  # no records are no error to the format; that they are too few is one to the set
        refused(door, content[:length], tmp_path)


def opens(door: str, content: bytes, folder: Path) -> bool:
    """Whether a door lets these bytes in; any end but a refusal fails the test."""
    with processor_time_below(SECONDS):
        try:
            DOORS[door](content, folder)
        except (WireError, BadInput):
            return False
    return True


@pytest.mark.parametrize("door", ["wire", "matlab", "idx", "cifar", "image", "parquet"])
def test_a_file_with_changed_bytes_is_read_or_refused_and_nothing_else(tmp_path: Path, door: str) -> None:
    """Parquet among them: pyarrow can be made to end the process, and so its readers see a file only after ours."""
    content, random = good_files()[door], np.random.default_rng(3)
    found = []
    for _ in range(300):
        broken = bytearray(content)
        for place in random.integers(0, len(broken), 2):
            broken[place] = random.integers(256)
        found.append(opens(door, bytes(broken), tmp_path))
    assert door == "cifar" or not all(found)


def footer(body: bytes, size: int | None = None) -> bytes:
    return b"PAR1" + body + struct.pack("<I", len(body) if size is None else size) + b"PAR1"


MUCH = b"\x80\x80\x80\x08"
"""2^24, in groups of seven bits."""
PARQUET: dict[str, tuple[bytes, str]] = {
    "no marks": (bytes(100), "no PAR1 at both ends"),
    "marks only": (b"PAR1PAR1", "no PAR1 at both ends"),
    "encrypted": (b"PARE" + bytes(16) + struct.pack("<I", 16) + b"PARE", "no PAR1 at both ends"),
    "footer of 0 bytes": (footer(b""), "a footer of 0 bytes"),
    "footer beyond the beginning": (footer(bytes(16), 2**31), "a footer of 2147483648 bytes"),
    "footer without rows": (footer(b"\x15\x02\0"), "4"),
    "structures 100 000 deep": (footer(b"\x1c" * 100_000), "a value of type 12"),
    "lists 100 000 deep": (footer(b"\x19" * 100_000), "a value of type 9"),
    "a list of 2^24 numbers": (footer(b"\x49\xf5" + MUCH + bytes(3)), "index out of range|without an end|type"),
    "a list of 2^24 fractions": (footer(b"\x49\xf7" + MUCH + bytes(3)), "a list beyond the end"),
    "a list of 2^24 truths": (footer(b"\x49\xf1" + MUCH + bytes(3)), "a list beyond the end"),
    "an integer of more than ten bytes": (footer(b"\x15" + b"\xff" * 20), "an integer of more than ten bytes"),
    "text of 2^24 letters": (footer(b"\x18" + MUCH + bytes(3)), "index out of range"),
    "a field twice": (footer(b"\x15\x02\x05\x02\x02\0"), "field 1 twice"),
    "a map": (footer(b"\x1b\0\0"), "a value of type 11"),
    "groups that are a number": (footer(b"\x45\x02\0"), "not iterable"),
    "groups without columns": (footer(b"\x49\x1c\0\0"), "1"),
}


@pytest.mark.parametrize("case", PARQUET)
def test_a_crafted_footer_is_refused_before_pyarrow_sees_it(tmp_path: Path, case: str) -> None:
    content, said = PARQUET[case]
    (tmp_path / "x.parquet").write_bytes(content)
    said = rf"x\.parquet: cannot be read as Parquet \(.*({said})"
    with processor_time_below(SECONDS), pytest.raises(BadInput, match=said):
        pages_of(tmp_path / "x.parquet")
    refused("parquet", content, tmp_path)


@pytest.mark.parametrize(("limit", "said"), [("MAX_FOOTER", "a footer of"), ("MAX_PAGES", "more than 3 pages")])
def test_a_footer_and_a_number_of_pages_beyond_their_limits_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, said: str
) -> None:
    (tmp_path / "x.parquet").write_bytes(parquet_file())
    pages_of(tmp_path / "x.parquet")
    monkeypatch.setattr(parquet_pages, limit, 3)
    with pytest.raises(BadInput, match=said):
        pages_of(tmp_path / "x.parquet")


# ---- Parquet files that lie about their rows: a page of a few bytes can stand for 2^31 of them

TRUE = honest(1000)
LIES: dict[str, tuple[Claims, str]] = {
    "the file has fewer rows": (replace(TRUE, rows=10), "row groups with 1000 rows instead of 10"),
    "the file has more rows": (replace(TRUE, rows=900_000), "row groups with 1000 rows instead of 900000"),
    "all of the footer has more rows": (
        Claims(900_000, 900_000, 900_000, 1000),
        "the pages of a column with 1000 rows instead of 900000",
    ),
    "all but the file": (Claims(1000, MOST, MOST, MOST), "row groups with 2147483647 rows instead of 1000"),
    "a column": (replace(TRUE, values=MOST), "a column with 2147483647 rows instead of 1000"),
    "a column and its page": (replace(TRUE, values=MOST, page=MOST), "a column with 2147483647 rows"),
    "a page": (replace(TRUE, page=MOST), "the pages of a column with 2147483647 rows instead of 1000"),
    "everything": (honest(MOST), "at most 1000000 rows"),
    "a dictionary": (replace(TRUE, entries=MOST), "a dictionary of 2147483647 values in 5 bytes"),
}


def test_the_parquet_file_that_lies_are_made_of_is_good(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "x.parquet").write_bytes(column_file(TRUE))
    assert tabular.read_table(tmp_path / "x.parquet").column("a") == ("x",) * 1000


@pytest.mark.parametrize("case", LIES)
def test_a_parquet_file_that_lies_about_its_rows_is_refused(tmp_path: Path, case: str) -> None:
    claims, said = LIES[case]
    assert said in refused("parquet", column_file(claims), tmp_path)


def test_rows_of_a_parquet_file_are_counted_while_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the headers were believed, reading ends at the number of rows that was checked."""
    pytest.importorskip("pyarrow")
    converted: list[int] = []

    def counted(column: Any, *entries: Any) -> Any:
        converted.append(len(column))
        return cells(column, *entries)

    cells = parquet_reader._cells
    monkeypatch.setattr(parquet_reader, "_cells", counted)
    monkeypatch.setattr(parquet_reader, "BATCH_ROWS", 500)
    monkeypatch.setattr(parquet_pages.Pages, "check_rows", lambda pages, source: None)
    assert "column 'a' has more rows than the 1000" in refused(
        "parquet", column_file(Claims(1000, 100_000, 100_000, 100_000)), tmp_path
    )
    assert sum(length for length in converted if length > 1) == 1000  # the dictionary has one entry
    assert "column 'a' has fewer rows than the 900000" in refused(
        "parquet", column_file(Claims(900_000, 900_000, 900_000, 1000)), tmp_path
    )


def test_a_parquet_file_whose_text_is_not_in_its_pages_is_refused(tmp_path: Path) -> None:
    """In this encoding a row says how much of the row before it repeats: a megabyte may stand for a terabyte."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    content = io.BytesIO()
    options = {"use_dictionary": False, "column_encoding": {"a": "DELTA_BYTE_ARRAY"}}
    parquet.write_table(pyarrow.table({"a": ["x" * 1000] * 50}), content, **options)
    assert "a column in the encoding DELTA_BYTE_ARRAY" in refused("parquet", content.getvalue(), tmp_path)


def test_a_column_of_parquet_whose_name_is_no_text_is_refused(tmp_path: Path) -> None:
    refused("parquet", column_file(TRUE, name=b"\xff\xfe"), tmp_path)


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_honest_parquet_files_of_many_groups_and_pages_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """Gaps, a dictionary with more entries than rows, pages of both versions, and more rows than one batch."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    words = pyarrow.DictionaryArray.from_arrays([0, None, 2] * 30_000, [f"w{k}" for k in range(200_000)])
    columns = {"a": words, "b": [1.5, None, 3.0] * 30_000, "c": [True, False, None] * 30_000, "d": [None] * 90_000}
    parquet.write_table(
        pyarrow.table(columns),
        tmp_path / "x.parquet",
        row_group_size=70_000,
        data_page_size=1000,
        data_page_version=version,
    )
    monkeypatch.setattr(parquet_reader, "BATCH_ROWS", 20_000)
    table = tabular.read_table(tmp_path / "x.parquet")
    assert table.column("a") == ("w0", None, "w2") * 30_000
    assert len({id(cell) for cell in table.column("a")}) <= 5  # two words, in two groups of rows
    assert table.column("b") == ("1.5", None, "3") * 30_000
    assert table.column("c") == ("True", "False", None) * 30_000
    assert table.column("d") == (None,) * 90_000


def test_text_in_parquet_that_is_no_text_is_refused(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    content = io.BytesIO()
    parquet.write_table(pyarrow.table({"a": ["abcdefgh"]}), content, compression="none", write_statistics=False)
    assert content.getvalue().count(b"abcdefgh") == 1
    refused("parquet", content.getvalue().replace(b"abcdefgh", b"\xff" * 8), tmp_path)


def test_a_place_outside_of_a_dictionary_in_parquet_is_refused(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    content = io.BytesIO()
    parquet.write_table(pyarrow.table({"a": ["x", "y", "z"] * 8}), content, compression="none", write_statistics=False)
    places = bytes([0x24, 0x49, 0x92]) * 2  # 0, 1, 2 over and over, in two bits each
    assert content.getvalue().count(places) == 1
    refused("parquet", content.getvalue().replace(places, b"\xff" * 6), tmp_path)  # 3 over and over


def test_a_crafted_table_of_datasets_is_refused_and_does_not_end_the_process(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    image = images_of_one_shade()
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    rows = {"image": [{"bytes": image, "path": None}] * 4, "label": [0, 1, 0, 1]}
    parts = {part: datasets.Dataset.from_dict(rows, features=features) for part in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "set"))
    assert len(hub_split(f"hf:{tmp_path / 'set'}", "image", "label", None, 8)["set"].train) == 4
    offsets = struct.pack("<5i", *(len(image) * k for k in range(5)))
    for path in (tmp_path / "set").rglob("*.arrow"):
        content = path.read_bytes()
        assert content.count(offsets) == 1
        beyond = struct.pack("<5i", 0, len(image), 2 * len(image), 2**31 - 1000, 2**31 - 1)
        path.write_bytes(content.replace(offsets, beyond))
    # In a process of its own, which such offsets end where nobody looks at them first.
    code = "import sys; from protofed.datasets.hub import hub_split; hub_split(sys.argv[1], 'image', 'label', None, 8)"
    words = [sys.executable, "-c", code, f"hf:{tmp_path / 'set'}"]
    same_modules = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False, env=same_modules)
    assert done.returncode == 1
    assert "BadInput" in done.stderr
    assert "its tables are damaged" in done.stderr


def images_of_one_shade() -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (8, 8), (9, 9, 9)).save(content, "PNG")
    return content.getvalue()


@pytest.mark.parametrize("name", ["../../x.png", "/etc/hostname", "x\0.png", "y" * 5000 + ".png"])
def test_a_row_of_datasets_names_no_file_outside(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    rows = {"image": [{"bytes": None, "path": name}], "label": [0]}
    parts = {part: datasets.Dataset.from_dict(rows, features=features) for part in ("train", "test")}
    monkeypatch.setattr(datasets, "load_from_disk", lambda place: parts)  # who saves a set here saves images, not names
    with pytest.raises(BadInput, match=r"row 0: its image is the file|y{5000}\.png: cannot be read") as error:
        hub_split(f"hf:{tmp_path / 'set'}", "image", "label", None, 8)
    assert len(str(error.value)) < 6000


# ---- the kept sets


def small_set() -> Dataset:
    part = Examples(np.arange(64, dtype=np.uint8).reshape(4, 1, 4, 4), np.zeros(4, np.int64))
    return Dataset("small", ("a",), 4, {"small": (4, 4)}, "Get it.", lambda root, pixels: {"small": Split(part, part)})


def changed(**entries: Any) -> Callable[[dict[str, Any], Path], Any]:
    """An index whose entry of the training inputs is another one."""

    def change(index: dict[str, Any], canary: Path) -> Any:
        index["arrays"]["0-train-x"] |= entries
        return index

    return change


INDEXES: dict[str, Callable[[dict[str, Any], Path], Any]] = {
    "a list": lambda index, canary: [],
    "a number": lambda index, canary: 7,
    "bytes that are a pickle": lambda index, canary: pickle.dumps(Canary(canary)),
    "bytes that are no UTF-8": lambda index, canary: b"\xff\xfe{}",
    "no bytes": lambda index, canary: b"",
    "lists 100 000 deep": lambda index, canary: b"[" * 100_000,
    "a number of 5000 digits": lambda index, canary: b'{"format":' + b"1" * 5000 + b"}",
    "another format": lambda index, canary: index | {"format": 99},
    "no arrays": lambda index, canary: {key: index[key] for key in index if key != "arrays"},
    "arrays that are a list": lambda index, canary: index | {"arrays": [1, 2]},
    "domains that are a number": lambda index, canary: index | {"domains": 7},
    "domains beyond the arrays": lambda index, canary: index | {"domains": ["small", "more"]},
    "domains that are lists": lambda index, canary: index | {"domains": [["small"]]},
    "objects as a type": changed(dtype="|O"),
    "a type that is unknown": changed(dtype="Q7"),
    "a type that is a list": changed(dtype=[["a", "|O"]]),
    "a shape below zero": changed(shape=[-4, 1, 4, 4]),
    "a shape that overflows": changed(shape=[2**62, 4, 4, 4]),
    "a shape of truth values": changed(shape=[4, True, 4, 4]),
    "a shape of fractions": changed(shape=[4.0, 1, 4, 4]),
    "a shape of text": changed(shape="4144"),
    "a shape of 100 000 numbers": changed(shape=[1] * 100_000),
    "no shape": changed(shape=None),
    "another size": changed(bytes=2**62),
}


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    cache.load(small_set(), tmp_path)
    assert (tmp_path / "cache/small-4-1/index.json").is_file()
    return tmp_path / "cache/small-4-1"


def assert_made_again(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with processor_time_below(SECONDS):
        found = cache.load(small_set(), root)["small"].train.x
    assert found.ravel().tolist() == [*range(64)]
    assert "is damaged" in caplog.text
    caplog.clear()
    cache.load(small_set(), root)
    assert not caplog.text


@pytest.mark.parametrize("case", INDEXES)
def test_a_kept_set_with_a_crafted_index_is_made_again(
    tmp_path: Path, kept: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = INDEXES[case](json.loads((kept / "index.json").read_text()), tmp_path / "canary")
    (kept / "index.json").write_bytes(made if isinstance(made, bytes) else json.dumps(made).encode())
    assert_made_again(tmp_path, caplog)
    assert not (tmp_path / "canary").exists()


def test_labels_that_are_not_one_for_each_input_are_damage(
    tmp_path: Path, kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An index that fits its files, whose training labels are the test inputs."""
    index = json.loads((kept / "index.json").read_text())
    index["arrays"]["0-train-y"] = index["arrays"]["0-test-x"]
    (kept / "0-train-y.npy").write_bytes((kept / "0-test-x.npy").read_bytes())
    (kept / "index.json").write_text(json.dumps(index))
    assert_made_again(tmp_path, caplog)


@pytest.mark.parametrize("dtype", ["<f8", "|S1", "|b1"])
def test_a_kept_array_of_a_type_that_is_never_kept_is_made_again(
    tmp_path: Path, kept: Path, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it is, index and file agree on it."""
    content = io.BytesIO()
    np.save(content, np.zeros((4, 1, 4, 4), dtype), allow_pickle=False)
    (kept / "0-train-x.npy").write_bytes(content.getvalue())
    index = json.loads((kept / "index.json").read_text())
    index["arrays"]["0-train-x"] |= {"dtype": dtype, "bytes": len(content.getvalue())}
    (kept / "index.json").write_text(json.dumps(index))
    assert_made_again(tmp_path, caplog)


@pytest.mark.parametrize("kind", [".npy", ".npz", "protocol 5", "torch.save"])
def test_a_kept_array_that_is_a_pickle_is_not_loaded(
    tmp_path: Path, kept: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = kept / "0-train-x.npy"
    content = PICKLES[kind](Canary(tmp_path / "canary"))
    path.write_bytes(content.ljust(path.stat().st_size, b"\0")[: path.stat().st_size])
    assert_made_again(tmp_path, caplog)
    assert not (tmp_path / "canary").exists()


def test_a_kept_array_cut_off_at_every_64th_byte_is_made_again(
    tmp_path: Path, kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = (kept / "0-train-x.npy").read_bytes()
    for length in range(0, len(content), 64):
        (kept / "0-train-x.npy").write_bytes(content[:length])
        assert_made_again(tmp_path, caplog)


def test_there_are_more_than_fifty_crafted_files() -> None:
    assert len(PICKLES) * len(DOORS) + len(HEADERS) + len(PARQUET) + len(INDEXES) >= 50
    assert len(HEADERS) + len(PARQUET) + len(INDEXES) + len(PICKLES) >= 50
