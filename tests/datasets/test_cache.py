"""The cache: the same arrays again, fast, whole or not at all, whoever else writes and whatever breaks."""

import hashlib
import itertools
import json
import logging
import multiprocessing
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protofed.datasets import cache
from protofed.datasets.cache import load
from protofed.datasets.examples import Dataset, Examples, Split
from protofed.errors import BadInput

TARGET = "cache/toy-4-1"
PARTS = {"0-test-x.npy", "0-test-y.npy", "0-train-x.npy", "0-train-y.npy"}


def read(root: Path, pixels: int) -> dict[str, Split]:
    """Four training images and no test, of the value that stands in the file."""
    value = int((root / "toy/value.txt").read_text())
    x = np.full((4, 3, pixels, pixels), value, np.uint8)
    return {"toy": Split(Examples(x, np.arange(4)), Examples(x[:0], np.arange(0)))}


TOY = Dataset(name="toy", classes=tuple("abcd"), pixels=4, counts={"toy": (4, 0)}, obtain="Make it.", read=read)


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy/value.txt").write_text("7")
    return tmp_path


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING)

    def messages() -> list[str]:
        found = list(caplog.messages)
        caplog.clear()
        return found

    return messages


def unread(root: Path, pixels: int) -> dict[str, Split]:
    raise AssertionError("the publisher's files were read although the cache is good")


KEPT = replace(TOY, read=unread)


def check(splits: dict[str, Split], value: int = 7, pixels: int = 4) -> None:
    assert list(splits) == ["toy"]
    train, test = splits["toy"].train, splits["toy"].test
    assert train.x.shape == (4, 3, pixels, pixels)
    assert (train.x == value).all()
    assert train.y.tolist() == [0, 1, 2, 3]
    assert test.x.shape == (0, 3, pixels, pixels)
    assert test.y.shape == (0,)
    assert train.x.dtype == test.x.dtype == np.uint8
    assert train.y.dtype == test.y.dtype == np.int64


def test_the_second_load_reads_the_cache_only(root: Path, warnings_of: Callable[[], list[str]]) -> None:
    check(load(TOY, root))
    check(load(KEPT, root))
    assert warnings_of() == []
    assert {path.name for path in (root / "cache").iterdir()} == {"toy-4-1"}
    assert {path.name for path in (root / TARGET).iterdir()} == PARTS | {"index.json"}


def test_domains_keep_their_order(root: Path) -> None:
    def two(root: Path, pixels: int) -> dict[str, Split]:
        split = read(root, pixels)["toy"]
        return {"z": split, "a": Split(Examples(split.train.x + 1, split.train.y), split.test)}

    for reader in (two, unread):
        found = load(replace(TOY, read=reader), root)
        assert list(found) == ["z", "a"]
        assert [int(found[name].train.x.max()) for name in found] == [7, 8]


def test_tables_are_kept_as_they_are(root: Path) -> None:
    table = np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3)
    split = Split(Examples(table, np.arange(2)), Examples(table[:1], np.arange(1)))
    for reader in (lambda root, pixels: {"toy": split}, unread):
        found = load(replace(TOY, read=reader), root)["toy"].train.x
        assert found.dtype == np.float32
        assert np.array_equal(found, table)


def test_each_side_has_a_cache_of_its_own(root: Path) -> None:
    check(load(TOY, root, pixels=6), pixels=6)
    check(load(TOY, root))
    check(load(KEPT, root, pixels=6), pixels=6)


def test_the_index_says_what_is_there_and_what_it_was_made_from(root: Path) -> None:
    os.utime(root / "toy/value.txt", ns=(5, 6))
    load(TOY, root)
    index = json.loads((root / TARGET / "index.json").read_text())
    assert index["made_from"] == [["toy/value.txt", 1, 6]]
    assert {f"{name}.npy" for name in index["arrays"]} == PARTS
    for name, entry in index["arrays"].items():
        path = root / TARGET / f"{name}.npy"
        array = np.load(path, allow_pickle=False)
        assert [entry["shape"], entry["dtype"]] == [list(array.shape), array.dtype.str]
        assert entry["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
        assert entry["bytes"] == path.stat().st_size


def test_changed_files_are_read_again(root: Path, warnings_of: Callable[[], list[str]]) -> None:
    load(TOY, root)
    (root / "toy/value.txt").write_text("9")
    os.utime(root / "toy/value.txt", ns=(1, 1))
    check(load(TOY, root), value=9)
    check(load(KEPT, root), value=9)
    (root / "toy/more.txt").touch()
    with pytest.raises(AssertionError, match="were read"):
        load(KEPT, root)
    assert warnings_of() == []


def test_files_that_change_while_they_are_read_are_not_kept(root: Path) -> None:
    def slow(root: Path, pixels: int) -> dict[str, Split]:
        found = read(root, pixels)
        (root / "toy/value.txt").write_text("99")
        return found

    with pytest.raises(BadInput, match="changed while they were read"):
        load(replace(TOY, read=slow), root)
    assert not (root / TARGET).exists()


def test_arrays_become_tensors_without_a_copy_and_nothing_is_written_back(root: Path) -> None:
    load(TOY, root)
    before = {path: path.read_bytes() for path in (root / TARGET).iterdir()}
    x = load(KEPT, root)["toy"].train.x
    tensor = torch.from_numpy(x)  # a warning would be an error
    assert tensor.data_ptr() == x.ctypes.data
    tensor.fill_(1)
    assert (x == 1).all()
    check(load(KEPT, root))
    del x, tensor
    assert {path: path.read_bytes() for path in (root / TARGET).iterdir()} == before


def test_the_arrays_are_mapped_and_not_read(root: Path) -> None:
    load(TOY, root)
    base: Any = load(KEPT, root)["toy"].train.x
    assert type(base) is np.ndarray
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)
    assert base.mode == "c"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def turn(path: Path) -> None:
    """In Fortran's order: the same size, other images."""
    path.write_bytes(path.read_bytes().replace(b"'fortran_order': False, ", b"'fortran_order': True,  "))


