"""Observers of runs: progress on a terminal or in a notebook, TensorBoard, MLflow, Weights & Biases, or your own.

class Loss(protofed.Callback):
    def round(self, result: Round) -> None:
        print(result.round, result.loss)

protofed.run("fpl", observer=[Loss()])
"""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from protofed.api.task import ClientId
from protofed.engine.federation import Federation
from protofed.errors import BadInput
from protofed.metrics.registry import METRICS
from protofed.printable import one_line
from protofed.runs.results import Result, Round

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

log = logging.getLogger(__name__)


class Observer(Protocol):
    """Is told how a run goes. An error that it raises ends the run, whose last saved state is intact."""

    def begin(self, federation: Federation, done: int) -> None:
        """The run begins, or goes on after `done` rounds."""

    def client(self, client: ClientId) -> None:
        """A client's step has ended."""

    def round(self, result: Round) -> None:
        """A round has ended."""


@runtime_checkable
class Ending(Protocol):
    """An observer that is also told of the end."""

    def end(self, result: Result | None) -> None:
        """The run has ended; without a result if it failed."""


class Callback:
    """An observer that does nothing: a class to derive from."""

    def begin(self, federation: Federation, done: int) -> None:
        pass

    def client(self, client: ClientId) -> None:
        pass

    def round(self, result: Round) -> None:
        pass

    def end(self, result: Result | None) -> None:
        pass


class Several(Callback):
    """Tells many."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def begin(self, federation: Federation, done: int) -> None:
        for one in self._observers:
            one.begin(federation, done)

    def client(self, client: ClientId) -> None:
        for one in self._observers:
            one.client(client)

    def round(self, result: Round) -> None:
        for one in self._observers:
            one.round(result)

    def end(self, result: Result | None) -> None:
        for one in self._observers:
            if isinstance(one, Ending):
                one.end(result)


def observer_of(observers: Observer | Sequence[Observer] | None, extra: Sequence[Observer] = ()) -> Several:
    given = [] if observers is None else list(observers) if isinstance(observers, Sequence) else [observers]
    return Several([*given, *extra])


# ---- progress


class Progress(Callback):
    """One line that is written again and again, on a terminal or in a notebook."""

    def __init__(self) -> None:
        self._total, self._expected, self._done, self._round, self._width = 0, 0, 0, 0, 0
        self._federation: Federation | None = None
        self._scores = ""

    def begin(self, federation: Federation, done: int) -> None:
        self._federation, self._total, self._round = federation, federation.training.rounds, done
        self._expect()

    def client(self, client: ClientId) -> None:
        self._done += 1
        self._say(f"round {self._round + 1}/{self._total}  client {self._done}/{self._expected}{self._scores}")

    def round(self, result: Round) -> None:
        self._round, self._done = result.round, 0
        headline = "" if result.headline is None else f"  accuracy {100 * result.headline:.1f} %"
        loss = "" if result.loss is None else f"  loss {result.loss:.3f}"
        self._scores = headline + loss
        self._say(f"round {self._round}/{self._total}{self._scores}")
        self._expect()

    def end(self, result: Result | None) -> None:
        print(flush=True)

    def _expect(self) -> None:
        if self._federation is not None and self._round < self._total:
            self._expected = len(self._federation.sampled(self._round))

    def _say(self, text: str) -> None:
        text = one_line(text)
        print(f"\r{text.ljust(self._width)}", end="", flush=True)
        self._width = len(text)


def is_watched() -> bool:
    """Whether somebody sees what is printed: in a terminal or in a notebook."""
    return sys.stdout.isatty() or "ipykernel" in sys.modules


# ---- logs


def scalars(result: Round) -> dict[str, float]:
    """The numbers of a round by name: `loss`, every metric by id, and those of each domain and client."""
    numbers = {} if result.loss is None else {"loss": result.loss}
    found = {metric.id: result.metric(metric.id) for metric in METRICS if metric.group != "domain"}
    numbers |= {name: value for name, value in found.items() if value is not None}
    for group, scores in (("domains", result.domains), ("at_home", result.at_home)):
        numbers |= {f"{group}/{name}/{metric}": v for name, own in scores.items() for metric, v in own.items()}
    return numbers | {f"seconds/{name}": value for name, value in result.seconds.items()}


@dataclass(frozen=True)
class LoggingSettings:
    tensorboard: bool = False
    """Whether the numbers of every round are written for TensorBoard, into the folder `tensorboard` of the run."""
    mlflow: str = ""
    """Where MLflow tracks runs, such as `http://127.0.0.1:5000`; empty: nowhere."""
    wandb: str = ""
    """The project of Weights & Biases in which the run is logged; empty: none."""

    def observers(self, folder: Path | None, config: str, name: str) -> list[Observer]:
        """Those that are asked for. `config` is the run's configuration, `name` its identity."""
        made: list[Callback] = []
        if self.tensorboard:
            if folder is None:
                raise BadInput("logging.tensorboard: TensorBoard's files go into the run's folder; give the run one")
            made.append(TensorBoard(folder / "tensorboard"))
        if self.mlflow:
            made.append(MLflow(self.mlflow, name=name, config=config))
        if self.wandb:
            made.append(WeightsAndBiases(self.wandb, name=name, config=config))
        return [Lenient(one) for one in made]


