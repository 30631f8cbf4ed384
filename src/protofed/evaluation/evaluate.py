"""How well a federation does, nested by what was judged.

A method is judged by the model that its clients use (`Method.clients_use`). If that is the public model, the server
tests it. If every client has its own, each client tests it where its data are, and a domain's score is the unweighted
mean over the clients' models. What a client sees at home is the test set of its domain or, in a task without domains,
its own test set. Where only clients have test sets, each of them stands for a domain: clients test, and counts travel.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np
import torch

from protofed import tree
from protofed.api.evaluation import NO_AREA, Evaluation, Outcomes, Reading, confusion_of, evaluation_of
from protofed.api.method import UsedModel
from protofed.api.requests import Map
from protofed.api.task import ClientId
from protofed.data.batches import Data
from protofed.engine.federation import Federation
from protofed.engine.state import State
from protofed.metrics import formulas
from protofed.metrics.formulas import Counts
from protofed.metrics.registry import DomainJudgement, PublicJudgement, RoundJudgement, measured
from protofed.one_run import only_run
from protofed.runtimes.jobs import TestKind
from protofed.seeds import derive_seed

log = logging.getLogger(__name__)

Scores = Mapping[str, float]
"""Metrics by name."""
Confusion = list[list[int]]
"""Counts: a row for each true class, a column for each predicted one."""

MAX_COUNTS = 20_000
"""Of all confusion matrices of a round together. More are not recorded, since every round's line would hold them."""


@dataclass(frozen=True)
class Judged:
    """What was measured in a round."""

    models: UsedModel
    """Whose scores on the domains and at home these are."""
    domains: Mapping[str, Scores]
    own_domains: Mapping[str, Scores]
    """What the clients of each domain see there, mean over them; what everyone sees where no client is of it."""
    at_home: Mapping[ClientId, Scores]
    """What each client sees at home, with the model that it uses."""
    new: Mapping[ClientId, Scores]
    """The same for clients that were held out of the training."""
    public: Scores
    """The public model on all test sets; empty where there is none."""
    personal: Scores
    """Clients' own models, right after training, mean over clients; empty if they were not judged."""
    summary: Scores
    clients: Mapping[ClientId, Scores] = field(default_factory=dict)
    """The personal metrics of each client."""
    confusion: Mapping[ClientId, Confusion] = field(default_factory=dict)
    """What each client sees at home, new ones too, in a task with domains; empty if that is more than MAX_COUNTS."""


def evaluate(
    federation: Federation,
    state: State,
    trained: Mapping[ClientId, Evaluation] | None = None,
    global_models: bool = False,
) -> Judged:
    """How well the federation does now. `trained`: how the models do that clients have just trained, if judged.
    `global_models`: whether those are judged too that can be made of clients' own."""
    clients = {client: _numbers(own) for client, own in (trained or {}).items()}
    personal, of_public = _means(list(clients.values())), dict[str, Outcomes]()
    if federation.method.public(state.server) is not None:
        of_public = public_outcomes(federation, state)
    if federation.task.tests_are_at_home:
        domains, everyone, confusion = _at_home(federation, state)
    elif federation.clients_use == "public model":
        domains, everyone, confusion = _of_public_model(federation, state, of_public)
    else:
        domains, everyone, confusion = _of_own_models(federation, state)
    at_home = {client: scores for client, scores in everyone.items() if client not in federation.new_ids}
    new = {client: scores for client, scores in everyone.items() if client in federation.new_ids}
    readings = _readings(federation, state) if global_models else {}
    of_clients = _list(at_home) if federation.clients_use == "public model" else ()
    seen = _confusions(federation, of_public)
    if federation.task.tests_are_at_home and federation.clients_use == "public model":
        seen = [*confusion.values()]
    public = measured("public", PublicJudgement(seen, readings, of_clients))
    members = {domain: [c for c, home in federation.task.domain_of.items() if home == domain] for domain in domains}
    own_domains = {d: _means([at_home[c] for c in members[d] if c in at_home] or [domains[d]]) for d in domains}
    summary = measured("summary", RoundJudgement(domains, own_domains, _list(at_home), _list(new), public, personal))
    counts = {client: np.asarray(matrix).tolist() for client, matrix in confusion.items()}
    if len(counts) * federation.task.num_classes**2 > MAX_COUNTS:
        counts = {}
    return Judged(
        federation.clients_use, domains, own_domains, at_home, new, public, personal, summary, clients, counts
    )


def validation_scores(federation: Federation, state: State) -> dict[ClientId, Scores]:
    """How the model that each client would use now does on the client's validation examples."""
    ids = [client for client in federation.trusted(state) if client in federation.task.validation]
    if not ids:
        return {}
    return {client: _numbers(own) for client, own in federation.evaluated(state, ids, "validation").items()}


def public_outcomes(federation: Federation, state: State) -> dict[str, Outcomes]:
    """What the public model says of each example of each domain's test set, on the CPU."""
    public = federation.method.public(state.server)
    assert public is not None, "only a method with a public model is judged by it"
    params, message = public
    return _outcomes(federation, Reading(params, federation.method.outcomes, (message, None)))


def _outcomes(federation: Federation, model: Reading) -> dict[str, Outcomes]:
    networks, tests = federation.networks_of(federation.ids[0]), federation.task.tests
    rest = (federation.task.transform, derive_seed(federation.training.seed, "evaluate"), model.outcomes)
    with only_run(), federation.runtime.open(federation):
        requests = [Map(networks, model.params, model.context, data, *rest, to_cpu=True) for data in tests.values()]
        return dict(zip(tests, federation.runtime.answers(requests), strict=True))


