"""Checkpoints under loss of power, failing disks, damage and other configurations (R3, R4, R5, R6)."""

import ctypes
import errno
import json
import os
import random
import re
import resource
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from shutil import copytree
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from faults.kills import ended, fingerprint, fingerprint_of, folder_in_memory, forked
from faults.power import Power, Remains, lay_out, moments
from faults.shim import OPERATIONS, Fault, Killed, Operation, Shim, ends, fails, fails_from
from protofed import METHODS, wire
from protofed.engine.federation import Federation
from protofed.errors import BadInput, RunFailed
from protofed.nn.networks import Parts
from protofed.runs.config import config as configuration
from protofed.runs.config.config_diff import HARMLESS
from protofed.runs.results import parsed
from protofed.runs.runner import Experiment, Silent, execute
from protofed.runs.store import checkpoint, disk
from protofed.runs.store.checkpoint import Checkpoint
from protofed.runs.store.client_state import SavedStore
from protofed.runs.store.folder import RunFolder
from protofed.tasks import TASKS
from run_doubles import small_experiment

ROUNDS = 5


@dataclass(frozen=True)
class History:
    """A run, state by state: each can be saved again elsewhere, in order."""

    federation: Federation
    states: list[Checkpoint]
    """After 0, 1, 2, ... rounds."""
    fingerprints: list[str]

    def save(self, folder: Path, round: int) -> None:
        checkpoint.save(folder, self.states[round], self.federation, "run")

    def load(self, folder: Path) -> Checkpoint | None:
        return checkpoint.load(folder, self.federation, "run")


def half_taking_part(rounds: int = ROUNDS) -> Experiment:
    """Two of three clients take part in a round, so that older files hold some of the memories."""
    whole = small_experiment("moon", rounds)
    training = replace(whole.federation.training, fraction=0.5)
    return replace(whole, federation=replace(whole.federation, training=training))


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    folder, federation = tmp_path_factory.mktemp("history"), half_taking_part().federation
    states: list[Checkpoint] = []
    federation.runtime.store = checkpoint.saved_store(folder, federation)
    found, state = History(federation, states, []), federation.start()
    for number in range(ROUNDS + 1):
        lines = "".join(f'{{"round": {k}}}\n' for k in range(number + 1))
        states.append(Checkpoint(state, lines))
        found.save(folder, number)
        loaded = found.load(folder)
        assert loaded is not None
        found.fingerprints.append(fingerprint_of(loaded))
        state = federation.advance(loaded.state)
    store, receipts = federation.runtime.store, states[3].state.receipts
    assert isinstance(store, SavedStore)
    assert len(store.unsaved(receipts)) < len(receipts), "no memory is in an older file"
    return found


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with folder_in_memory() as folder:
        yield folder


# ---- R3: loss of power


@dataclass(frozen=True)
class Recorded:
    """The operations of some saves in an empty folder, and when each save had returned."""

    root: Path
    operations: list[Operation]
    acknowledged: list[int]
    tried: int
    """How many there were with those that failed, such as looking for what is not there."""


def recorded(history: History, root: Path, saves: int, patch: pytest.MonkeyPatch) -> Recorded:
    root.mkdir()
    acknowledged = []
    with patch.context() as inner:
        inner.setattr(checkpoint.disk, "os", shim := Shim())
        for number in range(saves):
            history.save(root / "checkpoint", number)
            acknowledged.append(len(shim.done))
    return Recorded(root, shim.done, acknowledged, len(shim.tried))


def outcomes(found: Recorded) -> Iterator[tuple[int, Remains]]:
    """How many saves had returned when power was lost, and what may be left then; each once."""
    seen = set()
    for number, states in moments(found.root, found.operations):
        returned = sum(1 for mark in found.acknowledged if mark <= number)
        for one in states:
            if (returned, one) not in seen:
                seen.add((returned, one))
                yield returned, one


def problem(history: History, returned: int, remains: Remains, folder: Path, log: pytest.LogCaptureFixture) -> str:
    """What is wrong with what a loss of power has left, if anything."""
    shutil.rmtree(folder, ignore_errors=True)
    lay_out(remains, folder)
    log.clear()
    try:
        loaded = history.load(folder / "checkpoint")
        if log.records:
            return f"a damaged checkpoint: {log.records[0].getMessage()}"
        if loaded is None:
            return "a save that had returned is lost" if returned else ""
        number = loaded.state.round
        if number < returned - 1:
            return "a save that had returned is lost"
        if fingerprint_of(loaded) != history.fingerprints[number]:
            return "another state"
        history.save(folder / "checkpoint", number + 1)
        later = history.load(folder / "checkpoint")
        if later is None or fingerprint_of(later) != history.fingerprints[number + 1]:
            return "the next save is not what is loaded"
    except RunFailed as error:
        return str(error)
    return ""


