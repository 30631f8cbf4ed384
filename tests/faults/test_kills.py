"""Processes that are killed, told to end, or meet in one folder (R1, R7, R8)."""

import itertools
import os
import random
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import copytree
from threading import Event

import pytest

from clocks import processor_time_below, wait_for, wait_until_worked
from faults.commands import Command, children_of, has_worked_or_ended, told_to_end, written
from faults.kills import (
    Acknowledged,
    awaited,
    ended,
    fingerprint,
    folder_in_memory,
    forked,
    run_killed_after,
)
from faults.shim import Shim, kills
from protofed import BadInput
from protofed.cli.console import err
from protofed.cli.signals import stop_on_signal
from protofed.engine.federation import Federation
from protofed.engine.state import State
from protofed.runs.config import config as configuration
from protofed.runs.runner import Experiment, execute
from protofed.runs.store import checkpoint, disk
from protofed.runs.store.folder import RunFolder
from protofed.runtimes.jobs import Failure, Reason
from run_doubles import small_experiment

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

ROUNDS = 5


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with folder_in_memory() as folder:
        yield folder


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    """Two of three clients in each round; they keep their last weights."""
    whole = small_experiment("moon", ROUNDS)
    training = replace(whole.federation.training, fraction=0.5)
    return replace(whole, federation=replace(whole.federation, training=training))


