"""Checkpoints: whole or ignored, whatever is done to them."""

import errno
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from protofed import RunFailed, tree, wire
from protofed.engine.federation import Federation
from protofed.engine.state import State
from protofed.runs.store import checkpoint
from protofed.runs.store.checkpoint import Checkpoint
from run_doubles import small_experiment


@pytest.fixture
def federation() -> Federation:
    return small_experiment("moon").federation


@pytest.fixture
def states(federation: Federation) -> list[State]:
    """After 0, 1, 2 and 3 rounds."""
    states = [federation.start()]
    for _ in range(3):
        states.append(federation.advance(states[-1]))
    return states


@pytest.fixture
def folder(tmp_path: Path, states: list[State], federation: Federation) -> Path:
    for state in states:
        save(tmp_path, state, federation, f"line {state.round}\n")
    return tmp_path


def save(folder: Path, state: State, federation: Federation, lines: str = "") -> None:
    federation.runtime.store = checkpoint.saved_store(folder, federation)
    checkpoint.save(folder, Checkpoint(state, lines), federation, "run")


def same(a: object, b: object) -> bool:
    left, right = tree.named_leaves(a), tree.named_leaves(b)
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def test_what_is_saved_is_what_is_loaded(folder: Path, federation: Federation, states: list[State]) -> None:
    loaded = checkpoint.load(folder, federation, "run")
    assert loaded is not None
    assert loaded.state.round == 3
    assert loaded.rounds == "line 3\n"
    assert same(loaded.state.server, states[3].server)
    assert same(dict(loaded.state.memories), states[3].memories)


def test_the_last_two_are_kept_and_nothing_else(folder: Path) -> None:
    assert sorted(p.name for p in folder.iterdir()) == ["000002", "000003", "memories"]
    assert sorted(p.name for p in (folder / "memories").iterdir()) == ["000002.safetensors", "000003.safetensors"]


@pytest.mark.parametrize("name", ["server.safetensors", "memories", "rounds.jsonl", "manifest"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "remove"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    folder: Path, federation: Federation, states: list[State], name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / ("memories/000003.safetensors" if name == "memories" else f"000003/{name}")
    data = bytearray(path.read_bytes())
    match damage:
        case "flip":
            data[len(data) // 2] ^= 4
            path.write_bytes(data)
        case "truncate":
            path.write_bytes(data[:-1])
        case "empty":
            path.write_bytes(b"")
        case "remove":
            path.unlink()
    loaded = checkpoint.load(folder, federation, "run")
    assert loaded is not None
    assert loaded.state.round == 2
    assert same(loaded.state.server, states[2].server)
    assert "000003 is damaged" in caplog.text
    assert name in caplog.text


def test_every_random_bit_flip_is_detected(folder: Path, federation: Federation) -> None:
    draw = random.Random(0)
    files = [*(folder / "000003").iterdir(), folder / "memories" / "000003.safetensors"]
    shutil.rmtree(folder / "000002")
    for _ in range(200):
        path = draw.choice(files)
        before = path.read_bytes()
        data = bytearray(before)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        with pytest.raises(RunFailed, match=r"every checkpoint .* is damaged"):
            checkpoint.load(folder, federation, "run")
        path.write_bytes(before)
    assert checkpoint.load(folder, federation, "run") is not None


def test_files_swapped_between_checkpoints_are_detected(folder: Path, federation: Federation) -> None:
    shutil.copy(folder / "000002" / "server.safetensors", folder / "000003" / "server.safetensors")
    loaded = checkpoint.load(folder, federation, "run")
    assert loaded is not None
    assert loaded.state.round == 2


def test_no_checkpoint_is_no_error(tmp_path: Path, federation: Federation) -> None:
    assert checkpoint.load(tmp_path / "none", federation, "run") is None


def test_a_checkpoint_of_another_run_is_refused(folder: Path, federation: Federation) -> None:
    with pytest.raises(RunFailed, match="belongs to run run, not to other"):
        checkpoint.load(folder, federation, "other")


def test_what_a_killed_run_left_half_written_is_ignored_and_cleaned(
    folder: Path, federation: Federation, states: list[State]
) -> None:
    half = folder / ".writing-000004"
    half.mkdir()
    (half / "server.safetensors").write_bytes(b"half")
    loaded = checkpoint.load(folder, federation, "run")
    assert loaded is not None
    assert loaded.state.round == 3
    later = federation.advance(loaded.state)
    save(folder, later, federation)
    assert sorted(p.name for p in folder.iterdir()) == ["000003", "000004", "memories"]


# Every operation of the save path that can fail.
OPERATIONS = ["mkdir", "open", "write", "replace", "rename", "fsync"]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_a_failing_disk_leaves_the_last_good_checkpoint_and_says_so(
    folder: Path,
    federation: Federation,
    states: list[State],
    operation: str,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = getattr(os, operation)

    def failing(*arguments: Any, **more: Any) -> Any:
        if operation == "open" and not arguments[1] & os.O_CREAT:
            return real(*arguments, **more)  # what is there can be read
        raise OSError(number, "the disk said no")

    later = federation.advance(states[3])
    with monkeypatch.context() as patch:
        patch.setattr(f"os.{operation}", failing)
        with pytest.raises(RunFailed) as caught:
            save(folder, later, federation)
    message = str(caught.value)
    assert "the disk said no" in message
    assert str(folder / "000004") in message
    assert f"The last good checkpoint, {folder / '000003'}, is intact" in message
    assert "bytes to write" in message
    assert sorted(p.name for p in folder.iterdir()) == ["000002", "000003", "memories"]
    assert sorted(p.name for p in (folder / "memories").iterdir()) == ["000002.safetensors", "000003.safetensors"]
    loaded = checkpoint.load(folder, federation, "run")
    assert loaded is not None
    assert same(loaded.state.server, states[3].server)


def test_memories_of_clients_that_keep_nothing_survive(tmp_path: Path) -> None:
    federation = small_experiment("fedavg").federation
    state = federation.advance(federation.start())
    save(tmp_path, state, federation)
    loaded = checkpoint.load(tmp_path, federation, "run")
    assert loaded is not None
    assert loaded.state.memories.keys() == state.memories.keys()
    assert wire.encode(loaded.state.server) == wire.encode(state.server)


def test_a_damaged_checkpoint_is_not_called_good(
    folder: Path, federation: Federation, states: list[State], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "000003" / "server.safetensors").write_bytes(b"damaged")

    def failing(*arguments: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, "the disk said no")

    later = federation.advance(states[3])
    monkeypatch.setattr("os.rename", failing)
    with pytest.raises(RunFailed, match=f"{folder / '000002'}, is intact"):
        save(folder, later, federation)


def test_where_nothing_can_be_opened_the_error_says_so_and_no_more(
    folder: Path, federation: Federation, states: list[State], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: object, **more: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    later = federation.advance(states[3])
    with monkeypatch.context() as patch:
        patch.setattr("os.open", failing)
        with pytest.raises(RunFailed, match=r"could not save .*000004: too many open files .* cannot be read"):
            save(folder, later, federation)
    assert checkpoint.load(folder, federation, "run") is not None
