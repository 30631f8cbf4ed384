"""A run from its first round to its last, surviving whatever stops it in between."""

import contextlib
import json
import logging
import time
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor

from protofed.api.contexts import Reply
from protofed.api.task import ClientId
from protofed.engine.federation import Federation
from protofed.engine.state import State
from protofed.errors import BadInput, RunFailed
from protofed.evaluation.auc import evaluate_areas
from protofed.evaluation.evaluate import Scores, evaluate
from protofed.evaluation.metrics import harmonic_mean
from protofed.evaluation.personal import Judge, Judged, means
from protofed.nn.networks import Model
from protofed.runs.config.config_diff import refuse_changes, refuse_other_runtime
from protofed.runs.config.renames import refuse_run_of_old_version
from protofed.runs.store import checkpoint
from protofed.runs.store.checkpoint import Checkpoint
from protofed.runs.store.client_state import Memories, Saved
from protofed.runs.store.folder import RunFolder
from protofed.runtimes.device import moved
from protofed.tree import Tree

log = logging.getLogger(__name__)

Summary = Literal["last_five", "last", "best"]


@dataclass(frozen=True)
class Round:
    """One line of rounds.jsonl."""

    round: int
    """Counted from 1; 0 is the setup, which has a line if it asked the clients."""
    participants: int
    failures: Mapping[ClientId, str]
    """The reason for each client that was left out, and the detail."""
    judged: str | None = None
    domains: Mapping[str, float] = field(default_factory=dict)
    """Accuracy on each domain; empty if this round was not evaluated."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Those of METRICS that were measured and that the method and task have."""
    homes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """What the clients of a domain see there, mean over them, or everyone where no client is of it: `accuracy`, and
    with two classes `auc`."""
    clients: Mapping[ClientId, Mapping[str, float]] = field(default_factory=dict)
    """The personal metrics of each client that took part, if they were measured."""
    traffic: Mapping[ClientId, Mapping[str, int]] = field(default_factory=dict)
    """The bytes that went `down` to each client and came `up`."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Where the time went: waiting for clients (`train`), the server's own work (`aggregate`), `evaluate`, and saving
    the state before this round (`checkpoint`)."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """How many replies did not count, by reason."""
    repeats: Mapping[ClientId, int] = field(default_factory=dict)
    """Of clients that diverged: how often their learning rate was halved."""
    abandoned: Sequence[str] = ()
    """Why the round was begun again, each time."""

    @property
    def is_evaluated(self) -> bool:
        return bool(self.domains)

    @property
    def average(self) -> float | None:
        return self.metrics.get("average")


METRICS = {
    "average": "mean over the domains",
    "own_domain": "mean over clients, each on its own domain",
    "auc": "area under the ROC curve on the own domain, mean over domains, for two classes",
    "global": "GM: the public model on all test sets together",
    "owned": "PM(V): own models on the classes that the client has, mean over clients",
    "proportional": "PM(L): own models with classes weighted as in the client's data, mean over clients",
    "accuracy": "own models on the clients' own test sets, mean over clients",
    "macro_f1": "the same, mean F1 of the classes",
    "local_index": "I_local: harmonic mean of a client's accuracy and macro-F1, mean over clients",
    "harmonic_mean": "HM: harmonic mean of GM and I_local",
}
"""What the metrics of a round are. Own models are those that clients have just trained."""

COLUMNS = frozenset({*METRICS, "down", "up", "seconds", "left_out", "reached"})
"""What the numbers of a run are called; a domain needs another name."""


@dataclass(frozen=True)
class Result:
    """What a run gives: the metrics of every round, and the final state of the federation."""

    federation: Federation
    state: State
    rounds: tuple[Round, ...]

    @property
    def server(self) -> Any:
        return self.state.server

    @property
    def is_complete(self) -> bool:
        return self.state.round == self.federation.training.rounds

    def model_for(self, client: ClientId) -> Model:
        """The model that this client would use now, in evaluation mode; it reads what the task's transform gives."""
        message, memory = self._known_to(client)
        return self.federation.networks_of(client).model(self.federation.method.local_weights(message, memory))

    @torch.no_grad()
    def predict(self, client: ClientId, x: Tensor) -> Tensor:
        """Scores of the classes (B, C) by this client's model and the method's own rule, for examples as stored."""
        message, memory = self._known_to(client)
        with self.federation.runtime.open(self.federation):
            inputs = self.federation.task.transform.clean(moved(x, self.federation.runtime.device))
            return self.federation.method.predict(self.model_for(client), inputs, message, memory)

    def _known_to(self, client: ClientId) -> tuple[Any, Any]:
        """The client's message and memory now."""
        federation = self.federation
        if client not in federation.ids:
            raise BadInput(f"no client {client!r}; the clients are {', '.join(federation.ids)}")
        message = federation.method.message_for(self.state.server, client)
        return message, federation.memory_of(self.state, client, message)

    def accuracy(self, summary: Summary = "last_five") -> dict[str, float]:
        """Accuracy per domain and all metrics that were measured, summed up over rounds."""
        return summarised(self.rounds, summary)


