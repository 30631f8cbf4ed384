"""GPFL: three rounds against a plain reference, and every term of the objective on numbers."""

from collections.abc import Callable
from math import exp, log, sqrt

import pytest
import torch
from torch import Tensor, nn

from methods.conformance import (
    CHECKS,
    TASK,
    after,
    batch_of,
    federation,
    fingerprint,
    memories,
    reply_of,
    small_network,
    usual,
)
from protofed.api.method import Method
from protofed.methods.families import Weights
from protofed.methods.gpfl import GPFL, ConditionalValve, OwnHead, cosines
from protofed.nn.networks import Model, Networks
from references import gpfl
from references.plain import largest_difference

METHOD = GPFL()
TEST = TASK.transform.clean(TASK.tests["domain 0"].x)


@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: Callable[[Method], None]) -> None:
    check(GPFL(guidance_weight=0.0, decay=0.0))


def test_three_rounds_are_those_of_a_plain_reference() -> None:
    """The largest difference of a weight was 2.4e-7."""
    method = GPFL(guidance_weight=0.5, decay=0.2)
    of = federation(method)
    initial = of.server_context(0, "round").initial_params()
    shared, heads = gpfl.rounds(small_network(), initial, 3, 0.5, 0.2)
    state = after(3, of)
    assert largest_difference(state.server.params, shared) < 1e-5
    for client, memory in memories(state).items():
        assert largest_difference(memory.params, heads[client]) < 1e-5
        model = of.networks_of(client).model(method.local_weights(state.server, memory))
        expected = gpfl.scores(small_network(), shared, heads[client], client, TEST)
        torch.testing.assert_close(method.predict(model, TEST, state.server, memory), expected, rtol=0, atol=1e-4)


# ---- on numbers


class Pass(nn.Module):
    """A valve that adds its condition."""

    def forward(self, z: Tensor, condition: Tensor) -> Tensor:
        return z + condition


def model_of(embeddings: list[list[float]], classifier: list[list[float]]) -> Model:
    def parts() -> dict[str, nn.Module]:
        return {
            "features": nn.Identity(),
            "classifier": nn.Linear(2, 2, bias=False),
            "valve": Pass(),
            "categories": nn.Embedding(2, 2),
        }

    weights = {"classifier.weight": torch.tensor(classifier), "categories.weight": torch.tensor(embeddings)}
    return Networks(parts).model(weights, training=True)


ZERO = [[0.0, 0.0], [0.0, 0.0]]
AXES = [[1.0, 0.0], [0.0, 1.0]]
ONE_ROW = batch_of([[0.0, 0.0]], [0])


def loss_of(received: list[list[float]], share: list[float], model: Model, lam: float = 0.0, mu: float = 0.0) -> float:
    memory = OwnHead({}, torch.tensor(share))
    message = Weights({"categories.weight": torch.tensor(received)})
    return GPFL(guidance_weight=lam, decay=mu).loss(model, ONE_ROW, message, memory).item()


def test_own_features_are_conditioned_by_the_clients_classes() -> None:
    # The condition is ¾ (4, 0) + ¼ (0, 4) = (3, 1), so that scores of classes are 3 and 1. The shared features are
    # (2, 2); both embeddings have cosine √½ with them, so that the angle's term is log 2.
    found = loss_of([[4.0, 0.0], [0.0, 4.0]], [0.75, 0.25], model_of(AXES, AXES))
    assert found == pytest.approx(log(1 + exp(-2)) + log(2), abs=1e-6)


def test_shared_features_are_guided_by_angle_and_distance() -> None:
    # Received are (6, 0) and (0, 0): the generic condition is (3, 0). Its cosines with the trained embeddings are 1 and
    # 0; its distance from (6, 0) is 3. All scores of classes are 0.
    found = loss_of([[6.0, 0.0], [0.0, 0.0]], [1.0, 0.0], model_of(AXES, ZERO), lam=0.1)
    assert found == pytest.approx(log(2) + log(1 + exp(-1)) + 0.3, abs=1e-6)


def test_embeddings_are_kept_short() -> None:
    # Received are zeros: so are all features, cosines and scores. Half of 0.2 times the squared length 2.
    assert loss_of(ZERO, [1.0, 0.0], model_of(AXES, ZERO), mu=0.2) == pytest.approx(2 * log(2) + 0.2, abs=1e-6)


def test_the_valve_on_numbers() -> None:
    valve = ConditionalValve(2)
    with torch.no_grad():
        for name, leaf in valve.named_parameters():
            leaf.copy_(torch.eye(2) if name.endswith("0.weight") else torch.ones(2) * ("2.weight" in name))
    # The layer gives (3, 1), ReLU leaves it, LayerNorm makes (1, −1) of it: γ = β = (1, −1), but for LayerNorm's ε.
    # ReLU((2, 0) · (5, 7) + (1, −1)) = (11, 0).
    found = valve(torch.tensor([[5.0, 7.0]]), torch.tensor([3.0, 1.0]))
    torch.testing.assert_close(found, torch.tensor([[11.0, 0.0]]), rtol=0, atol=1e-3)


def test_cosines_on_numbers() -> None:
    found = cosines(torch.tensor([[3.0, 3.0]]), torch.tensor([[5.0, 0.0], [-1.0, -1.0], [0.0, 0.0]]))
    assert found[0].tolist() == pytest.approx([sqrt(0.5), -1.0, 0.0], abs=1e-6)


# ---- the step


def test_the_classifier_stays_and_the_rest_is_sent() -> None:
    reply = reply_of(federation(METHOD), usual(METHOD, 1), "ann")
    assert {name.partition(".")[0] for name in reply.memory.params} == {"classifier"}
    assert {name.partition(".")[0] for name in reply.upload.params} == {"features", "valve", "categories"}
    counts = torch.tensor([TASK.clients["ann"].labels.tolist().count(c) for c in range(4)])
    torch.testing.assert_close(reply.memory.share, counts / 11)
    assert fingerprint(reply.memory.params) != fingerprint(usual(METHOD, 1).memories["ann"].params)
