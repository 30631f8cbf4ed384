"""Trees come back from bytes as they were, and bytes that are anything else are refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from doubles import bits
from protofed import wire
from protofed.tree import Nothing, Params, record
from protofed.wire import WireError


@record
class Inner:
    count: Tensor
    flags: tuple[Tensor, ...]


@record
class Message:
    params: Params
    inner: Inner
    nothing: Nothing


def message() -> Message:
    params = {
        "b.weight": torch.randn(3, 2, generator=torch.Generator().manual_seed(0)).T,  # not contiguous
        "a.double": torch.tensor([1 / 3, -0.0, torch.inf], dtype=torch.float64),
        "empty": torch.zeros(0, 4),
    }
    inner = Inner(torch.tensor(2**53 + 1), (torch.tensor([True, False]), torch.tensor(0.5)))
    return Message(params, inner, Nothing())


def file_of(header: str, data: bytes = b"") -> bytes:
    return len(header.encode()).to_bytes(8, "little") + header.encode() + data


def test_a_tree_comes_back_bit_for_bit() -> None:
    back = wire.decode(wire.encode(message()), message())
    assert isinstance(back, Message)
    assert isinstance(back.inner.flags, tuple)
    assert bits(back) == bits(message())


def test_equal_trees_have_equal_bytes() -> None:
    assert wire.encode(message()) == wire.encode(message())


def test_names_are_paths_and_never_change() -> None:
    """A change here would make old checkpoints unreadable."""
    names = ["params/b.weight", "params/a.double", "params/empty", "inner/count", "inner/flags/0", "inner/flags/1"]
    assert list(wire.to_arrays(message())) == names
    assert set(wire.decode_arrays(wire.encode(message()))) == set(names)


def test_arrays_are_matched_by_name_whatever_their_order() -> None:
    arrays = wire.to_arrays(message())
    assert bits(wire.from_arrays(dict(reversed(arrays.items())), message())) == bits(message())


def test_bytes_do_not_share_memory_with_the_tree() -> None:
    tree = {"a": torch.zeros(2)}
    data = wire.encode(tree)
    tree["a"].add_(1)
    assert wire.decode(data, tree)["a"].tolist() == [0, 0]


def test_missing_and_unexpected_names_are_told() -> None:
    arrays = wire.to_arrays(message())
    arrays["inner/extra"] = arrays.pop("inner/count")
    with pytest.raises(WireError, match=r"missing \['inner/count'\], unexpected \['inner/extra'\]"):
        wire.from_arrays(arrays, message())
    del arrays["inner/extra"]
    with pytest.raises(WireError, match=r"missing \['inner/count'\], unexpected nothing"):
        wire.from_arrays(arrays, message())


def test_a_leaf_that_is_not_a_tensor_is_refused() -> None:
    with pytest.raises(WireError, match="a/0 is float"):
        wire.encode({"a": [1.0]})


ENTRY = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'


def test_the_crafted_file_of_these_tests_is_good_but_for_its_fault() -> None:
    assert wire.decode_arrays(file_of(f'{{"a":{ENTRY}}}', b"\7"))["a"].tolist() == [7]


@pytest.mark.parametrize(
    "header",
    [
        f'{{"a":{ENTRY},"a":{ENTRY}}}',
        f'{{"a":{ENTRY},"\\u0061":{ENTRY}}}',
        '{"a":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}}',
    ],
    ids=["plain", "escaped", "inside"],
)
def test_a_name_that_appears_twice_is_refused(header: str) -> None:
    with pytest.raises(WireError, match="appears twice"):
        wire.decode_arrays(file_of(header, b"\7"))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 8,
        (2**64 - 1).to_bytes(8, "little") + b"{}",
        file_of("[{}]"),
        file_of("7"),
        file_of("[" * 100_000),
        file_of('{"a":' + "1" * 5000 + "}"),  # Python refuses to read whole numbers of that length
        file_of(json.dumps({"a": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 16]}}), b"\0" * 16),
        file_of(json.dumps({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}), b"\0"),
        file_of(json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}), b"\0\0"),
        file_of('{"\\ud800":' + ENTRY + "}", b"\0"),
    ],
    ids=["empty", "zeros", "endless", "list", "number", "deep", "long", "huge", "short", "rest", "surrogate"],
)
def test_malformed_files_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        wire.decode_arrays(data)


def test_every_truncation_is_refused() -> None:
    data = wire.encode(message())
    for length in range(len(data)):
        with pytest.raises(WireError):
            wire.decode(data[:length], message())


def test_random_bytes_are_refused() -> None:
    random = np.random.default_rng(0)
    for case in range(200):
        data = random.bytes(int(random.integers(0, 300)))
        if case % 2:  # with a length that fits, so that what follows is read as a header
            data = len(data).to_bytes(8, "little") + data
        with pytest.raises(WireError):
            wire.decode_arrays(data)


def test_damaged_files_are_refused_or_hold_plain_tensors() -> None:
    random, good = np.random.default_rng(1), wire.encode(message())
    for _ in range(200):
        data = bytearray(good)
        for place in random.integers(0, len(data), 3):
            data[place] = random.integers(256)
        try:
            back = wire.decode(bytes(data), message())
        except WireError:
            continue
        assert set(wire.to_arrays(back)) == set(wire.to_arrays(message()))


def test_bytes_that_would_run_code_do_not(tmp_path: Path) -> None:
    """A pickle whose loading makes a file, bare and as the header of a safetensors file."""
    trace = tmp_path / "trace"
    harm = f"cos\nsystem\n(S'touch {trace}'\ntR."
    for data in (harm.encode(), file_of(harm), file_of(json.dumps({"__metadata__": {"format": harm}}))):
        try:
            arrays = wire.decode_arrays(data)
        except WireError:
            continue
        assert arrays == {}
    assert not trace.exists()
