"""Clients that are held out of the training are tested as new ones, and nobody else notices them."""

from dataclasses import replace

import pytest
import torch

from protofed import METHODS, BadInput, Task, tree
from protofed.engine.federation import Federation
from protofed.engine.state import State
from protofed.evaluation.evaluate import evaluate
from protofed.runtimes.cohort.cohort import Cohort
from run_doubles import small_experiment


def held_out(name: str, count: int = 1) -> Federation:
    federation = small_experiment(name).federation
    training = replace(federation.training, held_out_clients=count)
    return replace(federation, training=training, _networks={}, _tests={})


def after(federation: Federation, rounds: int = 2) -> State:
    state = federation.start()
    for _ in range(rounds):
        state = federation.advance(state)
    return state


def without(task: Task, client: str) -> Task:
    return replace(
        task,
        clients={c: data for c, data in task.clients.items() if c != client},
        domain_of={c: domain for c, domain in task.domain_of.items() if c != client},
    )


@pytest.mark.parametrize("name", METHODS)
def test_training_is_that_of_a_task_without_the_client_and_the_client_is_tested(name: str) -> None:
    federation = held_out(name)
    (new,) = federation.new_ids
    state = after(federation)
    other = replace(small_experiment(name).federation, task=without(federation.task, new), _networks={}, _tests={})
    expected = after(other)
    leaves, others = tree.leaves(state.server), tree.leaves(expected.server)
    assert len(leaves) == len(others)
    assert all(map(torch.equal, leaves, others))
    assert state.receipts.keys() == expected.receipts.keys()
    assert new not in state.receipts
    found, of_others = evaluate(federation, state), evaluate(other, expected)
    assert found.new.keys() == {new}
    assert found.summary["new"] == found.new[new]["accuracy"]
    assert found.at_home == of_others.at_home
    assert {key: value for key, value in found.summary.items() if key != "new"} == of_others.summary


def test_a_public_model_serves_a_new_client_as_it_serves_all() -> None:
    federation = held_out("fedavg")
    (new,) = federation.new_ids
    found = evaluate(federation, after(federation))
    assert found.new[new] == found.domains[federation.task.domain_of[new]]


def test_fine_tuning_before_the_test_gives_a_new_client_a_model_of_its_own() -> None:
    federation = held_out("fedper")
    tuned = replace(federation, fine_tune=5)
    state = after(federation, 3)
    assert evaluate(tuned, state).summary["new"] > evaluate(federation, state).summary["new"]


def test_without_domains_a_new_client_is_tested_on_its_own_test_set() -> None:
    federation = held_out("ditto")
    federation = replace(federation, task=replace(federation.task, domain_of={}), _tests={})
    found = evaluate(federation, after(federation))
    assert found.new.keys() == set(federation.new_ids)
    assert found.at_home.keys() == set(federation.ids)


def test_a_cohort_gives_the_same() -> None:
    near = held_out("fedrep")
    far = replace(near, runtime=Cohort("cpu"))
    here, there = (evaluate(f, after(f)) for f in (near, far))
    assert here.new.keys() == there.new.keys()
    assert here.summary["new"] == pytest.approx(there.summary["new"])


def test_who_is_held_out_depends_on_the_seed_alone_and_one_client_must_be_left() -> None:
    drawn = {held_out("fedavg").new_ids for _ in range(3)}
    assert len(drawn) == 1
    assert len(held_out("fedavg", 2).ids) == 1
    with pytest.raises(BadInput, match="held_out_clients is 3, but the task has 3 clients"):
        held_out("fedavg", 3)
