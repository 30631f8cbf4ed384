"""Files below a folder: found in each place and form, bounded, and never outside."""

import bz2
import gzip
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from protofed.datasets.files import Publication, content, stamps
from protofed.errors import BadInput

NAMES = ("digits", "digits.gz", "digits.bz2")
PACK: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress}


@pytest.fixture
def published(tmp_path: Path) -> Publication:
    (tmp_path / "set").mkdir()
    return Publication("set", "From the moon.")


def put(path: Path, data: bytes = b"12345") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2"])
def test_a_file_is_found_plain_or_compressed(tmp_path: Path, published: Publication, suffix: str) -> None:
    put(tmp_path / f"set/digits{suffix}", PACK[suffix](b"12345"))
    assert published.decoded(tmp_path, NAMES, 5, bytes) == b"12345"


def test_the_plain_file_is_taken_where_there_are_both(tmp_path: Path, published: Publication) -> None:
    put(tmp_path / "set/digits", b"plain")
    put(tmp_path / "set/digits.gz", gzip.compress(b"other"))
    assert published.decoded(tmp_path, NAMES, 5, bytes) == b"plain"


@pytest.mark.parametrize("folder", ["cifar10", "cifar10/cifar-10-batches-bin", "cifar-10-batches-bin"])
def test_the_publishers_folder_may_be_inside_or_beside(tmp_path: Path, folder: str) -> None:
    put(tmp_path / folder / "test_batch.bin")
    assert Publication("cifar10", "").decoded(tmp_path, ["test_batch.bin"], 5, bytes) == b"12345"
    assert [stamp[:2] for stamp in stamps(tmp_path, "cifar10")] == [[f"{folder}/test_batch.bin", 5]]


def test_a_missing_file_is_named_with_its_forms_its_place_and_its_source(
    tmp_path: Path, published: Publication
) -> None:
    with pytest.raises(BadInput, match=r"set: there is no digits or digits\.gz\. From the moon\."):
        published.decoded(tmp_path, NAMES[:2], 5, bytes)


def test_what_a_decoder_refuses_is_said_of_its_file(tmp_path: Path, published: Publication) -> None:
    def refuse(data: bytes) -> None:
        raise BadInput("it is round")

    put(tmp_path / "set/digits")
    with pytest.raises(BadInput, match=r"set/digits: it is round\. Get it again: From the moon\."):
        published.decoded(tmp_path, NAMES, 5, refuse)


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2"])
def test_a_file_is_read_up_to_its_limit_and_not_beyond(tmp_path: Path, suffix: str) -> None:
    pack = PACK[suffix]
    path = put(tmp_path / f"file{suffix}", pack(b"123456"))
    assert content(path, 6) == b"123456"
    with pytest.raises(BadInput, match="more than the 5 bytes"):
        content(path, 5)


@pytest.mark.parametrize("suffix", [".gz", ".bz2"])
def test_a_bomb_is_refused_without_unfolding_it(tmp_path: Path, suffix: str) -> None:
    packed = PACK[suffix](bytes(1 << 22))
    path = put(tmp_path / f"file{suffix}", packed * 512)  # 2 GiB, in members of 4 MiB
    tracemalloc.start()
    try:
        with pytest.raises(BadInput, match="more than the 1000 bytes"):
            content(path, 1000)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("suffix", [".gz", ".bz2"])
def test_a_compressed_file_that_is_cut_or_damaged_is_refused(tmp_path: Path, suffix: str) -> None:
    packed = {".gz": gzip.compress, ".bz2": bz2.compress}[suffix](bytes(range(256)) * 9)
    middle = len(packed) // 2
    for data in (packed[:-5], packed[:middle], packed[:middle] + b"\xff\xff\xff" + packed[middle + 3 :], b"PK"):
        with pytest.raises(BadInput, match="cannot be read completely"):
            content(put(tmp_path / f"file{suffix}", data), 1 << 20)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_link_out_of_the_root_is_refused(tmp_path: Path, what: str) -> None:
    root = tmp_path / "root"
    outside = put(tmp_path / "elsewhere/digits")
    root.mkdir()
    if what == "file":
        (root / "set").mkdir()
        (root / "set/digits").symlink_to(outside)
    else:
        (root / "set").symlink_to(outside.parent)
        assert stamps(root, "set") == []
    with pytest.raises(BadInput, match="leads out of"):
        Publication("set", "").decoded(root, NAMES, 5, bytes)


def test_a_name_that_climbs_out_of_the_root_is_refused(tmp_path: Path) -> None:
    put(tmp_path / "digits")
    (tmp_path / "root/set").mkdir(parents=True)
    with pytest.raises(BadInput, match="leads out of"):
        Publication("set", "").decoded(tmp_path / "root", ["../../digits"], 5, bytes)


def test_a_link_within_the_root_and_a_root_that_is_a_link_are_fine(tmp_path: Path) -> None:
    put(tmp_path / "root/other/digits")
    (tmp_path / "root/set").mkdir()
    (tmp_path / "root/set/digits").symlink_to(tmp_path / "root/other/digits")
    (tmp_path / "link").symlink_to(tmp_path / "root")
    assert Publication("set", "").decoded(tmp_path / "link", NAMES, 5, bytes) == b"12345"


def test_what_is_no_file_is_not_opened(tmp_path: Path, published: Publication) -> None:
    os.mkfifo(tmp_path / "set/digits")  # opening it would wait for ever
    with pytest.raises(BadInput, match="is not a regular file"):
        published.decoded(tmp_path, NAMES, 5, bytes)


def test_stamps_name_all_files_in_order_and_change_with_size_and_time(tmp_path: Path) -> None:
    for name in ("b", "a", "deep/c"):
        os.utime(put(tmp_path / "set" / name), ns=(7, 7))
    put(tmp_path / "unrelated/d")
    (tmp_path / "set/nowhere").symlink_to("gone")
    before = stamps(tmp_path, "set")
    assert before == [["set/a", 5, 7], ["set/b", 5, 7], ["set/deep/c", 5, 7]]
    os.utime(tmp_path / "set/b", ns=(7, 8))
    assert stamps(tmp_path, "set")[1] == ["set/b", 5, 8]