def test_no_loss_of_power_during_five_saves_leaves_anything_but_the_old_or_the_new_state(
    history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """R3. A save that has returned is the one that is loaded, or the next one; saving goes on from there."""
    found = recorded(history, tmp_path / "recorded", 5, monkeypatch)
    count = 0
    for returned, remains in outcomes(found):
        count += 1
        assert problem(history, returned, remains, tmp_path / "left", caplog) == "", f"after {returned} saves"
    print(f"{len(found.operations)} operations, {count} states after a loss of power, 0 bad")
    assert count > 200


FSYNC = "            left = left[os.write(handle, left) :]\n        os.fsync(handle)\n"
FOLDER_SYNC = "    os.fsync(folder)\n"
ASIDE = '    temporary = f".writing-{name}"\n    remove(folder, temporary)'
RENAMED = "    os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)\n"
RENAME = f"    discard(folder, name)\n{RENAMED}"
WAIT = f"{RENAMED}    sync(folder)\n"
POWER_MUTANTS = {
    "files are not synced": [(FSYNC, FSYNC.replace("        os.fsync(handle)\n", ""))],
    "folders are not synced": [(FOLDER_SYNC, "    pass\n")],
    "written in place": [(ASIDE, ASIDE.replace('f".writing-{name}"', "name")), (RENAME, "")],
    "returned before the rename": [(WAIT, RENAMED)],
}


def changed(module: ModuleType, changes: Iterable[tuple[str, str]]) -> ModuleType:
    """A module with other text."""
    assert module.__file__
    text = re.sub(r"(?m)^ *# guard: .*\n|  # guard: .*$", "", Path(module.__file__).read_text(encoding="utf-8"))
    for old, new in changes:
        assert text.count(old) == 1, f"not once in {module.__file__}: {old}"
        text = text.replace(old, new)
    other = ModuleType(module.__name__)
    exec(text, vars(other))  # noqa: S102, our own text
    return other


@pytest.mark.parametrize("mutant", POWER_MUTANTS)
def test_a_save_that_forgets_a_step_is_caught(
    mutant: str,
    history: History,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """R3. The same search finds what a loss of power would do to it."""
    monkeypatch.setattr(checkpoint, "disk", changed(disk, POWER_MUTANTS[mutant]))
    found = recorded(history, tmp_path / "recorded", 2, monkeypatch)
    monkeypatch.setattr(checkpoint, "disk", disk)
    problems = (problem(history, n, one, tmp_path / "left", caplog) for n, one in outcomes(found))
    why = next(filter(None, problems), "")
    print(f"{mutant}: {why}")
    assert why


def test_a_save_after_a_kill_is_as_durable_as_any(
    history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """R3. A kill at any operation of the first save, the save again, and then a loss of power."""
    last = recorded(history, tmp_path / "whole", 1, monkeypatch).tried
    count = 0
    for at in range(1, last + 1):
        root = tmp_path / str(at)
        root.mkdir()
        power = Power(root)
        for shim in (Shim(ends(at)), Shim()):
            with monkeypatch.context() as patch:
                patch.setattr(disk, "os", shim)
                with suppress(Killed):
                    history.save(root / "checkpoint", 0)
            for operation in shim.done:
                power.follow(operation)
        for one in power.remains():
            count += 1
            assert problem(history, 1, one, tmp_path / "left", caplog) == "", f"killed at operation {at}"
    print(f"{last} kills, {count} states after the loss of power")


def test_the_folder_of_a_run_and_those_that_it_lies_in_are_there_when_work_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R3."""
    monkeypatch.setattr(disk, "os", shim := Shim())
    with RunFolder(tmp_path / "results" / "first" / "run").locked():
        power = Power(tmp_path)
        for operation in shim.done:
            power.follow(operation)
        nothing: Remains = frozenset()
        assert power.remains() == {frozenset({("results", frozenset({("first", frozenset({("run", nothing)}))}))})}


class Rounds(Silent):
    """Notes when each state of a run had been saved, and what it was."""

    def __init__(self, folder: RunFolder, experiment: Experiment, shim: Shim) -> None:
        self.folder, self.experiment, self.shim = folder, experiment, shim
        self.acknowledged: list[int] = []
        self.fingerprints: list[str] = []

    def begin(self, federation: Federation, done: int) -> None:
        self.round(None)

    def round(self, result: object) -> None:
        self.acknowledged.append(len(self.shim.done))
        self.fingerprints.append(fingerprint(self.folder.path, self.experiment) if result else "")


def run_recorded(
    experiment: Experiment, folder: RunFolder, shim: Shim, patch: pytest.MonkeyPatch
) -> tuple[Recorded, list[str]]:
    """A run's operations, to its end or until it is killed, and the fingerprint of each round."""
    rounds = Rounds(folder, experiment, shim)
    with patch.context() as inner:
        inner.setattr(disk, "os", shim)
        with suppress(Killed):
            execute(experiment, folder, resume=True, observer=rounds)
    return Recorded(folder.path, shim.done, rounds.acknowledged, len(shim.tried)), rounds.fingerprints


def run_problem(experiment: Experiment, fingerprints: list[str], returned: int, folder: RunFolder) -> str:
    """What is wrong with a run's folder after a loss of power, if anything."""
    saved = checkpoint.load(folder.checkpoints, experiment.federation, experiment.identity)
    config, lines = folder.path / "config.toml", folder.read_rounds()
    number = -1 if saved is None else saved.state.round
    wrong = {
        "a round that had been saved is lost": number < returned - 1,
        "another state": saved is not None and number > 0 and fingerprint_of(saved) != fingerprints[number],
        "config.toml is not whole": config.exists() and config.read_text() != experiment.config,
        "a state without its config.toml": number >= 0 and not config.exists(),
        "rounds that no state holds": len(parsed(lines)) > max(number, 0),
        "it is called done and is not": folder.is_done and number < experiment.federation.training.rounds,
    }
    return next((what for what, is_so in wrong.items() if is_so), "")


def test_a_run_that_loses_power_has_its_configuration_its_rounds_and_its_end_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """R3. From the first file of a run to its last."""
    experiment = replace(half_taking_part(2), config="[task]\nname = 'small'\n")
    found, fingerprints = run_recorded(experiment, RunFolder(tmp_path / "whole"), Shim(), monkeypatch)
    count = 0
    for returned, remains in outcomes(found):
        count += 1
        lay_out(remains, tmp_path / "left")
        assert run_problem(experiment, fingerprints, returned, RunFolder(tmp_path / "left")) == ""
        assert not caplog.records, "a damaged checkpoint"
        shutil.rmtree(tmp_path / "left")
    print(f"{len(found.operations)} operations, {count} states after a loss of power, 0 bad")
    assert count > 100


def test_a_run_that_is_called_done_is_done_though_it_was_killed_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R3. A kill at any of the last operations, the run again, and then a loss of power."""
    experiment = half_taking_part(1)
    whole, fingerprints = run_recorded(experiment, RunFolder(tmp_path / "whole"), Shim(), monkeypatch)
    for at in range(whole.acknowledged[0] + 1, whole.tried + 1):
        folder = RunFolder(tmp_path / str(at))
        power = Power(folder.path)
        for shim in (Shim(ends(at)), Shim()):
            for operation in run_recorded(experiment, folder, shim, monkeypatch)[0].operations:
                power.follow(operation)
        for one in power.remains():
            lay_out(one, tmp_path / "left")
            found = run_problem(experiment, fingerprints, 2, RunFolder(tmp_path / "left"))
            assert found == "", f"killed at operation {at}"
            assert RunFolder(tmp_path / "left").is_done
            assert fingerprint(tmp_path / "left", experiment) == fingerprints[-1]
            shutil.rmtree(tmp_path / "left")


# ---- R4: a disk that fails


ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EDQUOT)
NEEDS_ROOM = ("open", "write", "fsync", "mkdir", "replace", "rename")


@pytest.fixture
def three_saved(history: History, tmp_path: Path) -> Path:
    """A folder with the states after 0, 1 and 2 rounds, of which two are kept."""
    for number in range(3):
        history.save(tmp_path / "saved", number)
    return tmp_path / "saved"


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_last_is(history: History, folder: Path, rounds: set[int], what: str) -> None:
    """One of these states is loaded, to the bit, and nothing lies around that no checkpoint names."""
    loaded = history.load(folder)
    assert loaded is not None, what
    assert loaded.state.round in rounds, what
    assert fingerprint_of(loaded) == history.fingerprints[loaded.state.round], what
    assert not list(folder.rglob(".writing-*")), what


def sizes_named(message: str) -> tuple[int, int]:
    found = re.search(r"\((\d+) bytes to write, (\d+) free\)", message)
    assert found, message
    return int(found[1]), int(found[2])


def test_whichever_operation_fails_the_last_good_state_is_there_and_the_error_says_all(
    history: History,
    three_saved: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """R4. Full, broken, forbidden or out of quota at every operation of a save; none is swallowed."""
    copytree(three_saved, tmp_path / "whole")
    monkeypatch.setattr(disk, "os", shim := Shim())
    history.save(tmp_path / "whole", 3)
    last_sync = max(k for k, operation in enumerate(shim.tried, 1) if operation.name == "fsync")
    new = (*(tmp_path / "whole" / "000003").iterdir(), tmp_path / "whole" / "memories" / "000003.safetensors")
    size = sum(path.stat().st_size for path in new)
    for number, at in product(ERRORS, range(1, len(shim.tried) + 1)):
        folder, what = tmp_path / "failing", f"{errno.errorcode[number]} at operation {at}: {shim.tried[at - 1].name}"
        copytree(three_saved, folder)
        monkeypatch.setattr(disk, "os", Shim(fails(at, number)))
        caplog.clear()
        if at <= last_sync:
            with pytest.raises(RunFailed) as caught:
                history.save(folder, 3)
            message = str(caught.value)
            assert f"could not save {folder / '000003'}: {os.strerror(number)}" in message, what
            assert f"The last good checkpoint, {folder / '000002'}, is intact" in message, what
            assert sizes_named(message)[0] == size, what
            assert not caplog.records, what
        else:
            history.save(folder, 3)
            assert "old files could not be removed" in caplog.text, what
        monkeypatch.setattr(disk, "os", os)
        was_renamed = any(operation.name == "rename" for operation in shim.tried[: at - 1])
        assert_last_is(history, folder, {3} if was_renamed else {2}, what)
        history.save(folder, 3)
        assert_last_is(history, folder, {3}, what)
        assert files(folder) == files(tmp_path / "whole"), what
        shutil.rmtree(folder)
    print(f"{len(shim.tried)} operations, {len(ERRORS)} errors at each")


@pytest.mark.parametrize("names", [NEEDS_ROOM, OPERATIONS], ids=["a full disk", "a dead disk"])
def test_a_disk_that_stays_full_or_dead_costs_nothing_that_was_saved(
    names: tuple[str, ...], history: History, three_saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R4. Where files can still be removed, nothing half written stays; else the next save removes it."""
    folder, at, failed = tmp_path / "failing", 0, True
    while failed:
        at += 1
        copytree(three_saved, folder)
        monkeypatch.setattr(disk, "os", Shim(fails_from(at, errno.ENOSPC, names)))
        try:
            history.save(folder, 3)
            failed = False
        except RunFailed:
            pass
        monkeypatch.setattr(disk, "os", os)
        if names == NEEDS_ROOM:
            assert_last_is(history, folder, {2, 3}, f"from operation {at} on")
        history.save(folder, 3)
        assert_last_is(history, folder, {3}, f"from operation {at} on")
        shutil.rmtree(folder)
    assert at > 25


def fails_while(condition: Callable[[], bool], name: str, target: str = "") -> Fault:
    """Operations with this name fail for as long as that is so; with a target, those alone that end there."""

    def fault(count: int, operation: Operation) -> None:
        if operation.name == name and str(operation.arguments[-1]).endswith(target) and condition():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return fault


def test_a_run_that_may_go_on_says_so_loudly_saves_again_and_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """R4, on_save_error = "warn". The saves after rounds 2 and 3 fail."""
    experiment, folder, done = half_taking_part(), RunFolder(tmp_path / "run"), []
    reference = RunFolder(tmp_path / "reference")
    execute(experiment, reference)
    counter = Counted(done)
    monkeypatch.setattr(disk, "os", Shim(fails_while(lambda: len(done) in (1, 2), "rename")))
    execute(replace(experiment, on_save_error="warn"), folder, observer=counter)
    loud = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert [message.startswith("SAVE_FAILED, going on without: could not save") for message in loud] == [True, True]
    assert fingerprint(folder.path, experiment) == fingerprint(reference.path, experiment)
    assert folder.is_done


class Counted(Silent):
    def __init__(self, done: list[object]) -> None:
        self.done = done

    def round(self, result: object) -> None:
        self.done.append(result)


@pytest.mark.parametrize(("name", "target"), [("rename", ""), ("replace", "/run/rounds.jsonl")])
def test_a_run_that_may_go_on_fails_at_its_end_if_its_last_save_failed(
    name: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R4."""
    experiment, folder, done = half_taking_part(), RunFolder(tmp_path / "run"), []
    execute(experiment, RunFolder(tmp_path / "reference"))
    with monkeypatch.context() as patch:
        patch.setattr(disk, "os", Shim(fails_while(lambda: len(done) >= 3, name, target)))
        with pytest.raises(RunFailed, match=r"came to its end, but its last state was not saved: could not .*No space"):
            execute(replace(experiment, on_save_error="warn"), folder, observer=Counted(done))
    assert len(done) == ROUNDS, "it did not go on"
    assert not folder.is_done
    assert not list(folder.path.rglob(".*ing-*"))
    execute(experiment, folder, resume=True)
    assert fingerprint(folder.path, experiment) == fingerprint(tmp_path / "reference", experiment)


def test_a_run_that_may_not_go_on_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R4, on_save_error = "stop", which is the default."""
    done: list[object] = []
    monkeypatch.setattr(disk, "os", Shim(fails_while(lambda: len(done) == 2, "rename")))
    with pytest.raises(RunFailed, match=r"could not save .*000003: No space left on device"):
        execute(half_taking_part(), RunFolder(tmp_path), observer=Counted(done))
    assert len(done) == 2


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_file_larger_than_the_system_allows_is_a_failed_save(history: History, three_saved: Path) -> None:
    """R4, with the kernel's own error."""

    def save() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        with pytest.raises(RunFailed, match=r"could not save .*000003: File too large .* bytes to write"):
            history.save(three_saved, 3)

    assert ended(forked(save)) == 0
    assert_last_is(history, three_saved, {2}, "a limit on the size of files")


NOT_POSSIBLE = 77


def mount_small_disk(folder: Path, megabytes: int) -> None:
    """A disk of this size, for this process alone; ends the process where that is not allowed."""
    new_names = 0x00020000  # CLONE_NEWNS
    if os.geteuid() != 0 or ctypes.CDLL(None).unshare(new_names) != 0:
        os._exit(NOT_POSSIBLE)
    for words in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(folder)]):
        if subprocess.run(["mount", *words], capture_output=True, check=False).returncode != 0:
            os._exit(NOT_POSSIBLE)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_real_disk_that_is_full_costs_nothing_that_was_saved(history: History, tmp_path: Path) -> None:
    """R4, on a disk of 4 MB; the state is saved as soon as there is room again."""

    def work() -> None:
        mount_small_disk(tmp_path, 4)
        folder, filler = tmp_path / "saved", tmp_path / "filler"
        for number in range(3):
            history.save(folder, number)
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(512))
        with pytest.raises(RunFailed, match=r"could not save .*000003: No space left on device") as caught:
            history.save(folder, 3)
        needed, free = sizes_named(str(caught.value))
        assert free < 4096 < needed
        assert_last_is(history, folder, {2}, "a full disk")
        filler.unlink()
        history.save(folder, 3)
        assert_last_is(history, folder, {3}, "after making room")

    code = ended(forked(work))
    if code == NOT_POSSIBLE:
        pytest.skip("a small disk can be mounted by root only")
    assert code == 0


# ---- R5: damage


NEWEST, OLDER = ROUNDS, ROUNDS - 1


@dataclass(frozen=True)
class Kept:
    """The last two checkpoints and the memories that they name."""

    history: History
    folder: Path
    content: dict[Path, bytes]
    needed: dict[Path, set[int]]
    """The checkpoints that cannot do without a file."""

    def server(self, round: int) -> bytes:
        return self.content[self.folder / f"{round:06d}" / "server.safetensors"]

    def put_back(self) -> None:
        for path, data in self.content.items():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)


