"""Many runs at once, each in a process and in its own run folder."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Protocol

from protofed.errors import BadInput, RunFailed
from protofed.runs import mps
from protofed.runs.config.config import Config
from protofed.runs.config.user_classes import import_folders
from protofed.runs.places import Place, gpu_environment, is_on_gpu, places
from protofed.runs.results import Round, parsed
from protofed.runs.resuming import refuse_other_run
from protofed.runs.run_process import CONTEXT, RunProcess, folder_of
from protofed.runs.store.folder import RunFolder
from protofed.runs.sweep_log import Listener, Messages

log = logging.getLogger(__name__)

POLL_SECONDS = 0.3


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


def sweep(
    configs: Sequence[Config],
    out: Path,
    *,
    workers: int | None = None,
    progress: Callable[[Sequence[int]], None] = lambda rounds: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[Outcome]:
    """The outcome of every run. Finished runs are not run again, unfinished ones are resumed.

    `workers`: how many runs there are at the same time. `progress` is called with the number of rounds that are done
    in each run. Once `should_stop` is true, every run stops after its round. The other runs continue when one fails.
    """
    folders = [folder_of(config, out) for config in configs]
    waiting = unfinished(configs, out)
    code_folders = import_folders([part for config in configs for part in config.own_parts])
    where = places([*waiting.values()], workers)
    with Listener(CONTEXT) as listener, _shared_gpus(where, [*waiting.values()], workers):
        runs = _Runs(waiting, out, where, workers, code_folders, listener.messages)
        try:
            while runs.begin():
                runs.wait()
                progress([*map(rounds_saved, folders)])
                if should_stop():
                    runs.stop.set()
        finally:
            runs.close()
    progress([*map(rounds_saved, folders)])
    return [outcome(config, out, runs.failures.get(config.identity)) for config in configs]


@contextlib.contextmanager
def _shared_gpus(where: Sequence[Place], configs: Sequence[Config], workers: int | None) -> Iterator[None]:
    """Lets processes share GPUs by MPS, if two of them may be on the same one."""
    gpus = [place for place in where if place.device is not None]
    count = sum(map(is_on_gpu, configs))
    if count <= len(gpus) or (workers or count) <= len(gpus):
        yield
        return
    with mps.shared(gpu_environment()) as pipes:
        for place in gpus:
            if pipes:
                place.work_at_once(pipes)
            if place.sharing:
                log.info("%s: %d runs at a time to begin with; --jobs sets a fixed number", place.name, place.width)
        yield


@dataclass
class _Runs:
    """The runs of a sweep that are still to be done, and the processes that do them."""

    configs: dict[str, Config]
    out: Path
    places: list[Place]
    most: int | None
    """Runs at the same time in all places together."""
    code_folders: list[str]
    messages: Messages
    """Through which processes log."""
    stop: Event = field(default_factory=CONTEXT.Event)
    failures: dict[str, str] = field(default_factory=dict)
    queue: list[str] = field(init=False)
    resumed: set[str] = field(default_factory=set)
    """Runs that lost their GPU once."""

    def __post_init__(self) -> None:
        self.queue = [*self.configs]

    @property
    def busy(self) -> list[RunProcess]:
        return [process for place in self.places for process in place.busy]

    def begin(self) -> bool:
        """Begins all runs that may be done now. Whether there are any at work."""
        while not self.stop.is_set() and (found := self._next()):
            place, identity = found
            self.queue.remove(identity)
            idle = [process for process in place.processes if not process.identity]
            if not idle:
                idle = [RunProcess(self.stop, self.messages, self.code_folders, place.environment)]
                place.processes += idle
            idle[0].begin(self.configs[identity], self.out, place.device is not None)
        return bool(self.busy)

    def _next(self) -> tuple[Place, str] | None:
        """A place with room, the emptiest first, and a run for it."""
        if self.most and len(self.busy) >= self.most:
            return None
        for place in sorted(self.places, key=lambda place: len(place.busy)):
            run = next((identity for identity in self.queue if place.takes(self.configs[identity])), None)
            if run is not None and len(place.busy) < place.width:
                return place, run
        return None

    def wait(self) -> None:
        """Waits for a run to end, or a moment, and takes note of those that did."""
        wait([process.answer for process in self.busy], POLL_SECONDS, FIRST_COMPLETED)
        for place in self.places:
            for process in place.busy:
                if process.answer.done():
                    self._note(place, process)
            place.share([config for identity in self.queue if place.takes(config := self.configs[identity])])

    def _note(self, place: Place, process: RunProcess) -> None:
        identity, answer = process.identity, process.ended(self.stop.is_set())
        if not answer.has_gpu:
            place.renew()
            if identity not in self.resumed:
                log.warning(
                    "run %s lost %s: it is resumed once without sharing: %s", identity, place.name, answer.failure
                )
                self.resumed.add(identity)
                self.queue.append(identity)
                return
        if answer.failure:
            self.failures[identity] = answer.failure

    def close(self) -> None:
        self.stop.set()
        for place in self.places:
            for process in place.processes:
                process.close()


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
