"""Many runs at once, each in its own process and its own run folder."""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Protocol

from protofed.errors import BadInput, RunFailed
from protofed.runs.config.config import Config
from protofed.runs.config.user_classes import import_folders
from protofed.runs.results import Round, parsed
from protofed.runs.resuming import refuse_other_run
from protofed.runs.runner import execute
from protofed.runs.store.checkpoint import write_atomically
from protofed.runs.store.folder import RunFolder
from protofed.stop_signals import held_back, leave_to_parent

log = logging.getLogger(__name__)

POLL_SECONDS = 0.3
RUNS_PER_GPU = 2
"""Runs at the same time on one GPU. Processes take turns on it: a second one fills the gaps of the first, more gain
nothing (docs/performance.md)."""


@dataclass(frozen=True)
class Outcome:
    """How far a run got."""

    rounds: list[Round]
    is_done: bool
    failure: str | None = None
    """Why the run failed, or why the finished run is not the one that was asked for."""
    classes: tuple[str, ...] = ()
    """The names of the classes, if they have names."""


class Sweep(Protocol):
    """Does many runs, here or on other machines: see `sweep`."""

    def __call__(
        self,
        configs: Sequence[Config],
        out: Path,
        *,
        workers: int | None = None,
        progress: Callable[[Sequence[int]], None] = ...,
        should_stop: Callable[[], bool] = ...,
    ) -> list[Outcome]: ...


def folder_of(config: Config, out: Path) -> RunFolder:
    return RunFolder(out / config.identity)


def sweep(
    configs: Sequence[Config],
    out: Path,
    *,
    workers: int | None = None,
    progress: Callable[[Sequence[int]], None] = lambda rounds: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[Outcome]:
    """The outcome of every run. Finished runs are not run again, unfinished ones are resumed.

    `progress` is called with the number of rounds that are done in each run. Once `should_stop` is true, every run
    stops after its round. The other runs continue when one fails.
    """
    folders = [folder_of(config, out) for config in configs]
    waiting = unfinished(configs, out)
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    code_folders = import_folders([part for config in configs for part in (config.method, config.task)])
    count = workers or runs_at_once(list(waiting.values()))
    with ProcessPoolExecutor(count, context, _prepare, (stop, os.getpid(), code_folders)) as pool:
        with held_back():  # the pool starts its processes now
            runs = {identity: pool.submit(_one, config, out) for identity, config in waiting.items()}
            processes = multiprocessing.active_children()
        pending = set(runs.values())
        while pending:
            _, pending = wait(pending, POLL_SECONDS, FIRST_COMPLETED)
            progress([*map(rounds_saved, folders)])
            if should_stop():
                stop.set()
    failures = {identity: _failure(run, stop.is_set(), processes) for identity, run in runs.items()}
    progress([*map(rounds_saved, folders)])
    return [outcome(config, out, failures.get(config.identity)) for config in configs]


def runs_at_once(configs: Sequence[Config]) -> int:
    """How many runs to do at the same time: one per core, but on GPUs few, since their processes take turns there."""
    on_gpus = [config for config in configs if config.runtime.numerics()["device"] == "cuda"]
    if not on_gpus:
        return os.cpu_count() or 1
    named = {config.runtime.device for config in on_gpus if config.runtime.device}
    count = RUNS_PER_GPU * max(1, len(named))
    log.info("%d runs at a time on a GPU: while one uses the CPU, another has the GPU (--jobs changes that)", count)
    return count


def unfinished(configs: Sequence[Config], out: Path) -> dict[str, Config]:
    """The runs that are still to be done, each once, by identity."""
    return {config.identity: config for config in configs if not folder_of(config, out).is_done}


def outcome(config: Config, out: Path, failure: str | None) -> Outcome:
    """How far a run got, read from its folder. One that is damaged costs its run alone."""
    folder = folder_of(config, out)
    try:
        rounds = parsed(folder.read_rounds(), str(folder.path / "rounds.jsonl"))
        classes = folder.read_classes()
    except BadInput as error:  # guard: damaged-folder-costs-its-run
        return Outcome([], False, failure or str(error))
    if folder.is_done and not any(r.is_evaluated for r in rounds):
        failure = failure or f"{folder.path} holds no round that was evaluated"
    failure = failure or _mismatch(folder, config)
    return Outcome(rounds, folder.is_done and not failure, failure, classes)


def one(config: Config, folder: RunFolder, should_stop: Callable[[], bool]) -> None:
    """One run of a sweep, begun or resumed, among others on the same machine."""
    execute(config.experiment(alone=False), folder, resume=True, should_stop=should_stop)


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


def rounds_saved(folder: RunFolder) -> int:
    """The rounds of a run that are saved; none if its folder is damaged."""
    try:
        return folder.rounds_saved
    except BadInput:  # its run says so
        return 0


def _mismatch(folder: RunFolder, config: Config) -> str | None:
    """Why a finished run is not the one that was asked for: the evaluation is not in the hash that names its folder."""
    try:
        if folder.is_done:
            refuse_other_run(folder, config)
    except (BadInput, RunFailed) as error:
        return str(error)
    return None


def _failure(run: "Future[str | None]", is_stopping: bool, processes: Sequence[BaseProcess]) -> str | None:
    """Why a run failed. No error of one run may stop the others. A process that dies while all are told to stop is no
    failure: its run goes on next time."""
    try:
        return run.result()
    except BrokenProcessPool:
        return None if is_stopping else f"{death(processes)}; run the same command again to continue"
    except Exception as error:
        return reason(error)


def death(processes: Sequence[BaseProcess]) -> str:
    """How a process of a sweep died. The others were then ended with SIGTERM, so these are not named."""
    codes = {process.exitcode or 0 for process in processes} - {0, -signal.SIGTERM, 128 + signal.SIGTERM}
    ways = " and one ".join(map(_way, sorted(codes))) or "ended without a sign why"
    return f"a process of the comparison {ways}, and the others were ended with it"


def _way(code: int) -> str:
    if code > 0:
        return f"ended with exit code {code}"
    memory = ", as the system does when memory runs out" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{memory}"


_stop: Event | None = None


def _prepare(stop: Event, parent: int, code_folders: list[str]) -> None:
    """Prepares a new process. The parent handles signals to stop and passes them on. The process ends with its parent.
    Configurations are unpickled here, so the folders of the user's own classes must be on the path."""
    global _stop
    _stop = stop
    sys.path += [folder for folder in code_folders if folder not in sys.path]
    leave_to_parent()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """Ends this process when its parent is gone. A run can be resumed from wherever it ended."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _one(config: Config, out: Path) -> str | None:
    """Why the run failed, if it did. Not every error could be sent to the parent, which would take that for a death."""
    assert _stop
    whole = out / f"{config.identity}.error.txt"
    try:
        if not _stop.is_set():
            whole.unlink(missing_ok=True)
            one(config, folder_of(config, out), _stop.is_set)
    except (Exception, SystemExit) as error:
        return reason(error, whole)  # guard: error-of-a-run-is-told
    return None
