"""A method is judged by the model that its clients use."""

from dataclasses import replace

import pytest
import torch

from protofed import METHODS, Data
from protofed.engine.federation import Federation
from protofed.engine.state import State
from protofed.evaluation.evaluate import evaluate
from protofed.methods.fedseproto import FedSeProto
from protofed.methods.pfedcspc import PFedCSPC
from protofed.testing.federations import Elsewhere
from run_doubles import small_experiment

BOTH = ("ditto", "fedavg_ft", "fedala", "fedsoup", "pfedcspc")
"""Methods with a public model whose clients use their own."""


def after(federation: Federation, rounds: int = 3) -> State:
    state = federation.start()
    for _ in range(rounds):
        state = federation.advance(state)
    return state


def share_right(federation: Federation, state: State, client: str, data: Data) -> float:
    """What a client's own model gets right, counted one example at a time."""
    method = federation.method
    message = method.message_for(state.server, client)
    memory = federation.client_state(state, client, message)
    model = federation.networks_of(client).model(method.local_weights(message, memory))
    with torch.no_grad():
        scores = [method.predict(model, data.x[i : i + 1], message, memory) for i in data.index.tolist()]
    return sum(int(s.argmax()) == int(data.y[i]) for s, i in zip(scores, data.index.tolist(), strict=True)) / len(data)


@pytest.mark.parametrize("name", BOTH)
def test_a_method_with_a_public_model_whose_clients_use_their_own_is_judged_by_these(name: str) -> None:
    federation = small_experiment(name).federation
    state = after(federation)
    found = evaluate(federation, state)
    assert found.models == "own models"
    expected = {
        client: share_right(federation, state, client, federation.task.tests[domain])
        for client, domain in federation.task.domain_of.items()
    }
    assert {client: scores["accuracy"] for client, scores in found.at_home.items()} == pytest.approx(expected)
    assert found.summary["own"] == pytest.approx(sum(expected.values()) / len(expected))


def test_ditto_has_the_public_model_of_fedavg_and_scores_of_its_own() -> None:
    ditto, fedavg = (small_experiment(name).federation for name in ("ditto", "fedavg"))
    of_ditto, of_fedavg = (evaluate(f, after(f, 2)) for f in (ditto, fedavg))
    assert of_ditto.public == pytest.approx(of_fedavg.public)
    assert of_fedavg.public["average"] == pytest.approx(of_fedavg.summary["average"])
    assert of_ditto.summary["own"] != of_fedavg.summary["own"]


def test_methods_that_can_do_both_say_what_clients_use() -> None:
    assert PFedCSPC(personalised=False).clients_use == "public model"
    assert FedSeProto().clients_use == "public model"
    assert FedSeProto(shares="prototypes").clients_use == "own models"
    for name, cls in METHODS.items():
        is_personal = "personal" in cls.tags
        assert cls().clients_use == ("own models" if is_personal else "public model"), name


@pytest.mark.parametrize("name", ["fedavg", "ditto", "local"])
@pytest.mark.parametrize("has_own_sets", [False, True], ids=["drawn", "held out"])
def test_without_domains_clients_are_at_home_on_test_sets_of_their_own(name: str, has_own_sets: bool) -> None:
    federation = small_experiment(name).federation
    task = replace(federation.task, domain_of={})
    if has_own_sets:  # of two clients; that of the third is drawn
        a, b, _ = federation.ids
        near, far = task.tests.values()
        own = Data.of(near.x.clone(), near.y.clone()).rows(torch.arange(4, 11))
        task = replace(task, local_tests={a: own, b: far.rows(torch.tensor([7, 2, 3]))})
    federation = replace(federation, task=task, _tests={})
    state = after(federation)
    found = evaluate(federation, state)
    expected = {}
    for client in federation.ids:
        tests = federation.test_sets(client)
        data = tests.own if tests.own is not None else tests.pooled.rows(tests.own_rows)  # type: ignore[union-attr]
        expected[client] = share_right(federation, state, client, data)
    assert {client: scores["accuracy"] for client, scores in found.at_home.items()} == pytest.approx(expected)
    assert found.summary["own"] == pytest.approx(sum(expected.values()) / 3)
    assert 0 < found.summary["own_local_index"] <= 1


def test_fine_tuning_before_the_test_changes_what_is_judged_and_nothing_else() -> None:
    federation = small_experiment("fedavg").federation
    tuned = replace(federation, fine_tune=3)
    state, same = after(federation), after(tuned)
    assert all(map(torch.equal, state.server.params.values(), same.server.params.values()))
    plain, found = evaluate(federation, state), evaluate(tuned, same)
    assert (plain.models, found.models) == ("public model", "own models")
    assert found.summary["own"] > plain.summary["own"]
    assert found.public == plain.public
    again = evaluate(tuned, same)
    assert again.at_home == found.at_home


@pytest.mark.parametrize("name", ["fedavg", "fedproto", "fedseproto", "pfedcspc", "fedper"])
def test_any_method_can_be_fine_tuned_before_the_test_wherever_its_clients_are(name: str) -> None:
    near = replace(small_experiment(name).federation, fine_tune=1)
    far = replace(near, runtime=Elsewhere())
    here, there = (evaluate(f, after(f, 2)) for f in (near, far))
    assert here.at_home == there.at_home
    assert here.models == "own models"


def test_a_client_that_never_took_part_uses_the_public_model_with_ditto() -> None:
    federation = small_experiment("ditto").federation
    state = after(federation)
    absent = replace(state, receipts={c: r for c, r in state.receipts.items() if c != federation.ids[0]})
    message = federation.method.message_for(state.server, federation.ids[0])
    memory = federation.client_state(absent, federation.ids[0], message)
    weights = federation.method.local_weights(message, memory)
    assert all(torch.equal(weights[name], leaf) for name, leaf in state.server.params.items())
