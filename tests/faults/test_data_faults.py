"""Damaged, exploding and escaping data files (rows D1, D2 and D3): refused by name, when data are loaded."""

import bz2
import gzip
import io
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from clocks import PATIENCE
from protofed.datasets import cache, files, formats, images, syn, tabular
from protofed.datasets.cifar import read_cifar10
from protofed.datasets.digits import read_idx, read_svhn, read_usps
from protofed.datasets.examples import Dataset, Examples, Split
from protofed.datasets.files import Publication
from protofed.datasets.pacs import PACS
from protofed.datasets.syn import MnistMFiles
from protofed.datasets.tabular import limits
from protofed.datasets.tiny_imagenet import TinyFolders
from protofed.datasets.vireofood172 import FoodFolders
from protofed.engine.federation import Federation
from protofed.engine.training import Training
from protofed.errors import BadInput
from protofed.methods import METHODS
from protofed.tasks.custom import Custom

GET = "Get it again."


def png(shade: int = 0, side: int = 8) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (side, side), (shade, shade, shade)).save(content, "PNG")
    return content.getvalue()


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def black_png(side: int) -> bytes:
    """A whole, valid image of one bit per pixel: a thousand times smaller than its pixels."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0))
    packed = zlib.compressobj(9)
    row = bytes(1 + (side + 7) // 8)
    body = b"".join(packed.compress(row * 1000) for _ in range(side // 1000)) + packed.flush()
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def deep_png(side: int) -> bytes:
    """A black image of 16 bits per pixel."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 16, 0, 0, 0, 0))
    body = zlib.compress(bytes(1 + 2 * side) * side)
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def five_channels() -> bytes:
    """A TIFF file of 2 × 2 pixels with five numbers each."""
    entries = [(256, 3, 1, 2), (257, 3, 1, 2), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 2), (273, 4, 1, 8)]
    entries += [(277, 3, 1, 5), (278, 3, 1, 2), (279, 4, 1, 20)]
    table = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"II*\0" + struct.pack("<I", 28) + bytes(20) + struct.pack("<H", len(entries)) + table + bytes(4)


def flipped(content: bytes) -> bytes:
    broken = bytearray(content)
    broken[len(broken) // 2] ^= 0xFF
    return bytes(broken)


def saved(image: Image.Image, kind: str) -> bytes:
    content = io.BytesIO()
    image.save(content, kind)
    return content.getvalue()


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))

DAMAGED: dict[str, tuple[str, bytes]] = {
    "truncated PNG": ("x.png", saved(NOISE, "PNG")[:4000]),
    "truncated JPEG": ("x.jpg", saved(NOISE, "JPEG")[:1500]),
    "no bytes": ("x.png", b""),
    "HTML": ("x.jpg", b"<!DOCTYPE html><html><body>404 Not Found</body></html>"),
    "one byte changed": ("x.png", flipped(saved(NOISE, "PNG"))),
    "wrong magic": ("x.png", b"\x89PNX" + png()[4:]),
    "five channels": ("x.tif", five_channels()),
    "values of unknown range": ("x.tif", saved(Image.fromarray(np.full((2, 2), np.nan, np.float32)), "TIFF")),
    "another format": ("x.png", saved(NOISE, "PPM")),
    "a pickle": ("x.png", pickle.dumps({"pixels": [1, 2, 3]})),
    "too many pixels": ("x.png", black_png(12_000)),
}


def site(root: Path, good: int, bad: int = 0, kind: str = "no bytes") -> Custom:
    """A site with so many good images of two classes, and so many damaged ones."""
    for k in range(good):
        path = root / "north" / "ab"[k % 2] / f"{k:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(k))
    name, content = DAMAGED[kind]
    for k in range(bad):
        (root / "north/a" / f"{k}-{name}").write_bytes(content)
    return Custom(str(root), pixels=8)