class Observer(Protocol):
    """Is told how a run goes."""

    def begin(self, federation: Federation, done: int) -> None: ...

    def client(self, client: ClientId) -> None: ...

    def round(self, result: Round) -> None: ...


class Silent:
    def begin(self, federation: Federation, done: int) -> None:
        pass

    def client(self, client: ClientId) -> None:
        pass

    def round(self, result: Round) -> None:
        pass


@dataclass(frozen=True)
class Experiment:
    """All that decides a run's outcome."""

    federation: Federation
    evaluate_every: int = 1
    judge_clients_every: int = 0
    """Rounds between evaluations of every client's own model; 0: never."""
    threads: int = 1
    config: str = ""
    """The resolved configuration, as written into the folder."""
    identity: str = "unnamed"
    """The hash of the resolved configuration."""
    runtime: Mapping[str, str | int | bool] = field(default_factory=dict)
    """The runtime that was chosen and its numerics, as written into environment.json."""
    on_save_error: Literal["stop", "warn"] = "stop"
    """Whether a run whose state cannot be saved ends, or goes on and tries again after the next round."""


def execute(
    experiment: Experiment,
    folder: RunFolder | None = None,
    *,
    resume: bool = False,
    allowed_changes: Collection[str] = (),
    steal_lock: bool = False,
    observer: Observer | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Runs to the end, or to the end of the round in which `should_stop` becomes true.

    A run is resumed with the configuration that it was begun with. `allowed_changes` names settings, or sections, that
    may differ (and `protofed`, if another version may go on); `steal_lock` takes a folder that a process on another
    machine has left without giving it back.
    """
    taken = sorted(COLUMNS & experiment.federation.task.tests.keys())
    if taken:
        raise BadInput(f"the task has a test set called {taken[0]!r}, as a number of every run is: rename it")
    with _threads(experiment.threads), folder.locked(steal_lock) if folder else contextlib.nullcontext():
        try:
            run = _Run(experiment, folder, observer or Silent(), allowed_changes)
            return run.go(resume, should_stop)
        finally:
            experiment.federation.runtime.close()


class _Run:
    def __init__(
        self, experiment: Experiment, folder: RunFolder | None, observer: Observer, allowed: Collection[str]
    ) -> None:
        self.experiment = experiment
        self.allowed = allowed
        self.unsaved = ""
        self.federation = replace(experiment.federation, on_client=observer.client)
        self.judge = Judge(self.federation)
        self.folder = folder
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
        if state.round == self.federation.training.rounds and self.folder:
            self.folder.end()
        return Result(self.federation, state, tuple(self.rounds))

    def _rounds(self, resume: bool, should_stop: Callable[[], bool]) -> State:
        state = self._first_state(resume)
        self.observer.begin(self.federation, state.round)
        total = self.federation.training.rounds
        while state.round < total and not should_stop():
            state = self._one_round(state)
        return state

    def _first_state(self, resume: bool) -> State:
        saved = self._saved(resume)
        if saved is not None and self.folder:
            self.rounds, self.lines = parsed(saved.rounds), [f"{line}\n" for line in _lines(saved.rounds)]
            self.folder.warn_of_other_versions()
            self.folder.write_rounds(saved.rounds)  # guard: rounds-those-checkpoint
            return saved.state
        if self.folder:
            self.folder.begin(self.experiment.config, self.experiment.runtime)  # guard: config-toml-before-first-state
        state = self.federation.start()
        if state.traffic:
            self._add(_line(state, len(self.federation.ids)))
        return self._save(state)

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
        has_changed = False
        if then:
            environment = folder.read_environment()
            refuse_run_of_old_version(tomllib.loads(then), environment, str(folder.path))
            has_changed = refuse_changes(then, now, self.allowed, str(folder.path))
            was, runtime = environment.get("runtime", {}), self.experiment.runtime
            has_changed |= refuse_other_runtime(was, runtime, self.allowed, str(folder.path))
        identity = self.experiment.identity
        saved = checkpoint.load(folder.checkpoints, self.federation, identity, self.allowed, has_changed)
        if saved is None and folder.read_rounds():  # guard: rounds-without-checkpoint
            count = len(parsed(folder.read_rounds()))
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

    def _one_round(self, state: State) -> State:
        clock = _Clock()
        participants = len(self.federation.sampled(state.round, strikes=state.strikes))
        last = self.federation.training.rounds
        is_last, has_tests = state.round + 1 == last, bool(self.federation.task.tests)
        every, judge_every = self.experiment.evaluate_every, self.experiment.judge_clients_every
        judges = has_tests and judge_every > 0 and (is_last or (state.round + 1) % judge_every == 0)
        is_due = has_tests and (is_last or judges or (state.round + 1) % every == 0)
        judge = _Timed(self.judge)
        federation = replace(self.federation, on_trained=judge) if judges else self.federation
        state = federation.advance(state)
        counted = state.traffic.keys() - {failure.client for failure in state.failures}
        if is_last:
            state = federation.finish(state)
        clock.lap("aggregate", without=judge.seconds + state.client_seconds)
        clock.laps = {"train": round(state.client_seconds, 6), **clock.laps}
        result = _line(state, participants)
        if is_due:
            scores = evaluate(federation, state)
            judged = {c: own for c, own in self.judge.judged().items() if c in counted}  # not those of abandoned rounds
            result = _with_homes(_with_scores(result, scores, judged), federation, state, scores)
            clock.lap("evaluate", more=judge.seconds)
        result = replace(result, seconds={**clock.laps, "checkpoint": round(self.saver.seconds, 6)})
        self._add(result)
        state = self._save(state)
        self.observer.round(result)
        return state

    def _add(self, result: Round) -> None:
        self.rounds.append(result)
        self.lines.append(json.dumps(asdict(result), ensure_ascii=False) + "\n")

    def _save(self, state: State) -> State:
        """The state to go on with: what has been saved of it need not be at hand any more."""
        if self.folder is None:
            return state
        lines = "".join(self.lines)
        state = checkpoint.shelved(self.folder.checkpoints, state, self.federation)
        state = _settled(state, self.saver.wait())
        return _settled(state, self.saver.begin(partial(self._write, self.folder, Checkpoint(state, lines))))

    def _write(self, folder: RunFolder, saved: Checkpoint) -> Saved | None:
        """What was saved; nothing if that failed and the run may go on."""
        try:
            done = checkpoint.save(folder.checkpoints, saved, self.federation, self.experiment.identity)
            folder.write_rounds(saved.rounds)
        except RunFailed as error:
            if self.experiment.on_save_error == "stop":  # guard: stop-default
                raise  # guard: stop-default
            self.unsaved = str(error)  # guard: run-may-go-on-fails-at-end
            log.error("SAVE_FAILED, going on without: %s", error)  # guard: failed-save-loud
            return None
        self.unsaved = ""  # guard: later-save-makes-up
        return done


def _settled(state: State, saved: Saved | None) -> State:
    if saved is None:
        return state
    assert isinstance(state.memories, Memories)
    return replace(state, memories=state.memories.settled(saved))


class Saver:
    """Saves one state at a time: before the next round begins, or, with `behind`, while it runs on another device."""

    def __init__(self, behind: bool) -> None:
        self._pool = ThreadPoolExecutor(1) if behind else None
        self._pending: Future[Saved | None] | None = None
        self._waited = 0.0
        self.seconds = 0.0
        """How long the run waited for the save that was begun last, and for the one before it."""

    def begin(self, save: Callable[[], Saved | None]) -> Saved | None:
        """What was saved, unless that happens behind."""
        self.wait()
        begin = time.perf_counter()
        done = None
        if self._pool is None:
            done = save()
        else:
            self._pending = self._pool.submit(save)
        self.seconds, self._waited = self._waited + time.perf_counter() - begin, 0.0
        return done

    def wait(self) -> Saved | None:
        """What has been saved behind since the last time, if anything."""
        begin = time.perf_counter()
        pending, self._pending = self._pending, None
        done = None if pending is None else pending.result()
        self._waited += time.perf_counter() - begin
        return done

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.wait()
        finally:
            if self._pool is not None:
                self._pool.shutdown()


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str, *, more: float = 0.0, without: float = 0.0) -> None:
        now = time.perf_counter()
        self.laps[name] = round(now - self._last + more - without, 6)
        self._last = now


class _Timed:
    """A judge, and the time that judging took out of training."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.seconds = 0.0

    def __call__(self, client: ClientId, message: Tree, reply: Reply[Any, Any]) -> None:
        start = time.perf_counter()
        self.judge(client, message, reply)
        self.seconds += time.perf_counter() - start


def parsed(lines: str) -> list[Round]:
    return [Round(**json.loads(line)) for line in _lines(lines)]


def _lines(text: str) -> list[str]:
    """A name may hold what `splitlines` takes for the end of a line."""
    return text.removesuffix("\n").split("\n") if text else []


def _chosen(rounds: Sequence[Round], summary: Summary) -> list[Round]:
    evaluated = [r for r in rounds if r.is_evaluated]
    if not evaluated:
        raise BadInput("no round was evaluated yet")
    match summary:
        case "last_five":
            return evaluated[-5:]
        case "last":
            return evaluated[-1:]
        case "best":
            return [max(evaluated, key=lambda r: r.average or 0.0)]


def summarised(rounds: Sequence[Round], summary: Summary) -> dict[str, float]:
    """Accuracy per domain and the metrics that were measured: the mean over the last five evaluated rounds, the last
    round, or the best by `average`. A metric that only some of these rounds have is the mean over those."""
    chosen = _chosen(rounds, summary)
    domains = {name: fmean(r.domains[name] for r in chosen) for name in chosen[0].domains}
    measured = {name: [r.metrics[name] for r in chosen if name in r.metrics] for name in METRICS}
    return {**domains, **{name: fmean(values) for name, values in measured.items() if values}}


def at_home(rounds: Sequence[Round], summary: Summary) -> dict[str, dict[str, float]]:
    """What the clients of each domain see there, by domain and measure, summed up likewise."""
    chosen = _chosen(rounds, summary)
    last = chosen[-1].homes
    return {d: {name: fmean(r.homes[d][name] for r in chosen) for name in own} for d, own in last.items()}


def _line(state: State, participants: int) -> Round:
    """What a round was, before it is evaluated."""
    failures = {f.client: f"{f.reason}: {f.detail}" for f in state.failures}
    return Round(
        state.round,
        participants,
        failures,
        traffic={c: asdict(t) for c, t in state.traffic.items()},
        refused=state.refused,
        repeats=state.repeats,
        abandoned=list(state.abandoned),
    )


def _with_scores(result: Round, scores: Scores, judged: Mapping[ClientId, Judged]) -> Round:
    clients = {client: one.scores() for client, one in judged.items()}
    own = means(clients)
    found = {"average": scores.average, "own_domain": scores.own_domain, "global": scores.everywhere, **own}
    if scores.everywhere is not None and own:
        found["harmonic_mean"] = harmonic_mean(scores.everywhere, own["local_index"])
    metrics = {name: value for name, value in found.items() if value is not None}
    return replace(result, judged=scores.judged, domains=dict(scores.domains), metrics=metrics, clients=clients)


def _with_homes(result: Round, federation: Federation, state: State, scores: Scores) -> Round:
    """With what the clients of each domain see there; the area under the curve too if there are two classes."""
    areas = evaluate_areas(federation, state) if federation.task.num_classes == 2 else None
    found = {"accuracy": _homes(federation, scores.homes, scores.domains)}
    if areas is not None:
        found["auc"] = _homes(federation, areas.own_domain, areas.domains)
    homes = {d: {name: own[d] for name, own in found.items() if d in own} for d in scores.domains}
    metrics = {**result.metrics, **({"auc": fmean(found["auc"].values())} if found.get("auc") else {})}
    return replace(result, homes={domain: own for domain, own in homes.items() if own}, metrics=metrics)


def _homes(
    federation: Federation, clients: Mapping[ClientId, float | None], domains: Mapping[str, float | None]
) -> dict[str, float]:
    """By domain, the mean over its clients; over none, what everyone sees there."""
    domain_of = federation.task.domain_of
    own = {d: [clients[c] for c, home in domain_of.items() if home == d] or [domains[d]] for d in domains}
    known = {domain: [value for value in values if value is not None] for domain, values in own.items()}
    return {domain: fmean(values) for domain, values in known.items() if values}


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """Pins torch's threads: their number changes how sums are split, and so the last bits of a result."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
