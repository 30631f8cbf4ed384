"""Many runs at once, each in a process of its own and in a folder of its own."""

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path

from protofed.errors import BadInput, RunFailed
from protofed.runs.config.config import Config
from protofed.runs.results import Round, parsed
from protofed.runs.runner import execute
from protofed.runs.store.folder import RunFolder

log = logging.getLogger(__name__)

POLL_SECONDS = 0.3


@dataclass(frozen=True)
class Outcome:
    """How far a run came."""

    rounds: list[Round]
    is_done: bool
    failure: str | None = None
    """Why it cannot go on."""


def folder_of(config: Config, out: Path) -> RunFolder:
    return RunFolder(out / config.identity)


def sweep(
    configs: Sequence[Config],
    out: Path,
    *,
    workers: int | None = None,
    progress: Callable[[int], None] = lambda rounds: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[Outcome]:
    """How every run ended. Runs that are done are not done again; unfinished ones are resumed.

    `progress` is told how many rounds are done in all. Once `should_stop` is true, every run stops after its round. A
    run that fails does not keep the others from going on.
    """
    folders = [folder_of(config, out) for config in configs]
    waiting = {c.identity: c for c, folder in zip(configs, folders, strict=True) if not folder.is_done}
    for folder in folders:
        if folder.is_done:
            folder.warn_of_other_versions()
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    with ProcessPoolExecutor(workers or os.cpu_count(), context, _prepare, (stop, os.getpid())) as pool:
        runs = {identity: pool.submit(_one, config, out) for identity, config in waiting.items()}
        pending = set(runs.values())
        while pending:
            _, pending = wait(pending, POLL_SECONDS, FIRST_COMPLETED)
            progress(sum(folder.rounds_saved for folder in folders))
            if should_stop():
                stop.set()
    failures = {identity: _failure(run) for identity, run in runs.items()}
    progress(sum(folder.rounds_saved for folder in folders))
    return [
        Outcome(parsed(folder.read_rounds()), folder.is_done, failures.get(config.identity))
        for config, folder in zip(configs, folders, strict=True)
    ]


def _failure(run: "Future[None]") -> str | None:
    """Why a run failed, whatever it was: the others have their results all the same."""
    try:
        run.result()
    except (BadInput, RunFailed) as error:
        return str(error)
    except BrokenProcessPool:
        raise RunFailed("a process of the sweep died, perhaps for want of memory; run again to continue") from None
    except Exception as error:
        log.error("a run ended with an error that is not its own", exc_info=error)
        return f"{type(error).__name__}: {error}"
    return None


_stop: Event | None = None


def _prepare(stop: Event, parent: int) -> None:
    """In a new process: Ctrl-C is for the parent, which passes it on; without the parent there is nothing to do."""
    global _stop
    _stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """Ends this process when its parent is gone; a run may end anywhere and be resumed."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _one(config: Config, out: Path) -> None:
    assert _stop
    if not _stop.is_set():
        execute(config.experiment(alone=False), folder_of(config, out), resume=True, should_stop=_stop.is_set)