@pytest.fixture(scope="module")
def uninterrupted(experiment: Experiment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    execute(experiment, RunFolder(folder))
    return folder


@pytest.fixture(scope="module")
def expected(experiment: Experiment, uninterrupted: Path) -> str:
    return fingerprint(uninterrupted, experiment)


# ---- R1: kill -9


@pytest.mark.parametrize("kills", [25, pytest.param(100, marks=pytest.mark.slow)])
def test_kills_at_random_moments_change_no_bit_and_cost_no_finished_round(
    experiment: Experiment, expected: str, tmp_path: Path, kills: int
) -> None:
    """R1. A run is killed again and again until it comes to its end, and then the next one."""
    draw, done, reached = random.Random(1), 0, set()
    begin = time.process_time()
    execute(experiment, RunFolder(tmp_path / "timed"))
    whole, different = time.process_time() - begin, []
    for number in itertools.count():
        if done >= kills:
            break
        folder = RunFolder(tmp_path / str(number))
        while run_killed_after(experiment, folder, draw.uniform(0, whole)):
            done += 1
            reached.add(folder.rounds_saved)
        different += [folder.path] if fingerprint(folder.path, experiment) != expected else []
    print(f"{done} kills, {len(different)} runs with another end; killed after {sorted(reached)} rounds")
    assert not different
    assert len(reached) > ROUNDS // 2, "the kills did not fall into different rounds"


def test_a_kill_at_every_operation_of_two_saves_changes_no_bit(
    experiment: Experiment, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1. From round 3 on a save also removes an older checkpoint and memories that nobody needs."""
    begun, counted = RunFolder(tmp_path / "begun"), RunFolder(tmp_path / "counted")
    execute(experiment, begun, should_stop=lambda: begun.rounds_saved >= 2)
    copytree(begun.path, counted.path)
    monkeypatch.setattr(disk, "os", shim := Shim())
    execute(experiment, counted, resume=True, should_stop=lambda: counted.rounds_saved >= 4)
    assert len(shim.tried) > 50
    for at in range(1, len(shim.tried) + 1):
        folder, acknowledged = RunFolder(tmp_path / str(at)), Acknowledged()
        copytree(begun.path, folder.path)
        monkeypatch.setattr(disk, "os", Shim(kills(at)))
        work = partial(execute, experiment, folder, resume=True, observer=acknowledged)
        assert ended(forked(work)) == -signal.SIGKILL, f"operation {at} was not reached"
        assert folder.rounds_saved >= 2 + acknowledged.count(), f"operation {at}: more than a round was lost"
        acknowledged.close()
        monkeypatch.setattr(disk, "os", os)
        execute(experiment, folder, resume=True)
        assert fingerprint(folder.path, experiment) == expected, f"operation {at}"
        assert not list(folder.path.rglob(".*ing-*")), f"operation {at}"
        assert not list(folder.path.rglob("damaged-*")), f"operation {at}: what was half removed is taken for damage"
    print(f"{len(shim.tried)} operations")


def test_a_checkpoint_is_loaded_within_five_seconds(experiment: Experiment, uninterrupted: Path) -> None:
    """R1. Seconds are the process's own."""
    with processor_time_below(5):
        assert checkpoint.load(uninterrupted / "checkpoint", experiment.federation, experiment.identity)


# ---- R7: two runs in one folder


@contextmanager
def holder(folder: RunFolder) -> Iterator[int]:
    """The id of another process that has the folder; it is killed in the end."""
    ready, told = os.pipe()

    def hold() -> None:
        with folder.locked():
            os.write(told, b"x")
            signal.pause()

    child = forked(hold)
    try:
        assert os.read(ready, 1)
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        assert ended(child) == -signal.SIGKILL
        os.close(ready)
        os.close(told)


def test_a_hundred_times_a_second_process_is_refused_and_the_lock_dies_with_the_first(tmp_path: Path) -> None:
    """R7. The refusal says who has the folder, where, and since when."""
    folder, refused, free = RunFolder(tmp_path), 0, 0
    for _ in range(100):
        with holder(folder) as pid:
            known = rf"in use by another process \(pid {pid} on {re.escape(socket.gethostname())} since "
            with pytest.raises(BadInput, match=known + r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\)"), folder.locked():
                pass
            refused += 1
        with folder.locked():
            free += 1
    print(f"{refused} of 100 refused, {free} of 100 free after kill -9")


def test_the_lock_dies_with_its_process_and_not_with_those_that_it_has_begun(tmp_path: Path) -> None:
    """R7. A worker of a run that was killed may live a while longer, above all if it was stopped."""
    folder, (ready, told) = RunFolder(tmp_path), os.pipe()

    def hold() -> None:
        with folder.locked():
            own = forked(signal.pause)
            os.write(told, str(own).encode())
            signal.pause()

    parent = forked(hold)
    own = int(os.read(ready, 20))
    try:
        with pytest.raises(BadInput, match=f"pid {parent}"), folder.locked():
            pass
        os.kill(parent, signal.SIGKILL)
        assert ended(parent) == -signal.SIGKILL
        with folder.locked():
            os.kill(own, 0)  # it lives
    finally:
        os.kill(own, signal.SIGKILL)
        os.close(ready)
        os.close(told)


def test_a_run_in_use_is_refused_before_anything_is_touched(experiment: Experiment, tmp_path: Path) -> None:
    """R7."""
    folder = RunFolder(tmp_path)
    execute(experiment, folder, should_stop=lambda: folder.rounds_saved >= 2)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"}
    with holder(folder), pytest.raises(BadInput, match="in use by another process"):
        execute(experiment, folder, resume=True, steal_lock=True)
    assert before == {path: path.read_bytes() for path in before}


def test_a_folder_left_by_another_machine_is_taken_only_when_told_to(tmp_path: Path) -> None:
    """R7. Whether a process on another machine lives cannot be known here."""
    folder, note = RunFolder(tmp_path), "pid 7 on elsewhere since 2001-02-03 04:05:06"
    (tmp_path / "lock").write_text(note)
    with (
        pytest.raises(BadInput, match=f"another machine .{note}. and was not given back.*--steal-lock"),
        folder.locked(),
    ):
        pass
    assert (tmp_path / "lock").read_text() == note, "a refused process must leave the note"
    with folder.locked(steal=True):
        assert f"pid {os.getpid()} on {socket.gethostname()} since " in (tmp_path / "lock").read_text()


@pytest.mark.parametrize("fails", [False, True])
def test_a_folder_that_was_given_back_is_free_for_every_machine(
    tmp_path: Path, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R7. A run that ended with an error has let go of its folder too."""
    folder = RunFolder(tmp_path)
    try:
        with folder.locked():
            if fails:
                raise OSError("the disk is full")
    except OSError:
        pass
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    with folder.locked():
        assert " on elsewhere since " in (tmp_path / "lock").read_text()


# ---- R8: told to end

GRACE = 30
"""Seconds that a run has by default when it is told to end."""


def test_a_signal_is_heard_whatever_it_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    """R8. What was interrupted, such as another message or an import, may not bear to be entered a second time."""

    def half_way(*words: object, **more: object) -> None:
        raise ImportError("cannot import name 'EMOJI' from partially initialized module")

    monkeypatch.setattr(err, "print", half_way)
    with stop_on_signal("resume", GRACE) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_made()


@pytest.mark.parametrize(("before", "is_heard"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_a_closed_terminal_stops_a_run_but_not_under_nohup(before: signal.Handlers, is_heard: bool) -> None:
    """R8."""
    own = signal.signal(signal.SIGHUP, before)
    try:
        with stop_on_signal("resume", GRACE) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.is_made() == is_heard
    finally:
        signal.signal(signal.SIGHUP, own)


def check_signals(folder: Path, count: int) -> None:
    """A run is told to end again and again until it comes to its end, and then the next one."""
    path, draw, done, slowest = written(folder), random.Random(8), 0, 0.0
    experiment = configuration.load(path).experiment()
    code, whole = awaited(Command(path, RunFolder(folder / "whole")).begin())
    assert code == 0
    codes = Counter[int]()
    expected = fingerprint(folder / "whole", experiment)
    for attempt in itertools.count():
        if done >= count:
            break
        run = Command(path, RunFolder(folder / str(attempt)))
        while not run.folder.is_done:
            number = draw.choice([signal.SIGINT, signal.SIGTERM])
            child, moment = run.begin(), draw.uniform(0, whole)
            wait_for(partial(has_worked_or_ended, child, moment))
            code, seconds = told_to_end(child, number)
            assert code == 128 + number or (code == 0 and run.folder.is_done), f"{number} ended with {code}"
            slowest, done = max(slowest, seconds), done + (code != 0)
            codes[code] += 1
        assert fingerprint(run.folder.path, experiment) == expected, f"after {done} signals"
        assert not list(run.folder.path.rglob(".*ing-*"))
    print(f"{done} signals, exit codes {dict(codes)}, the slowest end took {slowest:.2f} s of processor time")
    assert slowest < GRACE
    assert {130, 143} <= codes.keys()


def test_twelve_signals_at_random_moments_change_no_bit(tmp_path: Path) -> None:
    """R8."""
    check_signals(tmp_path, 12)


@pytest.mark.slow
def test_fifty_signals_at_random_moments_change_no_bit(tmp_path: Path) -> None:
    """R8."""
    check_signals(tmp_path, 50)


def test_the_first_signal_saves_the_round_under_way(tmp_path: Path) -> None:
    """R8."""
    run = Command(written(tmp_path, rounds=1000, epochs=200), RunFolder(tmp_path / "run"))
    child = run.begin()
    wait_for(lambda: run.folder.rounds_saved >= 1)
    before = run.folder.rounds_saved
    wait_until_worked(child, 0.1)  # into the next round, which takes longer
    code, _ = told_to_end(child, signal.SIGTERM)
    assert code == 143
    assert run.folder.rounds_saved > before
    assert not run.folder.is_done


LONG = 10_000
"""Epochs that take a minute of processor time."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_long_round_at_once(number: int, tmp_path: Path) -> None:
    """R8. What was saved before the round is there."""
    run = Command(written(tmp_path, epochs=LONG), RunFolder(tmp_path / "run"))
    child = run.begin()
    wait_for((run.folder.checkpoints / "000000").exists)
    wait_until_worked(child, 0.2)
    os.kill(child, number)
    wait_for(run.heard)  # two signals that wait would be heard as one
    code, seconds = told_to_end(child, number)
    assert code == 128 + number
    assert seconds < 2
    assert run.folder.rounds_saved == 0


def test_a_round_that_is_longer_than_the_grace_ends_with_it(tmp_path: Path) -> None:
    """R8."""
    run = Command(written(tmp_path, epochs=LONG), RunFolder(tmp_path / "run"), ("--grace-period", "0.5"))
    child = run.begin()
    wait_for((run.folder.checkpoints / "000000").exists)
    wait_until_worked(child, 0.2)
    code, seconds = told_to_end(child, signal.SIGTERM)
    assert code == 143
    assert b"stopping after this round" in run.errors.read_bytes(), "it did not wait for the grace"
    assert seconds < 3


def test_damaged_checkpoints_end_the_command_with_three(tmp_path: Path) -> None:
    """R5."""
    run = Command(written(tmp_path), RunFolder(tmp_path / "run"))
    child = run.begin()
    wait_for(lambda: run.folder.rounds_saved >= 2)
    assert told_to_end(child, signal.SIGTERM).code == 143
    for path in run.folder.checkpoints.glob("00*/manifest"):
        path.write_bytes(b"")
    before = (run.folder.path / "rounds.jsonl").read_bytes()
    assert ended(run.begin()) == 3
    assert (run.folder.path / "rounds.jsonl").read_bytes() == before


def test_a_signal_to_the_whole_group_is_no_clients_failure(tmp_path: Path) -> None:
    """R8. `timeout`, batch systems and service managers send it to all processes of a run."""
    path = written(tmp_path, rounds=6, epochs=40, runtime="workers")
    experiment = configuration.load(path).experiment()
    assert ended(Command(path, RunFolder(tmp_path / "whole")).begin()) == 0
    run, signals = Command(path, RunFolder(tmp_path / "run"), in_own_group=True), 0
    while not run.folder.is_done:
        child, saved = run.begin(), run.folder.rounds_saved
        wait_for(lambda: run.folder.rounds_saved > saved or run.folder.is_done)  # noqa: B023
        os.killpg(child, signal.SIGTERM)
        code = ended(child)
        assert code == 143 or run.folder.is_done
        signals += code == 143
    assert signals
    assert fingerprint(run.folder.path, experiment) == fingerprint(tmp_path / "whole", experiment)


def test_a_process_that_is_killed_while_the_run_stops_voids_the_round(tmp_path: Path) -> None:
    """R8. Whoever stops a run may kill its processes one after another."""
    experiment = configuration.load(written(tmp_path, rounds=4)).experiment()
    folder, advance, is_stopping = RunFolder(tmp_path / "run"), Federation.advance, Event()

    def killed(federation: Federation, state: State, evaluates: bool = False) -> State:
        advanced = advance(federation, state, evaluates)
        if advanced.round < 2:
            return advanced
        is_stopping.set()
        return replace(advanced, failures=(Failure("a", Reason.CLIENT_ERROR, "died (signal 9)", is_killed=True),))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Federation, "advance", killed)
        result = execute(experiment, folder, should_stop=is_stopping.is_set)
    assert result.state.round == folder.rounds_saved == 1


@pytest.mark.slow
def test_the_workers_of_a_run_end_with_it(tmp_path: Path) -> None:
    """R8. Whether it is told twice or killed."""
    path = written(tmp_path, rounds=1000, epochs=20, runtime="workers")
    for number in (signal.SIGTERM, signal.SIGKILL):
        run = Command(path, RunFolder(tmp_path / number.name))
        child = run.begin()
        wait_for(lambda run=run: run.folder.rounds_saved >= 1)
        workers = children_of(child)
        assert len(workers) >= 2
        if number == signal.SIGTERM:
            os.kill(child, number)
            wait_for(run.heard)
        told_to_end(child, number)
        wait_for(lambda workers=workers: not any(Path(f"/proc/{pid}").exists() for pid in workers))