# ---- D1: damaged images


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_image_ends_the_loading_by_name(tmp_path: Path, kind: str) -> None:
    settings = site(tmp_path, 99, 1, kind)
    with pytest.raises(BadInput) as error:
        settings.build()
    assert str(tmp_path / "north/a" / f"0-{DAMAGED[kind][0]}") in str(error.value)


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_image_may_be_skipped_and_is_counted_and_listed(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    site(tmp_path, 99, 1, kind)
    task = Custom(str(tmp_path), pixels=8, skip_damaged=True).build()
    assert len(task.clients["north"]) + len(task.tests["north"]) == 99
    assert "1 of 100 files are damaged and left out" in caplog.text
    assert str(tmp_path / "north/a" / f"0-{DAMAGED[kind][0]}") in caplog.text


@pytest.mark.parametrize("kind", DAMAGED)
def test_two_damaged_images_in_a_hundred_are_too_many_to_skip(tmp_path: Path, kind: str) -> None:
    site(tmp_path, 98, 2, kind)
    with pytest.raises(BadInput, match=r"2 of 100 files are damaged, more than .*max_damaged = 0\.01") as error:
        Custom(str(tmp_path), pixels=8, skip_damaged=True).build()
    for k in range(2):
        assert str(tmp_path / "north/a" / f"{k}-{DAMAGED[kind][0]}") in str(error.value)
    Custom(str(tmp_path), pixels=8, skip_damaged=True, max_damaged=0.02).build()


def test_a_long_list_of_damaged_images_has_an_end(tmp_path: Path) -> None:
    site(tmp_path, 20, 130)
    with pytest.raises(BadInput, match="130 of 150 files are damaged") as error:
        Custom(str(tmp_path), pixels=8, skip_damaged=True).build()
    assert str(error.value).count("-x.png") == 100
    assert "and 30 more, which `protofed data inspect` lists" in str(error.value)


def test_nothing_is_read_once_a_task_is_loaded(tmp_path: Path) -> None:
    task = site(tmp_path, 20).build()
    for path in [*tmp_path.rglob("*.png")]:
        path.write_bytes(b"")
    of = Federation(METHODS["fedavg"](), task, Training(rounds=1, epochs=1))
    assert not of.advance(of.start()).failures


# ---- D1: damaged files of published sets, which nobody may skip: they are to be got again

IMAGES = b"\0\0\x08\x03" + struct.pack(">3I", 3, 28, 28) + bytes(3 * 28 * 28)
LABELS = b"\0\0\x08\x01" + struct.pack(">I", 3) + bytes([0, 9, 5])
FEW = Publication("few", GET)


def idx_files(root: Path, **changed: bytes) -> Path:
    (root / "few").mkdir()
    for prefix in ("train", "t10k"):
        (root / f"few/{prefix}-images-idx3-ubyte").write_bytes(changed.get("images", IMAGES))
        (root / f"few/{prefix}-labels-idx1-ubyte").write_bytes(changed.get("labels", LABELS))
    return root


def test_the_files_of_these_tests_are_good_but_for_their_faults(tmp_path: Path) -> None:
    found = read_idx(FEW, (3, 3), idx_files(tmp_path), 28)["few"]
    assert found.train.y.tolist() == [0, 9, 5]


@pytest.mark.parametrize(
    ("part", "content", "said"),
    [
        ("labels", LABELS[:-1] + b"\x0a", "0 to 10, not from 0 to 9"),
        ("labels", LABELS[:-1], r"header says shape \(3,\), .*11 bytes in all, but it has 10"),
        ("labels", b"\0\0\x08\x01" + struct.pack(">I", 2) + bytes(2), "2 examples, not 3"),
        ("labels", b"\0\0\x08\x02" + LABELS[4:], "not an IDX file"),
        ("labels", b"", "not an IDX file"),
        ("labels", b"<html>404</html>", "not an IDX file|more than the"),
        ("images", b"\0\0\x0d\x03" + IMAGES[4:], "not an IDX file"),
        ("images", IMAGES[:-1], "its header says"),
        ("images", IMAGES + b"\0", "more than the 2368 bytes"),
        ("images", IMAGES[:4] + struct.pack(">3I", 2**31, 2**31, 2**31) + IMAGES[16:], "its header says"),
    ],
)
def test_a_damaged_published_file_is_named_with_what_was_expected(
    tmp_path: Path, part: str, content: bytes, said: str
) -> None:
    idx_files(tmp_path, **{part: content})
    with pytest.raises(BadInput, match=rf"few/train-{part}-idx.*({said}).*{GET}"):
        read_idx(FEW, (3, 3), tmp_path, 28)


def test_labels_out_of_range_are_refused_in_every_format(tmp_path: Path) -> None:
    (tmp_path / "few").mkdir()
    (tmp_path / "few/usps").write_bytes(b"11 1:0\n")
    with pytest.raises(BadInput, match=r"usps: line 1: the label is 11, not 1 to 10"):
        read_usps(FEW, (1, 1), tmp_path, 16)
    (tmp_path / "few/data_batch_1.bin").write_bytes(b"\x0a" + bytes(3072))
    with pytest.raises(BadInput, match=r"data_batch_1\.bin: .*\[10\].* below \[10\]"):
        read_cifar10(FEW, (5, 1), tmp_path, 32)
    with pytest.raises(BadInput, match=r"0 to 11, not from 0 to 10"):
        formats.check_labels(np.array([0, 11]), 0, 10)


def test_lists_of_labels_that_are_short_or_name_no_class_are_refused(tmp_path: Path) -> None:
    home = tmp_path / "mnist_m"
    (home / "mnist_m_train").mkdir(parents=True)
    for k in range(2):
        (home / f"mnist_m_train/{k}.png").write_bytes(png())
    source = MnistMFiles((frozenset({2}), frozenset({1})), GET)
    for text, said in (("0.png 1\n", "1 lines instead of 2"), ("0.png 1\n1.png 10\n", "line 2: expected an image and")):
        (home / "mnist_m_train_labels.txt").write_text(text)
        with pytest.raises(BadInput, match=rf"mnist_m_train_labels\.txt.*{said}"):
            source.read(tmp_path, 8)


# ---- D2: bombs

MIB = 2**20
SLACK = 50 * MIB
"""What refusing may take beyond what reading may."""

MEASURE = """
import json, sys
from pathlib import Path
from protofed import wire
from protofed.errors import BadInput
from protofed.datasets import files, formats, images, tabular
import pyarrow.parquet, torch

def peak():
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(fields["VmHWM"].split()[0]), 1024 * int(fields["VmRSS"].split()[0])

READERS = {
    "image": lambda path: images.decoded(path, 8),
    "unfolded": lambda path: files.content(path, 1 << 28),
    "matlab": lambda path: formats.matlab_images(path.read_bytes(), 1 << 28),
    "table": tabular.read_table,
    "arrays": lambda path: wire.decode(path.read_bytes(), {"a": torch.zeros(1)}),
}
images.decoded(Path(sys.argv[1]), 8)  # so that what is loaded at first use does not count
for line in sys.stdin:
    reader, name = json.loads(line)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()[1]
    try:
        READERS[reader](Path(name))
        said = "read"
    except (BadInput, wire.WireError) as error:
        said = str(error)
    print(json.dumps([peak()[0] - before, said]))
"""


def matlab_bomb(size: int) -> bytes:
    packed = zlib.compressobj(9)
    element = struct.pack("<II", 14, size)
    body = packed.compress(element) + b"".join(packed.compress(bytes(MIB)) for _ in range(size // MIB))
    body += packed.flush()
    return bytes(124) + formats.MATLAB_VERSION + struct.pack("<II", 15, len(body)) + body


def varint(number: int, length: int = 0) -> bytes:
    """As Thrift writes a number that is not negative; longer than needed, if asked for."""
    number <<= 1
    groups = [number & 127]
    while (number := number >> 7) or len(groups) < length:
        groups.append(number & 127)
    return bytes([*(group | 128 for group in groups[:-1]), groups[-1]])


def lying(content: bytes, metadata: Any) -> bytes:
    """The same Parquet file, whose footer claims that a column holds next to nothing."""
    start = len(content) - 8 - struct.unpack("<I", content[-8:-4])[0]
    footer = content[start:]
    group = metadata.row_group(0)
    for claim in {group.total_byte_size, group.column(0).total_uncompressed_size}:
        assert varint(claim) in footer
        footer = footer.replace(varint(claim), varint(1000, len(varint(claim))))
    return content[:start] + footer


def parquet_bombs() -> dict[str, bytes]:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def written(values: Any, **options: Any) -> bytes:
        content = io.BytesIO()
        parquet.write_table(pyarrow.table({"a": values}), content, compression="zstd", **options)
        return content.getvalue()

    # 640 times a text of a megabyte, a page each: as many pages as there are, never all at once in memory.
    content = io.BytesIO()
    with parquet.ParquetWriter(
        content,
        pyarrow.schema({"a": pyarrow.string()}),
        compression="zstd",
        use_dictionary=False,
        write_statistics=False,
    ) as writer:
        for _ in range(10):
            writer.write_table(pyarrow.table({"a": ["x" * MIB] * 64}))
    small = written(["x" * 1000] * 40_000, use_dictionary=False, write_statistics=False)
    return {
        "unfolding": content.getvalue(),
        "lying": lying(small, parquet.ParquetFile(io.BytesIO(small)).metadata),
        "repeating": written(["x" * 100_000] * 5_000),
        "nested": written(pyarrow.array([[1] * 3_000_000], pyarrow.list_(pyarrow.int64()))),
    }


Bomb = tuple[str, int, str]
"""How it is read, how much may be taken in reading it, and what is said."""
BOMBS: dict[str, Bomb] = {
    "12000.png": ("image", 0, "12000 × 12000 pixels; images of more than 64000000"),
    "20000.png": ("image", 0, "too large; images of more than 64000000"),
    "deep.png": ("image", 7 * 4000**2, "read"),  # two bytes a pixel, one in grey, four in colour
    "zeros.gz": ("unfolded", 30 * MIB, "contains more than the"),
    "zeros.bz2": ("unfolded", 16 * MIB, "contains more than the"),
    "zeros.mat": ("matlab", 20 * MIB, "decompresses to more than"),
    "unfolding.parquet": ("table", 0, "at most 536870912"),
    "repeating.parquet": ("table", 0, "read"),
    "nested.parquet": ("table", 0, "column 'a' is of type list"),
    "columns.csv": ("table", 32 * MIB, "a line has more than"),
    "header.safetensors": ("arrays", 0, "its header says 4611686018427387904 bytes"),
}


@pytest.fixture(scope="module")
def bombs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bombs")
    made = {f"{name}.parquet": content for name, content in parquet_bombs().items()}
    made |= {f"{side}.png": black_png(side) for side in (12_000, 20_000)}
    made["deep.png"] = deep_png(4000)
    made["zeros.gz"] = gzip.compress(bytes(MIB), 9) * 300
    made["zeros.bz2"] = bz2.compress(bytes(MIB), 9) * 300
    made["zeros.mat"] = matlab_bomb(200 * MIB)
    made["columns.csv"] = b"," * (30 * MIB)
    made["header.safetensors"] = (2**62).to_bytes(8, "little") + b'{"a":{"dtype":"F32"'
    made["plain.png"] = png()
    for name, content in made.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def measured(bombs: Path) -> dict[str, tuple[int, str]]:
    """How far memory grew for each bomb in a process of its own, and what was said."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("memory is measured by Linux's /proc")
    lines = "".join(json.dumps([bomb[0], str(bombs / name)]) + "\n" for name, bomb in BOMBS.items())
    words = [sys.executable, "-W", "error", "-c", MEASURE, str(bombs / "plain.png")]
    same_modules = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        words, input=lines, capture_output=True, text=True, timeout=PATIENCE, check=False, env=same_modules
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {name: (growth, said) for name, (growth, said) in zip(BOMBS, found, strict=True)}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_and_takes_little_memory(name: str, measured: dict[str, tuple[int, str]]) -> None:
    _, allowed, expected = BOMBS[name]
    growth, said = measured[name]
    assert expected in said
    assert growth <= allowed + SLACK, f"{growth / MIB:.0f} MiB"


def test_the_bombs_would_explode(bombs: Path) -> None:
    """Each is at least a hundred times larger than its file, so that refusing it means something."""
    unfolded = {
        "zeros.gz": 300 * MIB,
        "zeros.bz2": 300 * MIB,
        "zeros.mat": 200 * MIB,
        "12000.png": 12_000**2,
        "20000.png": 20_000**2,
        "unfolding.parquet": 640 * MIB,
        "repeating.parquet": 5_000 * 100_000,
    }
    for name, size in unfolded.items():
        assert (bombs / name).stat().st_size * 100 < size


def test_a_parquet_file_whose_footer_lies_is_measured_by_its_pages(
    bombs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    assert parquet.ParquetFile(bombs / "lying.parquet").metadata.row_group(0).total_byte_size == 1000
    monkeypatch.setattr(limits, "MAX_BYTES", MIB)
    with pytest.raises(BadInput, match=r"lying\.parquet: 40\d{6} bytes .*at most 1048576"):
        tabular.read_table(bombs / "lying.parquet")


def test_what_repeats_in_a_parquet_file_is_read_once(bombs: Path) -> None:
    column = tabular.read_table(bombs / "repeating.parquet").column("a")
    assert len(column) == 5_000
    assert len({id(cell) for cell in column}) == 1


def test_a_small_compressed_file_may_unfold_to_a_hundred_times_its_size_and_no_more(tmp_path: Path) -> None:
    assert formats.decompressed_limit(10, 10**12) == 16 * MIB
    assert formats.decompressed_limit(MIB, 10**12) == 100 * MIB
    assert formats.decompressed_limit(MIB, 5) == 5
    (tmp_path / "a.gz").write_bytes(gzip.compress(bytes(MIB), 9) * 17)
    with pytest.raises(BadInput, match="more than the 16777216 bytes that were expected of a file of its size"):
        files.content(tmp_path / "a.gz", 10**9)


# ---- D3: what leads out of the folder, or is no file

READ: list[str] = []
"""Files that were opened while a case runs."""


def note(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
        READ.append(os.fsdecode(arguments[0]))


sys.addaudithook(note)


@pytest.fixture(autouse=True)
def no_hanging() -> Iterator[None]:
    def stop(signum: int, frame: Any) -> None:
        raise TimeoutError("a case hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder beside the one that is given, which nobody may read."""
    folder = tmp_path / "outside"
    (folder / "a").mkdir(parents=True)
    for name in ("secret.png", "a/secret.png"):
        (folder / name).write_bytes(png(77))
    (folder / "secret.csv").write_text("x,y\n1,p\n2,q\n")
    (folder / "train-images-idx3-ubyte").write_bytes(IMAGES)
    return folder


def refused(outside: Path, load: Callable[[], Any], named: str) -> None:
    """Loading ends with an error that names the culprit, and nothing outside was opened."""
    READ.clear()
    with pytest.raises(BadInput) as error:
        load()
    assert named in str(error.value)
    assert len(str(error.value)) < 3000
    forbidden = os.path.realpath(outside)
    assert not [path for path in READ if os.path.realpath(path).startswith(forbidden)]


def linked(path: Path, target: Path | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def special(path: Path) -> None:
    """The device that gives zeros without end."""
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))
    except (PermissionError, OSError):
        pytest.skip("making a device needs more rights")


SITE_CASES: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "image links out": (lambda root, out: linked(root / "north/a/x.png", out / "secret.png"), "north/a/x.png: a link"),
    "image links out by ..": (lambda root, out: linked(root / "north/a/x.png", "../../../outside/secret.png"), "x.png"),
    "class links out": (lambda root, out: linked(root / "north/c", out), "north/c: a link out of"),
    "site links out": (lambda root, out: linked(root / "south", out), "south: a link out of"),
    "site links to /": (lambda root, out: linked(root / "south", "/"), "south: a link out of"),
    "link through a link": (
        lambda root, out: (linked(root / "north/a/y.png", "x.png"), linked(root / "north/a/x.png", out / "secret.png")),
        "x.png: a link out of",
    ),
    "link to itself": (
        lambda root, out: linked(root / "north/a/x.png", "x.png"),
        "x.png: does not exist",
    ),
    "link to a device": (lambda root, out: linked(root / "north/a/x.png", "/dev/zero"), "x.png: a link out of"),
    "pipe": (lambda root, out: os.mkfifo(root / "north/a/x.png"), "x.png: not a regular file"),
    "device": (lambda root, out: special(root / "north/a/x.png"), "x.png: not a regular file"),
    "sites in capitals": (
        lambda root, out: (root / "North").mkdir(),
        "the sites 'North' and 'north' differ only in case",
    ),
    "classes in capitals": (
        lambda root, out: (root / "north/A").mkdir(),
        "'A' and 'a' differ only in case",
    ),
    "classes of two sites in capitals": (
        lambda root, out: (root / "south/B").mkdir(parents=True),
        "the classes 'b' and 'B' differ only in case",
    ),
}


@pytest.mark.parametrize("case", SITE_CASES)
def test_what_leads_out_of_a_folder_of_sites_is_refused_by_name(tmp_path: Path, outside: Path, case: str) -> None:
    root = tmp_path / "given"
    settings = site(root, 8)
    settings.build()
    make, named = SITE_CASES[case]
    make(root, outside)
    refused(outside, settings.build, named)


TABLE_CASES: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "table links out": (lambda root, out: linked(root / "south.csv", out / "secret.csv"), "south.csv: a link out of"),
    "table links to a device": (lambda root, out: linked(root / "south.csv", "/dev/zero"), "south.csv: a link out of"),
    "pipe": (lambda root, out: os.mkfifo(root / "south.csv"), "south.csv: no such file, or not a regular file"),
    "device": (lambda root, out: special(root / "south.csv"), "south.csv: no such file, or not a regular file"),
    "tables in capitals": (
        lambda root, out: (root / "North.csv").write_text("x,y\n1,p\n"),
        "site 'north' has another table",
    ),
}