@pytest.fixture
def kept(history: History, tmp_path: Path) -> Kept:
    folder = tmp_path / "saved"
    for number in range(ROUNDS + 1):
        history.save(folder, number)
    content = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    needed: dict[Path, set[int]] = {path: set() for path in content}
    for number in (OLDER, NEWEST):
        own = folder / f"{number:06d}"
        facts = json.loads((own / "manifest").read_bytes().splitlines()[0])
        for path in (*own.iterdir(), *(folder / "memories" / name for name in facts["memories"])):
            needed[path].add(number)
    assert {frozenset(own) for own in needed.values()} == {frozenset(o) for o in ({OLDER}, {NEWEST}, {OLDER, NEWEST})}
    return Kept(history, folder, content, needed)


@contextmanager
def parsing_watched() -> Iterator[list[bytes]]:
    """What is parsed as tensors meanwhile."""
    parsed: list[bytes] = []
    load = wire.load

    def watched_load(data: bytes) -> Any:
        parsed.append(data)
        return load(data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "load", watched_load)
        yield parsed


def assert_found(kept: Kept, path: Path, log: pytest.LogCaptureFixture) -> None:
    """What was done to this file is found, and the file is named, before anything that it belongs to is parsed. If the
    newest checkpoint alone needs it, that costs a round; if the older one does too, there is nothing to go on from."""
    log.clear()
    with parsing_watched() as parsed:
        if kept.needed[path] == {NEWEST}:
            loaded = kept.history.load(kept.folder)
            assert loaded is not None
            assert parsed == [kept.server(OLDER)], path
            assert fingerprint_of(loaded) == kept.history.fingerprints[OLDER], path
        else:
            if kept.needed[path] == {OLDER}:
                shutil.rmtree(kept.folder / f"{NEWEST:06d}")
            with pytest.raises(RunFailed, match=rf"every checkpoint .* is damaged .*{path.name}.* nothing to resume"):
                kept.history.load(kept.folder)
            assert not parsed, path
    first = f"{max(kept.needed[path]):06d}"
    assert f"checkpoint {kept.folder / first} is damaged (" in log.text, path
    assert path.name in log.text, path