class Lenient(Callback):
    """A log whose failure does not end the run: a server that is away is named once, and asked no more."""

    def __init__(self, log_of: Callback) -> None:
        self._log = log_of
        self._is_lost = False

    def begin(self, federation: Federation, done: int) -> None:
        self._log.begin(federation, done)  # what is wrong from the start is an error

    def round(self, result: Round) -> None:
        self._try(lambda: self._log.round(result))

    def end(self, result: Result | None) -> None:
        self._try(lambda: self._log.end(result))

    def _try(self, action: Callable[[], None]) -> None:
        if self._is_lost:
            return
        try:
            action()
        except Exception as error:
            self._is_lost = True
            log.warning("%s is lost, the run goes on without: %s", type(self._log).__name__, error)


class TensorBoard(Callback):
    """Writes the numbers of every round for TensorBoard."""

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder)
        self._writer: SummaryWriter | None = None

    def begin(self, federation: Federation, done: int) -> None:
        _needed("tensorboard", "tensorboard")
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=done + 1 if done else None)

    def round(self, result: Round) -> None:
        assert self._writer is not None
        for name, value in scalars(result).items():
            self._writer.add_scalar(name, value, result.round)
        self._writer.flush()

    def end(self, result: Result | None) -> None:
        if self._writer is not None:
            self._writer.close()


class MLflow(Callback):
    """Tracks the run with MLflow."""

    def __init__(self, uri: str, experiment: str = "protofed", name: str = "", config: str = "") -> None:
        self._uri, self._experiment, self._name, self._config = uri, experiment, name, config
        self._client: Any = None
        self._run = ""

    def begin(self, federation: Federation, done: int) -> None:
        _needed("mlflow", "mlflow")
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(self._uri)
        known = self._client.get_experiment_by_name(self._experiment)
        number = known.experiment_id if known else self._client.create_experiment(self._experiment)
        self._run = self._client.create_run(number, run_name=self._name or None).info.run_id
        for key, value in _flat(self._config):
            self._client.log_param(self._run, key, str(value)[:500])

    def round(self, result: Round) -> None:
        for name, value in scalars(result).items():
            self._client.log_metric(self._run, _plain(name), value, step=result.round)

    def end(self, result: Result | None) -> None:
        if self._client is not None and self._run:
            self._client.set_terminated(self._run, "FINISHED" if result is not None else "FAILED")


class WeightsAndBiases(Callback):
    """Logs the run in Weights & Biases, where the user is logged in; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, project: str, name: str = "", config: str = "") -> None:
        self._project, self._name, self._config = project, name, config
        self._run: Any = None

    def begin(self, federation: Federation, done: int) -> None:
        _needed("wandb", "wandb")
        import wandb

        self._run = wandb.init(project=self._project, name=self._name or None, config=dict(_flat(self._config)))

    def round(self, result: Round) -> None:
        self._run.log(scalars(result), step=result.round)

    def end(self, result: Result | None) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if result is not None else 1)


def _needed(package: str, extra: str) -> None:
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise BadInput(f"logging.{extra}: the package {package} is not installed: pip install 'protofed[{extra}]'")


def _flat(config: str) -> Iterator[tuple[str, Any]]:
    """The settings of a configuration (TOML) by name, such as `method.temperature`."""
    import tomllib

    def walk(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for key, value in table.items():
            yield from walk(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]

    yield from walk(tomllib.loads(config), "")


def _plain(name: str) -> str:
    """A name with the letters that MLflow accepts."""
    return "".join(letter if letter.isalnum() or letter in "_-. /" else "_" for letter in name)
