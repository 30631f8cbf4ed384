"""How well a federation does, nested by what was judged.

A method with a public model is judged by that model, on the server's test sets. Where every client has its own, each
client judges its model where its data are, and a domain's score is the unweighted mean over the clients' models.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

import torch

from protofed.api.evaluation import NO_AREA, Evaluation, Outcomes, confusion_of
from protofed.api.requests import Map
from protofed.api.task import ClientId
from protofed.data.batches import Data
from protofed.engine.federation import Federation
from protofed.engine.state import State
from protofed.metrics import formulas
from protofed.metrics.registry import DomainJudgement, RoundJudgement, measured
from protofed.seeds import derive_seed

Scores = Mapping[str, float]
"""Metrics by name."""


@dataclass(frozen=True)
class Judged:
    """What was measured in a round."""

    models: Literal["public model", "clients' own models"]
    """Whose scores on the domains these are."""
    domains: Mapping[str, Scores]
    own_domains: Mapping[str, Scores]
    """What the clients of each domain see there, mean over them; what everyone sees where no client is of it."""
    public: Scores
    """The public model on all test sets together; empty where there is none."""
    personal: Scores
    """Clients' own models, right after training, mean over clients; empty if they were not judged."""
    summary: Scores
    clients: Mapping[ClientId, Scores] = field(default_factory=dict)
    """The personal metrics of each client."""


def evaluate(federation: Federation, state: State, trained: Mapping[ClientId, Evaluation] | None = None) -> Judged:
    """How well the federation does now. `trained`: how the models do that clients have just trained, if judged."""
    clients = {client: _numbers(own) for client, own in (trained or {}).items()}
    personal = _means(list(clients.values()))
    domain_of = federation.task.domain_of
    if federation.method.public(state.server) is not None:
        judgements = public_judgements(federation, state)
        domains = {domain: measured("domain", judged) for domain, judged in judgements.items()}
        by_client: Mapping[ClientId, Mapping[str, Scores]] = dict.fromkeys(federation.ids, domains)
        public = measured("public", torch.stack([judged.confusion for judged in judgements.values()]).sum(0))
    else:
        by_client = own_scores(federation, state)
        domains = {domain: _means([own[domain] for own in by_client.values()]) for domain in federation.task.tests}
        public = {}
    at_home = {client: by_client[client][domain] for client, domain in domain_of.items() if client in by_client}
    own_domains = {d: _means([at_home[c] for c in at_home if domain_of[c] == d] or [domains[d]]) for d in domains}
    summary = measured("summary", RoundJudgement(domains, own_domains, tuple(at_home.values()), public, personal))
    models: Literal["public model", "clients' own models"] = "public model" if public else "clients' own models"
    return Judged(models, domains, own_domains, public, personal, summary, clients)


def public_judgements(federation: Federation, state: State) -> dict[str, DomainJudgement]:
    """How the public model does on the test set of each domain."""
    public = federation.method.public(state.server)
    assert public is not None, "only a method with a public model is judged by it"
    params, message = public
    networks, tests = federation.networks_of(federation.ids[0]), federation.task.tests
    seed = derive_seed(federation.training.seed, "evaluate")
    rest = (federation.task.transform, seed, federation.method.outcomes)
    with federation.runtime.open(federation):
        requests = [Map(networks, params, (message, None), data, *rest) for data in tests.values()]
        answers: list[Outcomes] = federation.runtime.answers(requests)
    return {
        domain: _judgement(outcomes, data, federation.task.num_classes)
        for (domain, data), outcomes in zip(tests.items(), answers, strict=True)
    }


def own_scores(federation: Federation, state: State) -> dict[ClientId, dict[str, Scores]]:
    """How the model that each client would use now does on the test set of each domain."""
    return {
        client: {
            domain: measured("domain", DomainJudgement(confusion, None if area == NO_AREA else area.item()))
            for domain, confusion, area in zip(federation.task.tests, own.confusion, own.area, strict=True)
        }
        for client, own in federation.evaluated(state).items()
    }


def _judgement(outcomes: Outcomes, data: Data, num_classes: int) -> DomainJudgement:
    predicted, margin, labels = outcomes.predicted.cpu(), outcomes.margin.cpu(), data.labels.cpu()
    area = formulas.area(margin, labels) if num_classes == 2 else None
    return DomainJudgement(confusion_of(predicted, labels, num_classes), area)


def _numbers(evaluation: Evaluation) -> dict[str, float]:
    return {name: value.item() for name, value in evaluation.scores.items()}


def _means(scores: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each metric's plain mean over those that have it."""
    names: Iterable[str] = dict.fromkeys(name for own in scores for name in own)
    return {name: fmean(own[name] for own in scores if name in own) for name in names}