def retype(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"|u1", b"|i1").replace(b"<i8", b"<f8"))


def remove(path: Path) -> None:
    path.unlink()


def link(path: Path) -> None:
    path.rename(path.parent.parent / "moved")
    path.symlink_to(path.parent.parent / "moved")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [cut, lengthen, turn, retype, remove, link, empty, folder], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["0-train-x.npy", "0-train-y.npy", "index.json"])
def test_a_damaged_cache_is_said_so_and_made_again(
    root: Path, name: str, damage: Callable[[Path], None], warnings_of: Callable[[], list[str]]
) -> None:
    if name == "index.json" and damage in (turn, retype, lengthen):
        damage = empty
    load(TOY, root)
    damage(root / TARGET / name)
    check(load(TOY, root))
    (warning,) = warnings_of()
    assert f"{TARGET} is damaged" in warning
    check(load(KEPT, root))
    assert warnings_of() == []
    assert {path.name for path in (root / "cache").iterdir()} - {"moved"} == {"toy-4-1"}


@pytest.mark.parametrize(
    "change",
    [
        lambda index: [],
        lambda index: index | {"format": 2},
        lambda index: {key: value for key, value in index.items() if key != "arrays"},
        lambda index: index | {"domains": ["toy", "more"]},
        lambda index: index | {"domains": 3},
        lambda index: index | {"arrays": index["arrays"] | {"0-train-x": 3}},
        lambda index: with_entry(index, shape=[4, 3, 4, 5]),
        lambda index: with_entry(index, shape=[4, 4, 3, 4]),
        lambda index: with_entry(index, shape=[-4, 3, -4, 4]),
        lambda index: with_entry(index, shape=[4.0, 3, 4, 4]),
        lambda index: with_entry(index, shape="4344"),
        lambda index: with_entry(index, shape=[1 << 62, 1 << 62]),
        lambda index: with_entry(index, dtype="|O"),
        lambda index: with_entry(index, bytes=1),
    ],
)
def test_an_index_that_lies_is_damage(
    root: Path, change: Callable[[Any], Any], warnings_of: Callable[[], list[str]]
) -> None:
    load(TOY, root)
    path = root / TARGET / "index.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    check(load(TOY, root))
    assert "is damaged" in warnings_of()[0]
    check(load(KEPT, root))


def with_entry(index: Any, **change: Any) -> Any:
    entry = index["arrays"]["0-train-x"] | change
    return index | {"arrays": index["arrays"] | {"0-train-x": entry}}


@pytest.mark.parametrize("text", [b"[" * 100_000, b"\xff\xfe", b"NaN", b'{"format": 1}'])
def test_an_index_that_is_no_index_is_damage(root: Path, text: bytes, warnings_of: Callable[[], list[str]]) -> None:
    load(TOY, root)
    (root / TARGET / "index.json").write_bytes(text)
    check(load(TOY, root))
    assert "is damaged" in warnings_of()[0]


def test_a_cache_that_cannot_be_written_is_done_without(root: Path, warnings_of: Callable[[], list[str]]) -> None:
    (root / "cache").touch()  # as good as a root that is read-only, also for a superuser
    for _ in range(2):
        found = load(TOY, root)
        check(found)
        torch.from_numpy(found["toy"].train.x)
        (warning,) = warnings_of()
        assert f"toy cannot be cached in {root / 'cache'}" in warning


def test_what_cannot_be_written_to_is_copied_when_there_is_no_cache(root: Path) -> None:
    def frozen(root: Path, pixels: int) -> dict[str, Split]:
        split = read(root, pixels)["toy"]
        split.train.x.flags.writeable = False
        return {"toy": split}

    (root / "cache").touch()
    found = load(replace(TOY, read=frozen), root)["toy"].train.x
    assert found.flags.writeable
    torch.from_numpy(found)  # a warning would be an error


def test_what_the_disk_gives_back_otherwise_is_not_kept(
    root: Path, monkeypatch: pytest.MonkeyPatch, warnings_of: Callable[[], list[str]]
) -> None:
    real = cache._write

    def bad(path: Path, *parts: Any) -> None:
        real(path, *parts)
        if path.name == "0-train-x.npy":
            path.write_bytes(path.read_bytes()[:-1] + b"\x00")

    monkeypatch.setattr(cache, "_write", bad)
    check(load(TOY, root))
    assert "0-train-x.npy differs on disk" in warnings_of()[0]
    assert list((root / "cache").iterdir()) == []


