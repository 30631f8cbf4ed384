"""What a run gives: a line of numbers for every round, and the final state of the federation."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter
from torch import Tensor

from protofed.api.task import ClientId
from protofed.data.batches import Data
from protofed.engine.federation import Federation
from protofed.engine.state import State
from protofed.errors import BadInput
from protofed.evaluation.evaluate import Confusion, Judged, Scores
from protofed.metrics.registry import METRICS
from protofed.models.module import TrainedModel
from protofed.models.taking import client_model, public_model
from protofed.nn.networks import Model
from protofed.privacy import statement
from protofed.runs import results_views
from protofed.runtimes.device import moved

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

    from protofed.runs.config.config import Config

Summary = Literal["last_five", "last", "best", "validation"]


@dataclass(frozen=True)
class Round:
    """One line of rounds.jsonl. Scores are nested by what was judged; all are empty if the round was not evaluated."""

    round: int
    """Counted from 1; 0 is the setup, which has a line if it asked the clients."""
    participants: int
    failures: Mapping[ClientId, str]
    """The reason for each client that was left out, and the detail."""
    judged: str | None = None
    """Whose scores on the domains and at home these are: "public model" or "own models"."""
    domains: Mapping[str, Scores] = field(default_factory=dict)
    own_domains: Mapping[str, Scores] = field(default_factory=dict)
    """What the clients of a domain see there, mean over them, or everyone where no client is of it."""
    at_home: Mapping[ClientId, Scores] = field(default_factory=dict)
    """What each client sees on its domain's test set, or on its own in a task without domains."""
    new: Mapping[ClientId, Scores] = field(default_factory=dict)
    """The same for clients that were held out of the training."""
    public: Scores = field(default_factory=dict)
    """The public model on all test sets."""
    personal: Scores = field(default_factory=dict)
    """Clients' own models, mean over the clients that took part, if they were measured."""
    summary: Scores = field(default_factory=dict)
    clients: Mapping[ClientId, Scores] = field(default_factory=dict)
    """The personal metrics of each client that took part, if they were measured."""
    loss: float | None = None
    """The training loss: mean over the clients that counted, weighted by their examples, of the mean loss over the
    steps of their main training."""
    traffic: Mapping[ClientId, Mapping[str, int]] = field(default_factory=dict)
    """The bytes that went `down` to each client and came `up`."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Where the time went: waiting for clients (`train`; they also judge their models in this time), the server's own
    work (`aggregate`), `evaluate`, and saving the state before this round (`checkpoint`)."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """How many replies did not count, by reason."""
    repeats: Mapping[ClientId, int] = field(default_factory=dict)
    """Of clients that diverged: how often their learning rate was halved."""
    abandoned: Sequence[str] = ()
    """Why the round was begun again, each time."""
    confusion: Mapping[ClientId, Confusion] = field(default_factory=dict)
    """What each client sees at home, as counts: a row for each true class, a column for each predicted one."""
    validation: Mapping[ClientId, Scores] = field(default_factory=dict)
    """How each client's model does on the client's validation examples, if the task has such."""
    stopped: str = ""
    """Why the run ended with this round, if it is not the last that was planned."""

    @classmethod
    def of(cls, state: State, participants: int) -> "Round":
        """What a round was, before it is evaluated."""
        return cls(
            state.round,
            participants,
            {f.client: f"{f.reason}: {f.detail}" for f in state.failures},
            loss=state.loss,
            traffic={client: asdict(traffic) for client, traffic in state.traffic.items()},
            refused=state.refused,
            repeats=state.repeats,
            abandoned=list(state.abandoned),
        )

    def with_scores(self, judged: Judged) -> "Round":
        return replace(
            self,
            judged=judged.models,
            domains=judged.domains,
            own_domains=judged.own_domains,
            at_home=judged.at_home,
            new=judged.new,
            public=judged.public,
            personal=judged.personal,
            summary=judged.summary,
            clients=judged.clients,
            confusion=judged.confusion,
        )

    @property
    def is_evaluated(self) -> bool:
        return bool(self.domains)

    @property
    def average(self) -> float | None:
        return self.summary.get("average")

    @property
    def headline(self) -> float | None:
        """What the method is made for: the mean over the domains of a public model, or what clients see at home with
        models of their own."""
        at_home = self.summary.get("own") if self.judged == "own models" else None
        return self.average if at_home is None else at_home

    @property
    def validation_score(self) -> float | None:
        """What rounds are compared by: the balanced accuracy on validation examples, mean over clients."""
        scores = [own["balanced_accuracy"] for own in self.validation.values()]
        return fmean(scores) if scores else None

    def metric(self, id: str) -> float | None:
        """A metric of METRICS by its id, such as `average` or `personal.owned`; None if it was not measured."""
        group, _, name = id.rpartition(".")
        scores: Scores = getattr(self, group or "summary")
        return scores.get(name)

    def line(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False) + "\n"


@dataclass(frozen=True)
class Summed:
    """Scores summed up over rounds."""

    domains: Mapping[str, Scores]
    own_domains: Mapping[str, Scores]
    metrics: Scores
    """By id, such as `average` or `personal.owned`."""
    at_home: Mapping[ClientId, Scores] = field(default_factory=dict)
    """What each client sees at home."""
    new: Mapping[ClientId, Scores] = field(default_factory=dict)
    """The same for clients that were held out of the training."""


@dataclass(frozen=True, repr=False)
class Result:
    """What a run gives: the scores of every round, and the final state of the federation."""

    federation: Federation
    state: State
    rounds: tuple[Round, ...]
    config: "Config | None" = None
    """The settings of the run, if it was made from some."""
    folder: Path | None = None
    """Where the run is saved."""

    @property
    def server(self) -> Any:
        return self.state.server

    @property
    def is_complete(self) -> bool:
        is_stopped_early = bool(self.rounds and self.rounds[-1].stopped)
        return is_stopped_early or self.state.round == self.federation.training.rounds

    @property
    def privacy(self) -> dict[str, object]:
        """What was promised under differential privacy, what was released of it, and what is not covered; empty without
        it."""
        private = self.federation.private
        return {} if private is None else statement.facts(private.settings, private.most_spent)

    def module(self, client: ClientId | None = None) -> TrainedModel:
        """The model that this client would use now, or without a client the public one, as a plain `nn.Module`: from
        inputs, which its `transform` makes of stored examples, to scores of the classes by the method's own rule."""
        if client is None:
            return public_model(self.federation, self.state)
        return client_model(self.federation, self.state, client)

    def model_for(self, client: ClientId) -> Model:
        """The networks of this client at the weights that it would use now, part by part: `model.features(x)`."""
        message, memory = self._seen_by(client)
        return self.federation.networks_of(client).model(self.federation.method.local_weights(message, memory))

    @torch.no_grad()
    def predict(self, client: ClientId, x: Tensor) -> Tensor:
        """Scores of the classes (B, C) by this client's model and the method's own rule, for examples as stored."""
        message, memory = self._seen_by(client)
        with self.federation.runtime.open(self.federation):
            inputs = self.federation.task.transform.clean(moved(x, self.federation.runtime.device))
            return self.federation.method.predict(self.model_for(client), inputs, message, memory)

    def embeddings(self, client: ClientId | None, data: Data | Tensor) -> Tensor:
        """The features (N, D) that this client's model, or the public one, gives examples as stored: those in whose
        space prototypes are."""
        return results_views.embeddings(self, client, data)

    def confusion(self, client: ClientId | None = None) -> NDArray[np.int64]:
        """How often class i was taken for class j, (C, C): by this client's model on the test set that it sees at home,
        or by the public model on all test sets. Needs the data of the run."""
        return results_views.confusion(self, client)

    def summary(self) -> str:
        """The run in a few lines: what it was, and how well each site and domain did in the end."""
        return results_views.summary(self)

    __repr__ = __str__ = summary

    def curves(self) -> "pandas.DataFrame":
        """A row for every evaluated round: the training loss, all metrics by id, and the accuracy on each domain."""
        return results_views.curves(self.rounds)

    def plot(self, metric: str = "accuracy") -> "Axes":
        """Draws a metric of the domains over the rounds, and gives matplotlib's axes."""
        return results_views.plot(self.rounds, metric)

    def with_data(self) -> "Result":
        """The same run with its data, read again if it was loaded without."""
        return results_views.with_data(self)

    def _seen_by(self, client: ClientId) -> tuple[Any, Any]:
        """The client's message and memory now."""
        federation = self.federation
        if client not in federation.ids:
            raise BadInput(f"no client {client!r}; the clients are {', '.join(federation.ids)}")
        message = federation.method.message_for(self.state.server, client)
        return message, federation.client_state(self.state, client, message)

    def accuracy(self, summary: Summary = "last_five") -> dict[str, float]:
        """Accuracy on each domain, summed up over rounds."""
        return {domain: scores["accuracy"] for domain, scores in summed(self.rounds, summary).domains.items()}

    def metrics(self, summary: Summary = "last_five") -> dict[str, float]:
        """All metrics that were measured, by id, summed up over rounds."""
        return dict(summed(self.rounds, summary).metrics)


