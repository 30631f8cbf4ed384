"""A run from its first round to its last, surviving whatever stops it in between."""

import contextlib
import logging
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from protofed.api.task import ClientId
from protofed.engine.federation import Federation
from protofed.engine.rehearsal import rehearse
from protofed.engine.state import State
from protofed.errors import BadInput, RunFailed
from protofed.evaluation.evaluate import Scores, evaluate, validation_scores
from protofed.models.formats import outline_of
from protofed.one_run import only_run
from protofed.privacy.ledger import FOLDER
from protofed.privacy.statement import promise
from protofed.runs.config.config_diff import refuse_changes, refuse_other_runtime
from protofed.runs.config.renames import refuse_run_of_old_version
from protofed.runs.observers import Callback, LoggingSettings, Observer, observer_of
from protofed.runs.results import Result, Round, best_by_validation, is_stalled, parsed, split_lines
from protofed.runs.runtime_choice import pinned_threads
from protofed.runs.saver import Clock, Saver
from protofed.runs.store import checkpoint, verify
from protofed.runs.store.checkpoint import Checkpoint, Prepared, saved_store
from protofed.runs.store.client_state import Saved, SavedStore
from protofed.runs.store.folder import COPY, RunFolder
from protofed.runs.store.lock import Lock
from protofed.runtimes.client_store import InMemoryStore

log = logging.getLogger(__name__)


Silent = Callback


@dataclass(frozen=True)
class Experiment:
    """All that decides a run's outcome."""

    federation: Federation
    evaluate_every: int = 1
    evaluate_clients_every: int = 0
    """Rounds between evaluations of every client's own model; 0: never."""
    global_models: bool = False
    """Whether evaluations also judge global models that can be made of clients' own."""
    patience: int = 0
    """Evaluations without a better score on validation examples after which the run ends; 0: it never does."""
    threads: int = 1
    config: str = ""
    """The resolved configuration, as written into the folder."""
    identity: str = "unnamed"
    """The hash of the resolved configuration."""
    runtime: Mapping[str, str | int | bool] = field(default_factory=dict)
    """The runtime that was chosen and its numerics, as written into environment.json."""
    on_save_error: Literal["stop", "warn"] = "stop"
    """Whether a run whose state cannot be saved ends, or goes on and tries again after the next round."""
    keep: tuple[int, ...] = ()
    """Rounds whose states stay in the folder."""
    logging: LoggingSettings = field(default_factory=LoggingSettings)
    """Where the numbers of every round go beside the folder."""


def execute(
    experiment: Experiment,
    folder: RunFolder | None = None,
    *,
    resume: bool = False,
    allowed_changes: Collection[str] = (),
    steal_lock: bool = False,
    observer: Observer | Sequence[Observer] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    start: Result | None = None,
) -> Result:
    """Runs to the end, or to the end of the round in which `should_stop` becomes true.

    A run is resumed with the configuration that it was begun with. `allowed_changes` names settings, or sections, that
    may differ (and `protofed`, if another version may go on); `steal_lock` takes a folder that a process on another
    machine has left without giving it back. `start` is a run of the same federation that this one goes on from.
    """
    logs = experiment.logging.observers(folder.path if folder else None, experiment.config, experiment.identity)
    told, result = observer_of(observer, logs), None
    with (
        only_run(),
        pinned_threads(experiment.threads),
        folder.locked(steal_lock) if folder else contextlib.nullcontext() as lock,
    ):
        try:
            run = _Run(experiment, folder, lock, told, allowed_changes, start)
            result = run.go(resume, should_stop)
            return result
        finally:
            experiment.federation.runtime.close()
            told.end(result)