@pytest.mark.parametrize("case", TABLE_CASES)
def test_what_leads_out_of_a_folder_of_tables_is_refused_by_name(tmp_path: Path, outside: Path, case: str) -> None:
    root = tmp_path / "given"
    root.mkdir()
    (root / "north.csv").write_text("x,y\n" + "1,p\n2,q\n" * 4)
    settings = Custom(str(root), "tables", label="y")
    settings.build()
    make, named = TABLE_CASES[case]
    make(root, outside)
    refused(outside, settings.build, named)


NAMES = ["../../outside/secret.png", "/etc/hostname", "a/../1.png", "x" * 100_000 + ".png", "1.png\0.png"]


@pytest.mark.parametrize("name", NAMES, ids=["dots", "absolute", "inner dots", "long", "zero byte"])
def test_a_name_in_a_list_of_labels_leads_nowhere(tmp_path: Path, outside: Path, name: str) -> None:
    root = tmp_path / "given"
    home = root / "mnist_m"
    (home / "mnist_m_train").mkdir(parents=True)
    (home / "mnist_m_train/1.png").write_bytes(png())
    (home / "mnist_m_train_labels.txt").write_text(f"{name} 1\n")
    source = MnistMFiles((frozenset({1}), frozenset({1})), GET)
    refused(outside, lambda: source.read(root, 8), "mnist_m_train_labels.txt")