def _readings(federation: Federation, state: State) -> dict[str, list[Counts]]:
    """How the global models do that can be made of what the clients of this simulation have, by reading."""
    with only_run(), federation.runtime.open(federation):
        memories = {client: federation.runtime.store.load(client, kept) for client, kept in state.receipts.items()}
        server = federation.server_context(state.round, "evaluate")
        models = federation.method.global_models(state.server, memories, server)
    return {name: _confusions(federation, _outcomes(federation, model)) for name, model in models.items()}


def own_scores(federation: Federation, own: Evaluation) -> dict[str, Scores]:
    """How one client's own model does on the test set of each domain."""
    return {
        domain: measured("domain", DomainJudgement(confusion, _meant(area)))
        for domain, confusion, area in zip(federation.task.tests, own.confusion.numpy(), own.area.tolist(), strict=True)
    }


def _of_public_model(
    federation: Federation, state: State, outcomes: Mapping[str, Outcomes]
) -> tuple[dict[str, Scores], dict[ClientId, Scores], dict[ClientId, Counts]]:
    """Its scores on the domains, and what each client sees of it at home, as scores and as counts."""
    task = federation.task
    domains: dict[str, Scores] = {
        d: measured("domain", _judgement(outcomes[d], task.tests[d], task.num_classes)) for d in task.tests
    }
    if task.domain_of:
        confusions = dict(zip(outcomes, _confusions(federation, outcomes), strict=True))
        seen = {client: confusions[domain] for client, domain in task.domain_of.items()}
        return domains, {c: domains[domain] for c, domain in task.domain_of.items()}, seen
    if task.local_tests:  # only the clients have these
        evaluations = federation.evaluated(state, federation.testable, "own")
    else:
        pooled = tree.map(lambda *parts: torch.cat(parts), *outcomes.values())
        evaluations = {
            c: evaluation_of(pooled, None, federation.test_sets(c), task.num_classes) for c in federation.testable
        }
    return domains, {client: _numbers(own) for client, own in evaluations.items()}, {}


def _of_own_models(
    federation: Federation, state: State
) -> tuple[dict[str, Scores], dict[ClientId, Scores], dict[ClientId, Counts]]:
    """The mean scores of the models that clients would use now, and what each client sees at home."""
    domain_of = federation.task.domain_of
    ids = (*federation.trusted(state), *federation.new_ids)
    kind: TestKind = "domains" if domain_of else "all"
    evaluations = federation.evaluated(state, [c for c in ids if domain_of or c in federation.testable], kind)
    by_client = {client: own_scores(federation, own) for client, own in evaluations.items()}
    trained = [own for client, own in by_client.items() if client not in federation.new_ids]
    domains: dict[str, Scores] = {d: _means([own[d] for own in trained]) for d in federation.task.tests}
    if domain_of:
        place = {domain: k for k, domain in enumerate(federation.task.tests)}
        seen: dict[ClientId, Counts] = {
            c: own.confusion[place[domain_of[c]]] for c, own in evaluations.items() if c in domain_of
        }
        return domains, {c: own[domain_of[c]] for c, own in by_client.items() if c in domain_of}, seen
    return domains, {client: _numbers(own) for client, own in evaluations.items()}, {}


def _at_home(
    federation: Federation, state: State
) -> tuple[dict[str, Scores], dict[ClientId, Scores], dict[ClientId, Counts]]:
    """How the model does that each client uses, on its own test set. Nothing unless every client answers: rounds could
    not be compared of which one lacks a client."""
    ids = federation.testable
    found = federation.evaluated(state, ids, "home")
    if missing := [client for client in ids if client not in found]:  # guard: evaluations-at-home-are-whole
        log.warning("not evaluated: no evaluation of %s", ", ".join(missing))
        return {}, {}, {}
    judgements = {c: DomainJudgement(own.confusion[0].numpy(), _meant(own.area[0].item())) for c, own in found.items()}
    scores: dict[str, Scores] = {client: measured("domain", judged) for client, judged in judgements.items()}
    return scores, scores, {client: judged.confusion for client, judged in judgements.items()}


def _meant(area: float) -> float | None:
    return None if area == NO_AREA else area


def _confusions(federation: Federation, outcomes: Mapping[str, Outcomes]) -> list[Counts]:
    """On each domain's test set; none if there are no outcomes."""
    tests, num_classes = federation.task.tests, federation.task.num_classes
    return [confusion_of(found.predicted, tests[d].labels.cpu(), num_classes) for d, found in outcomes.items()]


def _judgement(outcomes: Outcomes, data: Data, num_classes: int) -> DomainJudgement:
    labels = data.labels.cpu()
    area = formulas.area(outcomes.margin, labels) if num_classes == 2 else None
    return DomainJudgement(confusion_of(outcomes.predicted, labels, num_classes), area)


def _numbers(evaluation: Evaluation) -> dict[str, float]:
    return {name: value.item() for name, value in evaluation.scores.items()}


def _list(scores: Mapping[ClientId, Scores]) -> tuple[Scores, ...]:
    return tuple(scores.values())


def _means(scores: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each metric's plain mean over those that have it."""
    names: Iterable[str] = dict.fromkeys(name for own in scores for name in own)
    return {name: fmean(own[name] for own in scores if name in own) for name in names}