def test_two_thousand_flipped_bits_and_five_hundred_cut_files_are_all_found(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    """R5. In all files of both checkpoints and the memories that they name."""
    draw, paths = random.Random(5), list(kept.content)
    for number in range(2500):
        path = draw.choice(paths)
        data = bytearray(kept.content[path])
        if number < 2000:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        else:
            data = data[: draw.randrange(len(data))]
        path.write_bytes(data)
        assert_found(kept, path, caplog)
        kept.put_back()
    assert_last_is(kept.history, kept.folder, {NEWEST}, "all is as it was")
    print("2000 of 2000 flips and 500 of 500 cuts found")


def test_empty_missing_longer_and_swapped_files_are_all_found(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    """R5. Every file, and every file in the place of every other one."""
    count = 0
    for path, other in product(kept.content, (None, b"", b"more", *kept.content.values())):
        if other == kept.content[path]:
            continue
        if other is None:
            path.unlink()
        else:
            path.write_bytes(kept.content[path] + other if other == b"more" else other)
        assert_found(kept, path, caplog)
        kept.put_back()
        count += 1
    print(f"{count} of {count} found")


def test_a_checkpoint_under_the_name_of_another_is_found(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    """R5. All its files are whole, and yet it is not the state after so many rounds."""
    shutil.rmtree(kept.folder / f"{NEWEST:06d}")
    copytree(kept.folder / f"{OLDER:06d}", kept.folder / f"{NEWEST:06d}")
    loaded = kept.history.load(kept.folder)
    assert loaded is not None
    assert loaded.state.round == OLDER
    assert f"{NEWEST:06d} is damaged (manifest is that of round {OLDER})" in caplog.text


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one_to_the_same_end(damage: str, tmp_path: Path) -> None:
    """R5."""
    experiment, reference, stopped = half_taking_part(), RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "stopped")
    execute(experiment, reference)
    execute(experiment, stopped, should_stop=lambda: stopped.rounds_saved >= 3)
    for name in ("000003/manifest", "000003/server.safetensors", "000003/rounds.jsonl", "memories/000003.safetensors"):
        folder = RunFolder(tmp_path / "damaged")
        copytree(stopped.path, folder.path)
        DAMAGES[damage](folder.checkpoints / name)
        execute(experiment, folder, resume=True)
        assert fingerprint(folder.path, experiment) == fingerprint(reference.path, experiment), name
        shutil.rmtree(folder.path)


def test_a_run_whose_checkpoints_are_all_damaged_is_never_begun_afresh(tmp_path: Path) -> None:
    """R5."""
    experiment, folder = half_taking_part(), RunFolder(tmp_path)
    execute(experiment, folder, should_stop=lambda: folder.rounds_saved >= 3)
    for path in folder.checkpoints.glob("00*/server.safetensors"):
        path.write_bytes(b"")
    before = files(tmp_path)
    with pytest.raises(RunFailed, match=r"every checkpoint .* is damaged .*server\.safetensors"):
        execute(experiment, folder, resume=True)
    assert {k: v for k, v in files(tmp_path).items() if k != "lock"} == {k: v for k, v in before.items() if k != "lock"}


def test_a_run_whose_checkpoints_are_all_gone_is_never_begun_afresh(tmp_path: Path) -> None:
    """R5. rounds.jsonl is written after a checkpoint: where it has lines, there was one."""
    experiment, folder = half_taking_part(), RunFolder(tmp_path)
    execute(experiment, folder, should_stop=lambda: folder.rounds_saved >= 3)
    shutil.rmtree(folder.checkpoints)
    with pytest.raises(RunFailed, match="3 rounds"):
        execute(experiment, folder, resume=True)


# ---- R6: another configuration


def tables() -> Iterator[dict[str, Any]]:
    """Experiments that have every setting of every method, and those of the tasks that need no path."""
    optimizers = [{"name": "adam"}, {"name": "sam", "base": {"name": "sgd"}}]
    yield from ({"task": {"name": "minidigits"}, "method": {"name": name}} for name in METHODS)
    yield from (
        {"task": {"name": name}, "method": {"name": "fedavg"}} for name in TASKS if name not in ("custom", "hub")
    )
    for own in optimizers:
        yield {"task": {"name": "minidigits"}, "method": {"name": "fedavg"}, "training": {"optimizer": own}}


def other_value(text: str) -> str:
    """Another value of the same kind, both as TOML."""
    value = tomllib.loads(f"value = {text}")["value"]
    match value:
        case bool():
            return "false" if value else "true"
        case int() | float():
            return repr(value * 2 + 1)
        case str():
            return '"another"'
    return "[7]" if value != [7] else "[8]"


def changes_of(config: str) -> Iterator[tuple[str, str, str, str]]:
    """Each setting of a configuration, its value, another one, and the configuration with that."""
    section, lines = "", config.splitlines()
    for number, line in enumerate(lines):
        if line.startswith("["):
            section = line.strip("[]")
        elif line:
            key, _, value = line.partition(" = ")
            new = other_value(value)
            text = "\n".join([*lines[:number], f"{key} = {new}", *lines[number + 1 :]])
            yield f"{section}.{key}", value, new, text


def every_setting() -> Iterator[tuple[str, str, str, str, str]]:
    """Each once: its name, its value, another one, and the configurations with the two."""
    seen = set()
    for table in tables():
        config = configuration.parse(table, "a test").toml()
        for key, then, now, other in changes_of(config):
            if key not in seen:
                seen.add(key)
                yield key, then, now, config, other


@pytest.fixture
def begun(tmp_path: Path) -> tuple[Experiment, RunFolder]:
    """A run that was stopped after one of its rounds."""
    experiment, folder = half_taking_part(2), RunFolder(tmp_path / "begun")
    execute(experiment, folder, should_stop=lambda: folder.rounds_saved >= 1)
    return experiment, folder


def as_python(text: str) -> str:
    return repr(tomllib.loads(f"value = {text}")["value"])


def test_a_setting_that_decides_a_result_is_refused_by_name_unless_it_is_allowed(
    begun: tuple[Experiment, RunFolder],
) -> None:
    """R6. Each setting of all methods and tasks is changed once."""
    experiment, folder = begun
    count = 0
    for key, then, now, config, other in every_setting():
        is_harmless = key in HARMLESS
        resumed = replace(experiment, config=other, identity=experiment.identity if is_harmless else "another")
        folder.write_config(config)
        if key == "privacy.level":  # what was sent already cannot be made private, whatever is allowed
            with pytest.raises(BadInput, match=re.escape(f"a run with {key} = {as_python(then)}")):
                execute(resumed, folder, resume=True, allowed_changes=(key,))
            continue
        before = {name: data for name, data in files(folder.path).items() if name != "lock"}
        if not is_harmless:
            count += 1
            difference = f"  {key}: {as_python(then)} then, {as_python(now)} now"
            with pytest.raises(BadInput, match=re.escape(f"another configuration:\n{difference}\n")) as caught:
                execute(resumed, folder, resume=True)
            assert f"--allow-config-change {key}" in str(caught.value)
            assert {name: data for name, data in files(folder.path).items() if name != "lock"} == before, key
        allowed = () if is_harmless else (key,)
        execute(resumed, folder, resume=True, allowed_changes=allowed, should_stop=lambda: True)
        assert folder.read_config() == other, key
        kept = folder.path / "config-until-1.toml"
        assert is_harmless or kept.read_text() == config, key
        kept.unlink(missing_ok=True)
        experiment = resumed
    print(f"{count} settings refused and allowed by name, {len(HARMLESS)} harmless")
    assert count >= 60


def test_allowing_one_setting_or_a_section_allows_no_other(begun: tuple[Experiment, RunFolder]) -> None:
    """R6."""
    experiment, folder = begun
    folder.write_config("[training]\nrounds = 2\nround = 1\n[training.optimizer]\nlr = 0.1\n")
    other = replace(experiment, config="[training]\nrounds = 3\nround = 2\n[training.optimizer]\nlr = 0.2\n")
    with pytest.raises(BadInput) as caught:
        execute(other, folder, resume=True, allowed_changes=["training.round", "training.optimizer"])
    assert "training.rounds: 2 then, 3 now" in str(caught.value)
    assert "lr" not in str(caught.value)
    execute(other, folder, resume=True, allowed_changes=["training"], should_stop=lambda: True)


def test_other_networks_formats_and_versions_are_refused_by_name(
    begun: tuple[Experiment, RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R6. Networks of a task of the user's own are in no configuration."""
    experiment, folder = begun
    parts = experiment.federation.task.model

    def wider(client: str) -> Parts:
        return {**parts(client), "classifier": nn.Linear(8, 4)}

    task = replace(experiment.federation.task, model=wider)
    other = replace(experiment, federation=replace(experiment.federation, task=task, _networks={}))
    shapes = r"other networks \(classifier.weight: \[3, 8\] then, \[4, 8\] now; classifier.bias: \[3\] then, \[4\] now"
    with pytest.raises(RunFailed, match=shapes):
        execute(other, folder, resume=True)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "FORMAT", checkpoint.FORMAT + 1)
        now = checkpoint.FORMAT
        with pytest.raises(RunFailed, match=f"has format {now - 1}, and this version of protofed reads {now}"):
            execute(experiment, folder, resume=True)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "__version__", "99.0")
        with pytest.raises(RunFailed, match=r"saved by protofed .*, and this is 99.0.*--allow-config-change protofed"):
            execute(experiment, folder, resume=True)
        execute(experiment, folder, resume=True, allowed_changes=["protofed"], should_stop=lambda: True)


def test_a_change_that_was_allowed_once_need_not_be_allowed_again(begun: tuple[Experiment, RunFolder]) -> None:
    """R6. The run is stopped, or killed, before the first save with the new configuration."""
    experiment, folder = begun
    folder.write_config("[training]\nrounds = 2\n")
    other = replace(experiment, config="[training]\nrounds = 3\n", identity="another")
    execute(other, folder, resume=True, allowed_changes=["training.rounds"], should_stop=lambda: True)
    assert execute(other, folder, resume=True).is_complete


def test_a_kill_at_any_operation_of_an_allowed_change_changes_no_bit(
    begun: tuple[Experiment, RunFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R6, R1. The change is allowed again when the run is resumed, since it may not have taken place."""
    experiment, folder = begun
    folder.write_config("[training]\nattempts = 3\n")
    other = replace(experiment, config="[training]\nattempts = 4\n", identity="another")
    resume = partial(execute, other, resume=True, allowed_changes=["training.attempts"])
    copytree(folder.path, tmp_path / "whole")
    monkeypatch.setattr(disk, "os", shim := Shim())
    resume(RunFolder(tmp_path / "whole"), should_stop=lambda: True)
    monkeypatch.setattr(disk, "os", os)
    resume(RunFolder(tmp_path / "whole"))
    for at in range(1, len(shim.tried) + 1):
        killed = RunFolder(tmp_path / str(at))
        copytree(folder.path, killed.path)
        monkeypatch.setattr(disk, "os", Shim(ends(at)))
        with pytest.raises(Killed):
            resume(killed)
        monkeypatch.setattr(disk, "os", os)
        resume(killed)
        assert fingerprint(killed.path, other) == fingerprint(tmp_path / "whole", other), f"operation {at}"
        assert killed.read_config() == other.config, f"operation {at}"
    print(f"{len(shim.tried)} kills")


def test_a_harmless_change_lets_no_other_data_through(begun: tuple[Experiment, RunFolder]) -> None:
    """R6. The identity of a run is also that of the user's own files."""
    experiment, folder = begun
    folder.write_config("[runtime]\nworkers = 1\n")
    other = replace(experiment, config="[runtime]\nworkers = 2\n", identity="of other files")
    with pytest.raises((BadInput, RunFailed)):
        execute(other, folder, resume=True)