def test_a_name_in_the_lists_of_other_sets_leads_nowhere(tmp_path: Path, outside: Path) -> None:
    root = tmp_path / "given"
    tiny = root / "tiny_imagenet/tiny-imagenet-200"
    for folder in ("train/n1/images", "val/images"):
        (tiny / folder).mkdir(parents=True)
    (tiny / "train/n1/images/1.png").write_bytes(png())
    (tiny / "wnids.txt").write_text("n1\n")
    (tiny / "val/val_annotations.txt").write_text("../../../../../outside/secret.png\tn1\n")
    refused(outside, lambda: TinyFolders(("n1",), (1, 1), GET).read(root, 8), "val_annotations.txt")
    food = root / "vireofood172"
    (food / "ready_chinese_food/1").mkdir(parents=True)
    (food / "SplitAndIngreLabel").mkdir()
    (food / "ready_chinese_food/1/1.png").write_bytes(png())
    (food / "SplitAndIngreLabel/TR.txt").write_text("/1/../../../../outside/secret.png\n")
    refused(outside, lambda: FoodFolders(1, (frozenset({1}), 1), GET).read(root, 8), "TR.txt")


PUBLISHED_CASES: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "file links out": (
        lambda root, out: linked(root / "few/train-images-idx3-ubyte", out / "train-images-idx3-ubyte"),
        "train-images-idx3-ubyte leads out of",
    ),
    "folder links out": (lambda root, out: linked(root / "few", out), "leads out of"),
    "pipe": (
        lambda root, out: ((root / "few").mkdir(), os.mkfifo(root / "few/train-images-idx3-ubyte")),
        "train-images-idx3-ubyte is not a regular file",
    ),
    "folder under the name of a file": (
        lambda root, out: (root / "few/train-images-idx3-ubyte").mkdir(parents=True),
        "train-images-idx3-ubyte is not a regular file",
    ),
}