def parsed(lines: str, where: str = "rounds.jsonl") -> list[Round]:
    """The rounds in the text of a file. Raises BadInput, with the line, for what is not one."""
    rounds: list[Round] = []
    for number, line in enumerate(split_lines(lines), 1):
        try:
            facts = json.loads(line)
            _ROUND.validate_python(facts)
            rounds.append(Round(**facts))
            _refuse_gaps(rounds[-1], rounds)
        except (ValueError, TypeError, RecursionError) as error:  # guard: rounds-damaged
            what = str(error).partition("\n")[0]
            raise BadInput(f"{where} is damaged: line {number} is no round ({what})") from error
    return rounds


_ROUND = TypeAdapter(Round)


def _refuse_gaps(one: Round, rounds: Sequence[Round]) -> None:
    """Refuses a round that lacks what tables show of every evaluated one."""
    if not one.is_evaluated:
        return
    first = next(r for r in rounds if r.is_evaluated)
    for scores in (one.domains, one.own_domains):
        if scores.keys() != first.domains.keys() or not all("accuracy" in own for own in scores.values()):
            raise ValueError("accuracies are missing")
    if one.average is None:
        raise ValueError("the average is missing")


def split_lines(text: str) -> list[str]:
    """A name may hold what `splitlines` takes for the end of a line."""
    return text.removesuffix("\n").split("\n") if text else []


