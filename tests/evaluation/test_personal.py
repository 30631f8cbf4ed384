"""Clients' own models, right after training, on everyone's test sets and on their own."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from protofed import METHODS, Data, Task
from protofed.api.contexts import ClientContext
from protofed.api.evaluation import Evaluation
from protofed.engine.federation import Federation
from protofed.engine.state import State
from protofed.engine.test_sets import label_counts
from protofed.engine.training import Training
from protofed.evaluation.evaluate import evaluate
from protofed.metrics.registry import PersonalJudgement, measured
from protofed.runtimes.sequential import Sequential
from protofed.runtimes.workers import Workers
from protofed.tree import Params
from run_doubles import small_experiment, small_task


def counted(federation: Federation, params: Params, client: str, data: Data) -> Tensor:
    """The confusion matrix of a client's model, counted one example at a time."""
    model, task = federation.networks_of(client).model(params), federation.task
    matrix = torch.zeros(task.num_classes, task.num_classes, dtype=torch.int64)
    with torch.no_grad():
        for i in data.index.tolist():
            scores = federation.method.predict(model, task.transform.clean(data.x[i : i + 1]), None, None)
            matrix[data.y[i], scores.argmax()] += 1
    return matrix


def judged(federation: Federation, rounds: int = 2) -> tuple[State, dict[str, Params]]:
    """The state after some rounds, in which clients judge what they train, and the weights that they had last."""
    trained: dict[str, Params] = {}
    method = type(federation.method)

    class Watched(method):  # type: ignore[misc, valid-type]
        async def evaluate(self, client: ClientContext, params: Params, message: Any, memory: Any) -> Evaluation:
            trained[client.id] = params
            return await super().evaluate(client, params, message, memory)

    watched = replace(federation, method=Watched(**vars(federation.method)))
    state = watched.start()
    for _ in range(rounds):
        state = watched.advance(state, evaluates=True)
    return state, trained


def local_set(federation: Federation, client: str) -> Data:
    tests = federation.test_sets(client)
    if tests.own is not None:
        return tests.own
    assert tests.pooled is not None
    return tests.pooled.rows(tests.own_rows)


def assert_counted(federation: Federation, state: State, trained: dict[str, Params]) -> None:
    """Every matrix and every score is that of counting example by example."""
    task = federation.task
    for client, found in state.evaluations.items():
        matrices = [counted(federation, trained[client], client, data) for data in task.tests.values()]
        assert torch.equal(found.confusion, torch.stack(matrices))
        own = counted(federation, trained[client], client, local_set(federation, client))
        counts = label_counts(task.clients[client], task.num_classes)
        expected = measured("personal", PersonalJudgement(torch.stack(matrices).sum(0), own, counts))
        assert {name: value.item() for name, value in found.scores.items()} == pytest.approx(expected)


@pytest.mark.parametrize("name", ["fedavg", "local", "fedrep", "fedpc", "pfedcspc", "fedseproto"])
def test_the_models_that_clients_just_trained_are_counted_on_all_test_sets_and_their_own(name: str) -> None:
    federation = small_experiment(name).federation
    state, trained = judged(federation)
    assert tuple(sorted(state.evaluations)) == federation.ids
    assert_counted(federation, state, trained)


def test_nobody_is_judged_unless_asked_and_only_when_clients_train() -> None:
    """FedPC's setup asks the clients for prototypes, and trains nothing."""
    federation = small_experiment("fedpc").federation
    state = federation.start()
    assert state.traffic
    assert not state.evaluations
    assert not federation.advance(state).evaluations


def test_personal_metrics_are_plain_means_over_clients() -> None:
    federation = small_experiment("local").federation
    state, _ = judged(federation)
    found = evaluate(federation, state, state.evaluations)
    a, b, c = found.clients.values()
    assert found.personal == pytest.approx({name: (a[name] + b[name] + c[name]) / 3 for name in a})
    assert not evaluate(federation, state).personal


def without_domains(task: Task) -> Task:
    return replace(task, domain_of={})


def with_own_sets(task: Task) -> Task:
    """Of another store and of a test set; the third client's is drawn."""
    a, b, *_ = task.clients
    near = next(iter(task.tests.values()))
    own = Data.of(near.x.clone(), near.y.clone()).rows(torch.arange(4, 11))
    return replace(task, local_tests={a: own, b: near.rows(torch.tensor([7, 2, 3]))})


def with_other_labels(task: Task) -> Task:
    a, near = next(iter(task.clients)), next(iter(task.tests.values()))
    return replace(task, local_tests={a: Data(near.x, near.y.flip(0), near.index)})


def with_training_examples(task: Task) -> Task:
    return replace(task, local_tests={client: data.rows(torch.arange(3)) for client, data in task.clients.items()})


def with_examples_twice(task: Task) -> Task:
    tests = {name: data.rows(torch.arange(len(data)).repeat(2)) for name, data in task.tests.items()}
    a, near = next(iter(task.clients)), next(iter(task.tests.values()))
    return replace(task, tests=tests, local_tests={a: near.rows(torch.tensor([7, 2, 3]))})


def with_sets_of_one_store(task: Task) -> Task:
    """Test sets that overlap, and one that has some of the examples of a client's own, but not all."""
    store = next(iter(task.tests.values()))
    a, b, *_ = task.clients
    tests = {"some": store.rows(torch.arange(20)), "others": store.rows(torch.arange(8, 30))}
    own = {a: store.rows(torch.arange(3, 24)), b: store.rows(torch.tensor([9, 12]))}
    return replace(task, tests=tests, domain_of={}, local_tests=own)


def with_a_set_within_another(task: Task) -> Task:
    store = next(iter(task.tests.values()))
    return replace(task, tests={"all": store, "hard": store.rows(torch.arange(5, 25))}, domain_of={})


def with_one_set_under_two_names(task: Task) -> Task:
    store = next(iter(task.tests.values()))
    return replace(task, tests={"a": store, "b": store}, domain_of={})


@pytest.mark.parametrize("method", ["fedavg", "fedproto"])
@pytest.mark.parametrize(
    "change",
    [
        without_domains,
        with_own_sets,
        with_other_labels,
        with_training_examples,
        with_examples_twice,
        with_sets_of_one_store,
        with_a_set_within_another,
        with_one_set_under_two_names,
    ],
)
def test_whatever_a_local_test_set_is_made_of_it_is_counted_example_by_example(
    change: Callable[[Task], Task], method: str
) -> None:
    before = small_experiment(method).federation
    federation = replace(before, task=change(before.task))
    assert_counted(federation, *judged(federation))


JUDGED_BY_WORKERS = ("fedavg", "fedavg_ft", "local", "fedproto", "fpl", "fedpc", "fedrep", "ifca", "pfedcspc")
"""Methods whose models are judged in different ways. That workers train as one process does is shown of every method in
tests/runtimes, and that clients elsewhere are judged as here by the conformance suite."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in JUDGED_BY_WORKERS else pytest.mark.slow) for name in METHODS]
)
def test_workers_see_what_one_process_sees(name: str) -> None:
    task, method = small_task(), METHODS[name]()
    results = []
    for runtime in (Sequential(), Workers(2)):
        federation = Federation(method, task, Training(rounds=2, epochs=1, batch_size=8), runtime)
        state = federation.start()
        for _ in range(2):
            state = federation.advance(state, evaluates=True)
        trained = state.evaluations
        state = federation.finish(state)
        results.append(evaluate(federation, state, trained))
        runtime.close()
    assert results[0] == results[1]
    assert set(results[0].clients) == set(task.clients)