def test_every_file_is_flushed_before_the_folder_gets_its_name(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str | int] = []
    real = os.rename

    def rename(old: Path, new: Path) -> None:
        real(old, new)
        events.append("named")

    monkeypatch.setattr(os, "fsync", lambda handle: events.append(os.fstat(handle).st_ino))
    monkeypatch.setattr(os, "rename", rename)
    load(TOY, root)
    made = {path.stat().st_ino for path in (root / TARGET, *(root / TARGET).iterdir())}
    assert set(events[: events.index("named")]) == made
    assert events[events.index("named") + 1 :] == [(root / "cache").stat().st_ino]


def test_the_root_is_that_of_the_environment(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTOFED_DATA", str(root))
    check(load(TOY))
    monkeypatch.setenv("PROTOFED_DATA", "")
    with pytest.raises(BadInput, match=r"toy: set \$PROTOFED_DATA to the data folder\. Make it\."):
        load(TOY)
    monkeypatch.setenv("PROTOFED_DATA", str(root / "nowhere"))
    with pytest.raises(BadInput, match="nowhere, the data folder, is not a folder"):
        load(TOY)


@pytest.mark.parametrize("pixels", [0, -1, 513])
def test_a_side_that_is_not_possible_is_refused(root: Path, pixels: int) -> None:
    with pytest.raises(BadInput, match=f"images of {pixels} pixels"):
        load(TOY, root, pixels)


@pytest.mark.parametrize("name", ["../toy", "a/b", "", ".toy", "Toy"])
def test_a_name_that_is_no_name_of_a_folder_is_refused(root: Path, name: str) -> None:
    with pytest.raises(BadInput, match="cannot be called"):
        load(replace(TOY, name=name), root)


def test_a_cache_that_leads_out_of_the_root_is_refused(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    (root / "cache").symlink_to(tmp_path_factory.mktemp("elsewhere"))
    with pytest.raises(BadInput, match="leads out of"):
        load(TOY, root)


def test_fewer_examples_than_published_are_said_at_each_load(root: Path, warnings_of: Callable[[], list[str]]) -> None:
    load(TOY, root)
    load(replace(KEPT, counts={"toy": (10, 0)}), root)
    assert warnings_of() == ["toy, training: only 4 of the 10 published examples are here"]


def forked(work: Callable[[], object]) -> int:
    """A process of its own that does the work and exits with 0, or with 1 if it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which hold nothing that is needed here
        process = os.fork()
    if process:
        return process
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def exit_code(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def test_processes_that_build_at_once_end_with_the_same(root: Path) -> None:
    barrier = multiprocessing.get_context("fork").Barrier(4)

    def together(root: Path, pixels: int) -> dict[str, Split]:
        barrier.wait(60)
        return read(root, pixels)

    def build() -> None:
        real = os.rename

        def rename(old: Path, new: Path) -> None:
            if new == root / TARGET:
                barrier.wait(60)  # each of them has seen that nothing is there yet
            real(old, new)

        os.rename = rename  # type: ignore[assignment]
        found = load(replace(TOY, read=together), root)
        check(found)
        assert isinstance(found["toy"].train.x.base, np.memmap)

    assert [exit_code(process) for process in [forked(build) for _ in range(4)]] == [0] * 4
    check(load(KEPT, root))
    assert {path.name for path in (root / "cache").iterdir()} == {"toy-4-1"}


def killed_at(step: int, root: Path) -> None:
    """A load that dies when it is about to make, flush or rename something for that time."""
    steps = itertools.count(1)

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*values: Any, **options: Any) -> Any:
            if next(steps) == step:
                os._exit(9)
            return real(*values, **options)

        return call

    for name in ("mkdir", "fsync", "rename"):
        setattr(os, name, counted(getattr(os, name)))
    load(TOY, root)


@pytest.mark.parametrize("before", ["nothing", "stale"])
def test_a_builder_killed_at_any_step_leaves_nothing_that_is_taken_for_whole(
    root: Path, before: str, warnings_of: Callable[[], list[str]]
) -> None:
    if before == "stale":
        load(TOY, root)
        (root / "toy/value.txt").write_text("9")
        os.utime(root / "toy/value.txt", ns=(1, 1))
    value = int((root / "toy/value.txt").read_text())
    states = []
    for step in itertools.count(1):
        copy = root / f"copy-{step}"
        shutil.copytree(root, copy, ignore=shutil.ignore_patterns("copy-*"))
        code = exit_code(forked(partial(killed_at, step, copy)))
        if code == 0:
            break
        assert code == 9
        try:
            check(load(KEPT, copy), value)
            states.append("whole")
        except AssertionError:
            check(load(TOY, copy), value)
            check(load(KEPT, copy), value)
            states.append("nothing")
    assert warnings_of() == []
    # Three folders, five files and their folder flushed, two renamings; only the last flush comes after the name.
    assert states == ["nothing"] * 11 + ["whole"]
