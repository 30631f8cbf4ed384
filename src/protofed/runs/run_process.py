"""A process that does runs of a comparison, one after another."""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from math import lcm
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path

import torch

from protofed.engine.federation import Federation
from protofed.errors import BadInput, RunFailed
from protofed.runs.config.config import Config
from protofed.runs.gpu_sharing import Beat
from protofed.runs.observers import Callback, Observer
from protofed.runs.results import Round
from protofed.runs.runner import execute
from protofed.runs.runtime_choice import Numerics
from protofed.runs.store.checkpoint import write_atomically
from protofed.runs.store.folder import RunFolder
from protofed.runs.sweep_log import Messages, tell_parent
from protofed.stop_signals import held_back, leave_to_parent

log = logging.getLogger(__name__)

CONTEXT = multiprocessing.get_context("spawn")
PAUSE_SECONDS = 0.02
WARM_ROUNDS = 2
"""Rounds in which a process still compiles."""
MUCH = 2**60
"""Bytes: memory where there is no GPU."""
MIN_CYCLES = 8
"""If a run has fewer cycles, rounds with evaluations are rare, and not waited for."""


@dataclass(frozen=True)
class Answer:
    """How a run ended in its process."""

    failure: str | None = None
    has_gpu: bool = True
    """Whether the process can still use its GPU. After a fatal error there it cannot, and nor can the processes that
    share the GPU with it through MPS."""


class Notes:
    """What a process and its parent tell each other while a run goes on: numbers in shared memory. They have no lock,
    which a process that is killed would keep. Of the last two beats, one is always whole."""

    def __init__(self) -> None:
        self._numbers = CONTEXT.RawArray("d", 9)

    def clear(self) -> None:
        self._numbers[:] = [0.0] * 9

    @property
    def should_pause(self) -> bool:
        return bool(self._numbers[0])

    @should_pause.setter
    def should_pause(self, value: bool) -> None:
        self._numbers[0] = value

    @property
    def is_paused(self) -> bool:
        return bool(self._numbers[1])

    @is_paused.setter
    def is_paused(self, value: bool) -> None:
        self._numbers[1] = value

    @property
    def memory(self) -> tuple[float, float]:
        """Bytes that the process has had of the GPU's memory at the most, and those that are free."""
        return self._numbers[2], self._numbers[3]

    @property
    def beat(self) -> Beat:
        at = 5 + 2 * (int(self._numbers[4]) % 2)
        return Beat(int(self._numbers[at]), self._numbers[at + 1])

    def add(self, beat: Beat, memory: tuple[int, int]) -> None:
        count = int(self._numbers[4]) + 1
        at = 5 + 2 * (count % 2)
        self._numbers[2:4] = memory
        self._numbers[at : at + 2] = [beat.rounds, beat.time]
        self._numbers[4] = count


class RunProcess:
    """A process that does one run at a time. It is started when it is needed, and again if it died."""

    def __init__(
        self, stop: Event, messages: Messages, code_folders: list[str], environment: Mapping[str, str]
    ) -> None:
        self.identity = ""
        """The run that is being done; empty: none."""
        self.answer: Future[Answer] = Future()
        self._process: set[BaseProcess] = set()
        self.notes = Notes()
        self.began = 0.0
        self.rounds = 0
        """Of the run that is being done."""
        self._first_began = 0.0
        self._first_beat = 0.0
        self._given = (stop, self.notes, messages, os.getpid(), code_folders, dict(environment))
        self._pool = self._new_pool()

    def _new_pool(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, CONTEXT, _prepare, self._given)

    def begin(self, config: Config, out: Path, on_gpu: bool) -> None:
        self.identity, self.began, self.rounds = config.identity, time.monotonic(), config.training.rounds
        self._first_began = self._first_began or self.began
        self.notes.clear()
        task = partial(_one, config, out, config.runtime.numerics(), on_gpu)
        before = multiprocessing.active_children()
        with held_back():  # the pool starts its process now
            try:
                self.answer = self._pool.submit(task)
            except BrokenProcessPool:
                self._pool, self._process = self._new_pool(), set()
                self.answer = self._pool.submit(task)
        self._process |= {*multiprocessing.active_children()} - {*before}

    @property
    def start_seconds(self) -> float:
        """From the first run's beginning until the process had done its first rounds; 0 if it has not."""
        self._first_beat = self._first_beat or self.notes.beat.time
        return self._first_beat - self._first_began if self._first_beat else 0.0

    def ended(self, is_stopping: bool) -> Answer:
        """How the run ended. A process that dies while all are told to stop is no failure: its run goes on next
        time."""
        self.identity = ""
        try:
            return self.answer.result()
        except BrokenProcessPool:
            self.close()
            return Answer(None if is_stopping else f"{death([*self._process])}; run the same command again to continue")
        except Exception as error:
            return Answer(reason(error))

    def close(self, wait: bool = True) -> None:
        """Ends the process after its run."""
        self._pool.shutdown(wait)


