"""Accuracy per domain: whose model, and which mean."""

from dataclasses import replace

import pytest
import torch

from protofed.engine.federation import Federation
from protofed.engine.state import State
from protofed.evaluation.evaluate import evaluate
from run_doubles import small_experiment


def counted(federation: Federation, state: State, client: str, domain: str) -> float:
    """The share of a test set that a client's model gets right, counted one example at a time."""
    method, data = federation.method, federation.task.tests[domain]
    message = method.message_for(state.server, client)
    model = federation.networks_of(client).model(
        method.local_weights(message, federation.client_state(state, client, message))
    )
    with torch.no_grad():
        hits = [int(model.logits(data.x[i : i + 1]).argmax()) == int(data.y[i]) for i in data.index.tolist()]
    return sum(hits) / len(hits)


@pytest.fixture(params=["fedavg", "local"])
def trained(request: pytest.FixtureRequest) -> tuple[Federation, State]:
    federation = small_experiment(request.param).federation
    state = federation.start()
    for _ in range(3):
        state = federation.advance(state)
    return federation, state


def test_a_public_model_is_judged_as_it_is_and_own_models_by_their_mean(trained: tuple[Federation, State]) -> None:
    federation, state = trained
    scores = evaluate(federation, state)
    clients = federation.ids
    for domain in federation.task.tests:
        own = [counted(federation, state, client, domain) for client in clients]
        assert scores.domains[domain]["accuracy"] == pytest.approx(sum(own) / len(own))
    is_public = federation.method.public(state.server) is not None
    assert scores.models == ("public model" if is_public else "own models")
    assert scores.summary["average"] == pytest.approx(sum(own["accuracy"] for own in scores.domains.values()) / 2)


def test_the_own_domain_is_what_each_client_sees_at_home(trained: tuple[Federation, State]) -> None:
    federation, state = trained
    homes = [counted(federation, state, client, domain) for client, domain in federation.task.domain_of.items()]
    assert evaluate(federation, state).summary["own"] == pytest.approx(sum(homes) / len(homes))


def test_all_test_sets_together_count_by_their_sizes(trained: tuple[Federation, State]) -> None:
    federation, state = trained
    tests = federation.task.tests
    uneven = {"low": tests["low"].rows(torch.arange(6)), "high": tests["high"]}  # 6 and 30 examples
    scores = evaluate(replace(federation, task=replace(federation.task, tests=uneven)), state)
    if scores.models == "public model":
        low, high = scores.domains["low"]["accuracy"], scores.domains["high"]["accuracy"]
        assert scores.public["accuracy"] == pytest.approx((6 * low + 30 * high) / 36)
    else:
        assert not scores.public


def test_a_client_that_never_took_part_is_judged_by_its_first_weights() -> None:
    experiment = small_experiment("local")
    scores = evaluate(experiment.federation, experiment.federation.start())
    assert 0 <= scores.summary["average"] <= 1