class _Run:
    def __init__(
        self,
        experiment: Experiment,
        folder: RunFolder | None,
        lock: Lock | None,
        observer: Observer,
        allowed: Collection[str],
        start: Result | None = None,
    ) -> None:
        self.experiment = experiment
        self.start = start
        self.lock = lock
        self.allowed = allowed
        self.unsaved = ""
        self.federation = replace(experiment.federation, on_client=observer.client)
        self.folder = folder
        is_here = isinstance(self.federation.runtime.store, InMemoryStore)  # whether clients are in this process
        if folder is not None and is_here:
            self.federation.runtime.store = saved_store(folder.checkpoints, self.federation)
        if folder is not None and self.federation.private is not None:
            self.federation.private.keep_in(folder.privacy)
        if folder is not None and self.federation.secure is not None:
            self.federation.secure.keep_in(folder.sums)
        self.observer = observer
        self.rounds: list[Round] = []
        self.lines: list[str] = []
        """The same as text, each made once."""
        self.saver = Saver(behind=experiment.federation.runtime.device.type != "cpu")

    def go(self, resume: bool, should_stop: Callable[[], bool]) -> Result:
        with self.saver:
            state = self._rounds(resume, should_stop)
        if self.unsaved:
            raise RunFailed(f"the run came to its end, but its last state was not saved: {self.unsaved}")
        if self.folder and self.lock:
            self.lock.check()
            if self._is_over(state):
                self.folder.end()
        return Result(self.federation, state, tuple(self.rounds), folder=self.folder.path if self.folder else None)

    def _is_over(self, state: State) -> bool:
        return state.round == self.federation.training.rounds or is_stalled(self.rounds, self.experiment.patience)

    def _rounds(self, resume: bool, should_stop: Callable[[], bool]) -> State:
        state = self._first_state(resume)
        if self.federation.private is not None:
            log.info(promise(self.federation.private.settings))
        self.observer.begin(self.federation, state.round)
        while not self._is_over(state) and not should_stop():
            state = self._one_round(state, should_stop)
        return state

    def _first_state(self, resume: bool) -> State:
        saved = self._saved(resume)
        if saved is not None and self.folder:
            self._refuse_without_ledger(saved.state)
            where = f"{self.folder.checkpoints / f'{saved.state.round:06d}' / 'rounds.jsonl'}"
            self.rounds, self.lines = parsed(saved.rounds, where), [f"{line}\n" for line in split_lines(saved.rounds)]
            self.folder.warn_of_other_versions()
            self.folder.write_rounds(saved.rounds)  # guard: rounds-those-checkpoint
            self._keep_this(saved)
            return saved.state
        rehearse(self.federation)  # guard: rehearsal-before-anything-written
        if self.folder:
            outline = outline_of(self.federation.task).text()
            # guard: config-toml-before-first-state
            self.folder.begin(self.experiment.config, self.experiment.runtime, outline)
        if self.start is not None:
            state = self._taken_over(self.start)
        else:
            state = self.federation.start()
            if state.traffic:
                self._add(Round.of(state, len(self.federation.ids)))
        self._save(state)
        return state

    def _refuse_without_ledger(self, state: State) -> None:
        private = self.federation.private
        if private is not None and state.round and not private.ledger.entries:  # guard: ledger-there-on-resume
            where = self.folder.path / FOLDER if self.folder else ""
            raise RunFailed(
                f"{where}: the ledger is gone, or empty: what was released in {state.round} rounds is not known any "
                "more; put it back from a copy, or start the run afresh in another folder"
            )

    def _taken_over(self, start: Result) -> State:
        """The state of another run, whose clients' states are kept here from now on."""
        for one in start.rounds:
            self._add(one)
        if self.federation.private is not None and start.federation.private is not None:
            self.federation.private.go_on_from(start.federation.private)
        before, store = start.federation.runtime.store, self.federation.runtime.store
        receipts = {c: store.keep(c, before.load(c, receipt)) for c, receipt in start.state.receipts.items()}
        return replace(start.state, receipts=receipts)

    def _keep_this(self, saved: Checkpoint) -> None:
        """A run that is resumed may be told only now to keep the round that it goes on from. Others are gone."""
        keep, done = self.experiment.keep, saved.state.round
        if done in keep and not saved.is_kept:
            self._save(saved.state)
        there = verify.rounds_there(self.folder.checkpoints) if self.folder and keep else []
        missed = [str(k) for k in keep if k < done and k not in there]
        if missed:
            log.warning("saving.keep: the states of rounds %s are not here any more", ", ".join(missed))

    def _saved(self, resume: bool) -> Checkpoint | None:
        folder = self.folder
        if folder is None:
            return None
        if folder.rounds_saved and not resume:
            raise BadInput(
                f"{folder.path} holds a run with {folder.rounds_saved} rounds done: "
                "continue it with --resume (resume=True in Python), or choose another folder with --out"
            )
        then, now = folder.read_config(), self.experiment.config
        if now and not then and folder.has("config.toml"):  # guard: configuration-empty
            raise BadInput(f"{folder.path / 'config.toml'} is damaged: it is empty; {COPY}")
        has_changed = False
        if then:
            environment = folder.read_environment()
            refuse_run_of_old_version(tomllib.loads(then), environment, str(folder.path))
            has_changed = refuse_changes(then, now, self.allowed, str(folder.path))
            was, runtime = environment.get("runtime", {}), self.experiment.runtime
            has_changed |= refuse_other_runtime(was, runtime, self.allowed, str(folder.path))
        identity = self.experiment.identity
        saved = checkpoint.load(folder.checkpoints, self.federation, identity, self.allowed, has_changed)
        lines = folder.read_rounds() if saved is None else ""
        if lines:  # guard: rounds-without-checkpoint
            count = len(split_lines(lines))
            raise RunFailed(
                f"{folder.path} holds {count} rounds and no checkpoint: nothing to resume; remove it to start afresh"
            )
        if saved is not None and saved.state.round > self.federation.training.rounds:
            raise BadInput(
                f"{folder.path} has {saved.state.round} rounds already, more than training.rounds = "
                f"{self.federation.training.rounds}"
            )
        if saved is not None and has_changed:  # first the state, so that whoever resumes need not allow it again
            folder.reopen()
            checkpoint.save(folder.checkpoints, saved, self.federation, identity)  # guard: allowed-change-saved
            folder.change_config(now)
            folder.write_environment(self.experiment.runtime)
        elif saved is not None and then != now:
            folder.write_config(now)
        return saved

    def _one_round(self, state: State, should_stop: Callable[[], bool]) -> State:
        """The state after one more round, which is saved. If the run is being stopped and one of its processes was
        killed meanwhile, that was no client's failure: then the round does not count."""
        before, clock, federation, number = state, Clock(), self.federation, state.round + 1
        participants = len(federation.sampled(state.round, strikes=state.strikes))
        is_last, has_tests = number == federation.training.rounds, federation.task.has_tests
        every, clients_every = self.experiment.evaluate_every, self.experiment.evaluate_clients_every
        judges_clients = has_tests and clients_every > 0 and (is_last or number % clients_every == 0)
        is_due = has_tests and (is_last or judges_clients or number % every == 0)
        state = federation.advance(state, evaluates=judges_clients)
        if any(failure.is_killed for failure in state.failures) and should_stop():  # guard: killed-while-stopping
            return before
        clock.lap("aggregate", without=state.client_seconds)
        trained, validation = state.evaluations, dict[ClientId, Scores]()
        if is_due and not is_last:
            tested = federation.judged(state)
            validation = validation_scores(federation, tested)
            scored = Round(number, participants, {}, validation=validation)
            is_last = is_stalled([*self.rounds, scored], self.experiment.patience)
            clock.lap("evaluate")
        is_early = is_last and number < federation.training.rounds
        if is_last:
            advanced, state = state, federation.finish(state)
            tested = state
            changed = [client for client in trained if state.receipts[client] != advanced.receipts[client]]
            clock.lap("aggregate", without=state.client_seconds - advanced.client_seconds)
        clock.laps = {"train": round(state.client_seconds, 6), **clock.laps}
        result = Round.of(state, participants)
        if is_due:
            if is_last and changed:  # what clients did at the end is what they will use
                trained = {**trained, **federation.evaluated(state, changed, "all")}
            if is_last and not is_early:
                validation = validation_scores(federation, tested)
            result = result.with_scores(evaluate(federation, tested, trained, self.experiment.global_models))
            result = replace(result, validation=validation, stopped=self._why_stopped() if is_early else "")
            clock.lap("evaluate")
        result = replace(result, seconds={**clock.laps, "checkpoint": round(self.saver.seconds, 6)})
        self._add(result)
        self._save(state)
        self.observer.round(result)
        return state

    def _why_stopped(self) -> str:
        return f"no better validation score in {self.experiment.patience} evaluations"

    def _add(self, result: Round) -> None:
        self.rounds.append(result)
        self.lines.append(result.line())

    def _save(self, state: State) -> None:
        if self.folder is None:
            return
        self._settle(self.saver.wait())
        best = best_by_validation(self.rounds)
        is_best = best is not None and best.round == state.round
        saved = Checkpoint(state, "".join(self.lines), state.round in self.experiment.keep, is_best)
        ready = checkpoint.prepared(saved, self.federation, self.experiment.identity)
        self._settle(self.saver.begin(partial(self._write, self.folder, ready)))

    def _settle(self, saved: Saved | None) -> None:
        """States of clients that are in a file need not all be at hand any more."""
        store = self.federation.runtime.store
        if saved is not None and isinstance(store, SavedStore):
            store.settle(saved)

    def _write(self, folder: RunFolder, ready: Prepared) -> Saved | None:
        """What was saved; nothing if that failed and the run may go on."""
        try:
            if self.lock:
                self.lock.check()
            done = checkpoint.write(folder.checkpoints, ready)
            folder.write_rounds(ready.checkpoint.rounds)
        except RunFailed as error:
            if self.experiment.on_save_error == "stop":  # guard: stop-default
                raise  # guard: stop-default
            self.unsaved = str(error)  # guard: run-may-go-on-fails-at-end
            log.error("SAVE_FAILED, going on without: %s", error)  # guard: failed-save-loud
            return None
        self.unsaved = ""  # guard: later-save-makes-up
        return done