def folder_of(config: Config, out: Path) -> RunFolder:
    return RunFolder(out / config.identity)


def one(config: Config, folder: RunFolder, should_stop: Callable[[], bool], observer: Observer | None = None) -> None:
    """One run of a sweep, begun or resumed, among others on the same machine."""
    execute(config.experiment(alone=False), folder, resume=True, should_stop=should_stop, observer=observer)


def reason(error: BaseException, whole: Path | None = None) -> str:
    """Why a run failed, in words. Of an error that nobody foresaw: its type, its message and its place, and where the
    whole text is, which is written to the file `whole` or logged."""
    if isinstance(error, BadInput | RunFailed):
        return str(error)
    places = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(places[-1].filename).name}, line {places[-1].lineno}, {places[-1].name})" if places else ""
    said = f"{type(error).__name__}: {error}{place}"
    try:
        if whole is not None:
            write_atomically(whole, "".join(traceback.format_exception(error)).encode(errors="backslashreplace"))
            return f"{said}; the whole text is in {whole}"
    except (OSError, RunFailed) as why:
        log.error("%s could not be written: %s", whole, why)
    log.error("a run ended with an unexpected error", exc_info=error)
    return said


def death(processes: Sequence[BaseProcess]) -> str:
    """How a process of a sweep died."""
    codes = {process.exitcode or 0 for process in processes} - {0, -signal.SIGTERM, 128 + signal.SIGTERM}
    ways = " and one ".join(map(_way, sorted(codes))) or "ended without a sign why"
    return f"a process of the comparison {ways}"


def _way(code: int) -> str:
    if code > 0:
        return f"ended with exit code {code}"
    memory = ", as the system does when memory runs out" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{memory}"


_stop: Event | None = None
_notes: Notes | None = None


def _prepare(
    stop: Event, notes: Notes, messages: Messages, parent: int, code_folders: list[str], environment: dict[str, str]
) -> None:
    """Prepares a new process. The parent handles signals to stop and passes them on. The process ends with its parent.
    Configurations are unpickled here, so the folders of the user's own classes must be on the path. CUDA reads the
    environment when it is first used, which is later."""
    global _stop, _notes
    _stop, _notes = stop, notes
    os.environ.update(environment)
    sys.path += [folder for folder in code_folders if folder not in sys.path]
    leave_to_parent()
    tell_parent(messages)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """Ends this process when its parent is gone. A run can be resumed from wherever it ended."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _one(config: Config, out: Path, numerics: Numerics, on_gpu: bool) -> Answer:
    """Not every error could be sent to the parent, which would take that for a death."""
    assert _stop
    assert _notes
    whole = out / f"{config.identity}.error.txt"
    try:
        if not _stop.is_set():
            if on_gpu and config.runtime.numerics() != numerics:  # guard: lost-gpu-begins-no-run-on-cpu
                return Answer("a process of the comparison cannot use the GPU", has_gpu=False)
            whole.unlink(missing_ok=True)
            one(config, folder_of(config, out), partial(_should_stop, _stop, _notes), _Noting(config, _notes, on_gpu))
    except (Exception, SystemExit) as error:
        has_gpu = not on_gpu or _answers(config.runtime.device)
        return Answer(reason(error, whole), has_gpu)  # guard: error-of-a-run-is-told
    return Answer()


def _should_stop(stop: Event, notes: Notes) -> bool:
    """Whether the run is to stop. It is asked between rounds, and then pauses for as long as it is told to."""
    while notes.should_pause and not stop.is_set():
        notes.is_paused = True
        time.sleep(PAUSE_SECONDS)
    notes.is_paused = False
    return stop.is_set()


class _Noting(Callback):
    """Notes when cycles of rounds end. A cycle holds each kind of round once: with and without evaluations."""

    def __init__(self, config: Config, notes: Notes, on_gpu: bool) -> None:
        cycle, rounds = lcm(config.evaluation.every, config.evaluation.clients or 1), config.training.rounds
        self._cycle = cycle if cycle <= rounds // MIN_CYCLES else 1
        self._device = config.runtime.device or "cuda" if on_gpu and torch.cuda.is_available() else ""
        self._notes, self._warm = notes, WARM_ROUNDS

    def begin(self, federation: Federation, done: int) -> None:
        self._warm = done + WARM_ROUNDS

    def round(self, result: Round) -> None:
        if result.round >= self._warm and result.round % self._cycle == 0:
            had, free = 0, MUCH
            if self._device:
                had, free = torch.cuda.max_memory_reserved(self._device), torch.cuda.mem_get_info(self._device)[0]
            self._notes.add(Beat(result.round, time.monotonic()), (had, free))


def _answers(device: str) -> bool:
    """Whether this process can use the GPU. CUDA's fatal errors stay until the process ends."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize(device or None)
            return True
    except RuntimeError as error:
        log.warning("a process cannot use the GPU any more: %s", error)
    return False
