"""What the page shows of models: confusion matrices, t-SNE over kept rounds, and who holds what.

These need the task, which is built again, and the states in a run's folder. They are made for one run of each group,
the first one that has a state. What cannot be made is said with the reason.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from protofed.api.evaluation import confusion_of
from protofed.api.task import ClientId, Task
from protofed.data.batches import Data
from protofed.errors import BadInput, RunFailed
from protofed.evaluation.evaluate import public_outcomes
from protofed.reports.analysis.drawing import Options, grouped
from protofed.reports.analysis.tsne import Cloud, clouds_of, embedded, separations
from protofed.reports.analysis.views import chosen_rounds, client_view
from protofed.reports.federation import holdings
from protofed.reports.page.facts import Facts, RunGroup, TaskGroups
from protofed.runs.loading import SavedRun, open_run
from protofed.runs.results import Result
from protofed.runs.runtime_choice import pinned_threads

Tell = Callable[[str], None]
Counts = NDArray[np.int64]

EXAMPLES = 200
"""Test examples in one round of t-SNE."""
ROUNDS = 6
"""Kept rounds that the slider has at most."""
SCALE = 1000
"""Places along each axis of t-SNE."""


def add_models(page: Facts, tasks: Sequence[TaskGroups], tell: Tell = lambda what: None) -> None:
    """Adds to the facts of each group what its models show, and to those of each task who holds what."""
    with _one_thread():
        for facts, task in zip(page["tasks"], tasks, strict=True):
            for group_facts, group in zip(facts["groups"], task.groups, strict=True):
                group_facts["models"] = models = _of_group(group, tell)
                held = models.pop("holdings", None)
                if held is not None and "holdings" not in facts:
                    facts["holdings"] = held


@contextmanager
def _one_thread() -> Iterator[None]:
    """The threads of t-SNE wait for each other at every step, which takes minutes on a machine that is busy."""
    from threadpoolctl import threadpool_limits  # scikit-learn brings it

    with pinned_threads(1), threadpool_limits(limits=1):
        yield


def _of_group(group: RunGroup, tell: Tell) -> Facts:
    """Of the first run that has a state; otherwise why there is none."""
    why = ""
    for listed in group.runs:
        found: Facts = {"seed": listed.seed}
        try:
            run = open_run(listed.path)
            tell(f"{group.label}: data")
            found["holdings"] = held_by(run.federation.task)
            if not run.rounds_there:
                raise BadInput(f"{listed.path} holds no state of a model")
            tell(f"{group.label}: confusion matrices")
            found["confusion"] = confusions(run.at())
        except (BadInput, RunFailed) as error:
            why = why or str(error)
            if "holdings" not in found:
                continue
            return {**found, "why": str(error)}
        try:
            found["tsne"] = planes(run, group.label, tell)
        except (BadInput, RunFailed) as error:
            found["why_no_tsne"] = str(error)
        return found
    return {"why": why}


def held_by(task: Task) -> Facts:
    """Training examples of each client by class."""
    held = holdings(task)
    return {
        "classes": list(task.classes),
        "clients": list(held.clients),
        "domains": [task.domain_of.get(client) for client in held.clients],
        "counts": held.counts.tolist(),
    }


# ---- confusion matrices


def confusions(result: Result) -> Facts:
    """How often class i is taken for class j at home, by the model that is used there: of each client where that is its
    own, and of each domain. Every matrix is a list of (i, j, count) for counts above zero, one after the other."""
    federation = result.federation
    if federation.fine_tune:
        raise BadInput("clients fine-tune their models before each test, and these models are not kept")
    if not federation.task.tests and not federation.task.local_tests:
        raise BadInput(f"the task {federation.task.name} has no test sets")
    if not result.is_complete:
        result = replace(result, state=federation.judged(result.state))
    is_public = federation.clients_use == "public model"
    by_client, by_domain = (_of_public_model if is_public else _of_own_models)(result)
    return {
        "round": result.state.round,
        "models": federation.clients_use,
        "clients": {client: _sparse(matrix) for client, matrix in by_client.items()},
        "domains": {domain: _sparse(matrix) for domain, matrix in by_domain.items()},
    }


def _of_public_model(result: Result) -> tuple[dict[ClientId, Counts], dict[str, Counts]]:
    """Clients of a domain see the same; others have test sets of their own."""
    federation = result.federation
    task, classes = federation.task, federation.task.num_classes
    outcomes = public_outcomes(federation, result.state)
    domains = {d: confusion_of(found.predicted, task.tests[d].labels.cpu(), classes) for d, found in outcomes.items()}
    if task.domain_of:
        return {}, domains
    if task.local_tests:
        return {c: _seen(result, c, task.local_tests[c]) for c in federation.ids if c in task.local_tests}, domains
    predicted = torch.cat([found.predicted for found in outcomes.values()])
    labels = torch.cat([data.labels.cpu() for data in task.tests.values()])
    rows = {client: federation.test_sets(client).own_rows for client in federation.testable}
    return {
        c: confusion_of(predicted[own], labels[own], classes) for c, own in rows.items() if own is not None
    }, domains


def _of_own_models(result: Result) -> tuple[dict[ClientId, Counts], dict[str, Counts]]:
    """Of each client at home, and their sums over the clients of each domain."""
    federation, task = result.federation, result.federation.task
    clients = {}
    for client in federation.trusted(result.state):
        home = _home(result, client)
        if home is not None:
            clients[client] = _seen(result, client, home)
    names = {client: task.domain_of.get(client, "all clients") for client in clients}
    return clients, {d: sum_of([clients[c] for c in clients if names[c] == d]) for d in dict.fromkeys(names.values())}


def sum_of(matrices: Sequence[Counts]) -> Counts:
    total: Counts = np.stack(matrices).sum(0)
    return total


def _home(result: Result, client: ClientId) -> Data | None:
    """What a client's own model is tested on: its domain's test set, or its own."""
    federation, task = result.federation, result.federation.task
    if task.domain_of:
        return task.tests[task.domain_of[client]] if client in task.domain_of else None
    if client not in federation.testable:
        return None
    tests = federation.test_sets(client)
    if tests.own is not None or tests.own_rows is None or tests.pooled is None:
        return tests.own
    return tests.pooled.rows(tests.own_rows)


def _seen(result: Result, client: ClientId, data: Data) -> Counts:
    predicted = client_view(result, client).predicted(data)
    return confusion_of(predicted.cpu(), data.labels.cpu(), result.federation.task.num_classes)


def _sparse(matrix: Counts) -> list[int]:
    rows, columns = matrix.nonzero()
    return [int(n) for i, j in zip(rows, columns, strict=True) for n in (i, j, matrix[i, j])]


# ---- t-SNE


def planes(run: SavedRun, label: str, tell: Tell) -> Facts:
    """One plane for all rounds that are there; whole numbers from 0 to SCALE along each axis."""
    (group,) = grouped([run])
    wanted = tuple(chosen_rounds(run, (), most=ROUNDS))
    clouds = clouds_of(group, Options(rounds=wanted, examples=EXAMPLES))
    scores = {number: (by_class, by_domain) for number, _, by_class, by_domain in separations(clouds)}
    tell(f"{label}: t-SNE of {sum(len(c.label) for c in clouds)} points")
    placed = _scaled(embedded(clouds))
    return {
        "model": placed[0].model,
        "rounds": [
            {
                "round": number,
                "silhouette": {"class": _score(scores[number][0]), "domain": _score(scores[number][1])},
                "clouds": [_cloud(c) for c in placed if c.round == number],
            }
            for number in dict.fromkeys(c.round for c in placed)
        ],
    }


def _scaled(clouds: Sequence[Cloud]) -> list[Cloud]:
    everything = np.concatenate([c.values for c in clouds])
    low, span = everything.min(0), np.ptp(everything, axis=0)
    side = np.where(span > 0, span, 1.0)
    return [
        Cloud(c.round, c.model, c.kind, c.domain, c.label, c.row, np.rint(SCALE * (c.values - low) / side))
        for c in clouds
    ]


def _cloud(cloud: Cloud) -> Mapping[str, Any]:
    x, y = cloud.values.astype(int).T.tolist()
    return {"kind": cloud.kind, "domain": cloud.domain, "label": cloud.label.tolist(), "x": x, "y": y}


def _score(value: float | str) -> float | None:
    return round(value, 3) if isinstance(value, float) else None