@pytest.mark.parametrize("case", PUBLISHED_CASES)
def test_what_leads_out_of_the_folder_of_data_is_refused_by_name(tmp_path: Path, outside: Path, case: str) -> None:
    root = tmp_path / "given"
    root.mkdir()
    make, named = PUBLISHED_CASES[case]
    make(root, outside)
    refused(outside, lambda: read_idx(FEW, (3, 3), root, 28), named)


def test_a_folder_of_a_set_that_links_out_is_refused(tmp_path: Path, outside: Path) -> None:
    root = tmp_path / "given"
    linked(root / "pacs", outside)
    refused(outside, lambda: PACS.read(root, 8), "pacs: a link out of")
    linked(root / "syn", outside)
    refused(outside, lambda: syn.SYN.read(root, 8), "syn: a link out of")


def flat(value: int) -> Dataset:
    x = np.full((4, 1, 8, 8), value, np.uint8)
    part = Examples(x, np.zeros(4, np.int64))
    return Dataset("flat", ("a",), 8, {"flat": (4, 4)}, GET, lambda root, pixels: {"flat": Split(part, part)})


def test_a_kept_set_that_links_out_is_made_again_and_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given, other = tmp_path / "given", tmp_path / "outside"
    for root, value in ((given, 1), (other, 200)):
        root.mkdir()
        cache.load(flat(value), root)
    kept = given / "cache/flat-8-1"
    assert kept.is_dir()
    os.rename(kept, tmp_path / "aside")
    linked(kept, other / "cache/flat-8-1")
    READ.clear()
    assert int(cache.load(flat(1), given)["flat"].train.x.max()) == 1
    assert "it is a link" in caplog.text
    assert not [path for path in READ if os.path.realpath(path).startswith(os.path.realpath(other))]
    assert not kept.is_symlink()
    assert (other / "cache/flat-8-1/index.json").exists()


