"""Test sets that only clients have: what they see at home is all that there is to see."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from protofed.api.task import Task
from protofed.data.batches import Data
from protofed.engine.federation import Federation
from protofed.evaluation.evaluate import evaluate, public_outcomes
from protofed.methods import METHODS
from protofed.runs.results import parsed
from protofed.runs.runner import Experiment, execute
from protofed.testing.federations import CLASSES, TASK, TRAINING, Faulty, examples

TESTED = {"ann": (0, 4), "bob": (1, 3), "cyd": (0, 2), "dan": (3, 4), "eve": (2, 5)}
"""Of each client: the first class of its test set, and how many examples it has."""


def own_test(client: str) -> Data:
    first, count = TESTED[client]
    return examples((torch.arange(count) + first) % CLASSES, 70 + first)


def at_home(**changes: Any) -> Task:
    return replace(TASK, tests={}, local_tests={client: own_test(client) for client in TESTED}, **changes)


def test_each_client_stands_for_a_domain() -> None:
    """The public model by hand, on each client's test set."""
    federation = Federation(METHODS["fedavg"](), at_home(), TRAINING)
    state = federation.advance(federation.start())
    judged = evaluate(federation, state)
    everywhere = Federation(METHODS["fedavg"](), replace(TASK, tests=at_home().local_tests), TRAINING)
    right, total = 0, 0
    for client, outcomes in public_outcomes(everywhere, state).items():
        hits = int((outcomes.predicted == own_test(client).labels).sum())
        assert judged.domains[client]["accuracy"] == judged.at_home[client]["accuracy"] == hits / TESTED[client][1]
        assert sum(map(sum, judged.confusion[client])) == TESTED[client][1]
        right, total = right + hits, total + TESTED[client][1]
    assert judged.public["accuracy"] == pytest.approx(right / total)
    accuracies = [judged.domains[client]["accuracy"] for client in TESTED]
    assert judged.summary["average"] == judged.summary["own"] == pytest.approx(sum(accuracies) / 5)
    assert judged.own_domains == judged.domains


def test_clients_with_models_of_their_own_are_judged_by_those() -> None:
    federation = Federation(METHODS["local"](), at_home(), replace(TRAINING, held_out_clients=1))
    state = federation.advance(federation.start())
    judged = evaluate(federation, state)
    new = federation.new_ids
    assert set(judged.new) == set(new)
    assert set(judged.at_home) == set(TESTED) - set(new)
    assert judged.public == {}
    one = next(client for client in TESTED if client not in new)
    own = federation.evaluated(state, [one], "own")[one]
    assert judged.at_home[one]["accuracy"] == own.scores["accuracy"].item()


def test_a_round_in_which_a_client_cannot_be_judged_is_not_evaluated(caplog: pytest.LogCaptureFixture) -> None:
    federation = Federation(METHODS["fedavg"](), at_home(), TRAINING, Faulty("cyd", 1, crashes=True))
    state = federation.advance(federation.start())
    assert evaluate(federation, state).domains == {}
    assert "no evaluation of cyd" in caplog.text


def test_a_whole_run_is_evaluated_and_can_be_read() -> None:
    federation = Federation(METHODS["fedrep"](head_epochs=1), at_home(), TRAINING)
    result = execute(Experiment(federation, evaluate_clients_every=3))
    assert all(each.is_evaluated for each in result.rounds)
    assert [*parsed("".join(each.line() for each in result.rounds), "here")] == [*result.rounds]
    assert set(result.rounds[-1].clients) == set(TESTED)
    assert result.rounds[-1].headline == result.rounds[-1].summary["own"]


def test_a_client_without_a_test_set_is_not_judged() -> None:
    task = at_home()
    task = replace(task, local_tests={c: data for c, data in task.local_tests.items() if c != "bob"})
    federation = Federation(METHODS["fedavg"](), task, TRAINING)
    assert set(evaluate(federation, federation.advance(federation.start())).domains) == set(TESTED) - {"bob"}