def summed(rounds: Sequence[Round], summary: Summary) -> Summed:
    """The mean over the last five evaluated rounds, the last round, the best by `headline`, or the best by its score on
    validation examples. A metric that only some
    of these rounds have is the mean over those."""
    chosen = _chosen(rounds, summary)
    values = {metric.id: [r.metric(metric.id) for r in chosen] for metric in METRICS if metric.group != "domain"}
    measured = {key: [value for value in column if value is not None] for key, column in values.items()}
    return Summed(
        _summed_scores([r.domains for r in chosen]),
        _summed_scores([r.own_domains for r in chosen]),
        {key: fmean(column) for key, column in measured.items() if column},
        _summed_scores([r.at_home for r in chosen]),
        _summed_scores([r.new for r in chosen]),
    )


def _summed_scores(rounds: Sequence[Mapping[str, Scores]]) -> dict[str, dict[str, float]]:
    return {
        domain: {name: fmean(r[domain][name] for r in rounds if name in r.get(domain, {})) for name in scores}
        for domain, scores in rounds[-1].items()
    }


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
            return [max(evaluated, key=lambda r: r.headline or 0.0)]
        case "validation":
            best = best_by_validation(evaluated)
            if best is None:
                raise BadInput("no round has a validation score: set validation_fraction in [task]")
            return [best]


def best_by_validation(rounds: Sequence[Round]) -> Round | None:
    """The round with the highest score on validation examples, the first of equals. Test sets have no say in it."""
    scored = [r for r in rounds if r.validation_score is not None]
    return max(scored, key=lambda r: r.validation_score or 0.0, default=None)


def is_stalled(rounds: Sequence[Round], patience: int) -> bool:
    """Whether the last `patience` validated rounds brought no better one."""
    scored = [r for r in rounds if r.validation_score is not None]
    best = best_by_validation(scored)
    return patience > 0 and best is not None and len(scored) - 1 - scored.index(best) >= patience