def test_a_cache_that_links_out_is_refused(tmp_path: Path, outside: Path) -> None:
    linked(tmp_path / "given/cache", outside)
    refused(outside, lambda: cache.load(flat(1), tmp_path / "given"), "cache leads out of")


def test_a_parquet_file_whose_columns_lie_elsewhere_is_refused(tmp_path: Path, outside: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"a": [1, 2]}), outside / "a.parquet")
    metadata = parquet.ParquetFile(outside / "a.parquet").metadata
    metadata.set_file_path("../outside/a.parquet")
    (tmp_path / "given").mkdir()
    metadata.write_metadata_file(tmp_path / "given/a.parquet")
    refused(outside, lambda: tabular.read_table(tmp_path / "given/a.parquet"), "a column is stored in another file")


def test_a_name_as_long_as_the_system_allows_is_read_and_named(tmp_path: Path) -> None:
    settings = site(tmp_path, 8)
    long = tmp_path / "north/a" / ("x" * 251 + ".png")
    long.write_bytes(png(90))
    settings.build()
    long.write_bytes(b"")
    with pytest.raises(BadInput, match=r"x{251}\.png"):
        settings.build()


def test_svhn_with_a_link_for_its_test_file_is_refused_before_anything_of_it_is_read(
    tmp_path: Path, outside: Path
) -> None:
    (tmp_path / "given/few").mkdir(parents=True)
    linked(tmp_path / "given/few/train_32x32.mat", outside / "secret.png")
    refused(outside, lambda: read_svhn(FEW, (1, 1), tmp_path / "given", 32), "train_32x32.mat leads out of")


def test_what_pillow_only_warns_of_is_refused(tmp_path: Path) -> None:
    """12 000² pixels are more than Pillow warns of, and less than it refuses."""
    (tmp_path / "x.png").write_bytes(black_png(12_000))
    assert Image.MAX_IMAGE_PIXELS is not None
    assert Image.MAX_IMAGE_PIXELS < 12_000**2 < 2 * Image.MAX_IMAGE_PIXELS < 20_000**2
    with pytest.raises(BadInput, match=r"x\.png: 12000 × 12000 pixels"):
        images.decoded(tmp_path / "x.png", 8)
