"""FedEM: three rounds against a plain reference, both steps on numbers, and FedAvg as a mixture of one."""

from collections.abc import Callable
from math import log

import pytest
import torch
from torch import Tensor

from methods.conformance import (
    CHECKS,
    TASK,
    after,
    assert_close,
    assert_same,
    federation,
    fingerprint,
    mean_cross_entropy,
    reply_of,
    small_network,
    trained_by_hand,
    usual,
)
from protofed.api.method import Method
from protofed.data.batches import Batch, Data
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedem import FedEM, Mixture, places, responsibilities
from protofed.nn.networks import Networks
from protofed.tree import Params
from references import fedem
from references.plain import largest_difference

METHOD = FedEM()
TEST = TASK.transform.clean(TASK.tests["domain 0"].x)


@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: Callable[[Method], None]) -> None:
    check(FedEM(num_components=2))


def component(params: Params, m: int) -> Params:
    """The weights of one component, under the names of the task's network."""
    parts = {part: f"{part}_{m}" if m else part for part in ("features", "classifier")}
    return {
        f"{part}.{name.partition('.')[2]}": leaf
        for part, own in parts.items()
        for name, leaf in params.items()
        if name.partition(".")[0] == own
    }


def test_three_rounds_are_those_of_a_plain_reference() -> None:
    """The largest difference of a weight was 1.2e-7, of π 6e-8, of a score 2.4e-7."""
    of = federation(METHOD)
    start = of.start().server.params
    expected, pi = fedem.rounds(small_network(), [component(start, m) for m in range(3)], 3)
    state = after(3, of)
    for m in range(3):
        assert largest_difference(component(state.server.params, m), expected[m]) < 5e-6
    for client, weights in pi.items():
        memory = state.memories[client]
        torch.testing.assert_close(memory.weight, torch.tensor(weights), rtol=0, atol=5e-6)
        model = of.networks_of(client).model(state.server.params)
        found = METHOD.predict(model, TEST, state.server, memory)
        torch.testing.assert_close(found, fedem.prediction(small_network(), expected, weights, TEST), rtol=0, atol=5e-5)
    assert (
        max(abs(weight - 1 / 3) for weights in pi.values() for weight in weights) > 0.01
    )  # or the E-step does nothing


# ---- on numbers


def test_the_e_step_on_numbers() -> None:
    # Prior ¼ and ¾; likelihoods ½ and ½, and ½ and 1/6: shares 1 : 3, and 1/8 : 1/8.
    losses = torch.tensor([[log(2), log(2)], [log(2), log(6)]])
    found = responsibilities(losses, torch.tensor([0.25, 0.75]))
    torch.testing.assert_close(found, torch.tensor([[0.25, 0.75], [0.5, 0.5]]))
    # A component that has lost all weight stays without.
    assert responsibilities(losses, torch.tensor([0.0, 1.0])).tolist() == [[0.0, 1.0], [0.0, 1.0]]


def pair(first: Tensor, second: Tensor) -> tuple[Networks, Params]:
    """Two components whose features are their inputs and whose classifiers are these matrices."""
    identity, linear = torch.nn.Identity, lambda: torch.nn.Linear(2, 2, bias=False)
    networks = Networks(
        lambda: {"features": identity(), "classifier": linear(), "features_1": identity(), "classifier_1": linear()}
    )
    return networks, {"classifier.weight": first, "classifier_1.weight": second}


def test_the_m_step_weighs_examples_by_their_place_in_the_data() -> None:
    networks, params = pair(torch.zeros(2, 2), torch.tensor([[log(3), 0.0], [0.0, 0.0]]))
    x, method = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), FedEM(num_components=2)
    # Of a store of four rows the client has 3 and 1, in this order; the batch has them the other way round.
    data = Data(torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64), torch.tensor([3, 1]))
    batch = Batch(x, torch.tensor([0, 1]), torch.ones(2), torch.tensor([1, 3]), torch.tensor(True), torch.tensor(0))
    weights = torch.tensor([[0.1, 0.9], [0.6, 0.4]])  # of the client's first and second example
    found = method.weighted_loss(networks.model(params), batch, weights, places(data))
    # The first row of the batch is the second example: 0.6 log 2 − 0.4 log ¾. The other: 0.1 log 2 − 0.9 log ¼.
    expected = (0.6 * log(2) - 0.4 * log(0.75) + 0.1 * log(2) - 0.9 * log(0.25)) / 2
    assert found.item() == pytest.approx(expected, abs=1e-6)


def test_a_prediction_mixes_probabilities() -> None:
    networks, params = pair(torch.zeros(2, 2), torch.tensor([[log(3), 0.0], [0.0, 0.0]]))
    x, method = torch.tensor([[1.0, 0.0]]), FedEM(num_components=2)
    # The components say ½ and ¾.
    found = method.predict(networks.model(params), x, None, Mixture(torch.tensor([0.8, 0.2])))
    assert found.exp()[0].tolist() == pytest.approx([0.8 * 0.5 + 0.2 * 0.75, 0.8 * 0.5 + 0.2 * 0.25])
    equal = method.predict(networks.model(params), x, None, None).softmax(-1)
    assert equal[0, 0].item() == pytest.approx(0.625)


def test_a_components_loss_moves_that_component_alone() -> None:
    networks, params = pair(torch.zeros(2, 2), torch.zeros(2, 2))
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    batch = Batch(
        torch.ones(1, 2), torch.tensor([0]), torch.ones(1), torch.tensor([0]), torch.tensor(True), torch.tensor(0)
    )
    method = FedEM(num_components=2)
    method.weighted_loss(networks.model(leaves), batch, torch.tensor([[0.0, 1.0]]), torch.tensor([0])).backward()
    assert leaves["classifier.weight"].grad is not None
    assert leaves["classifier_1.weight"].grad is not None
    assert leaves["classifier.weight"].grad.abs().max() == 0
    assert leaves["classifier_1.weight"].grad.abs().max() > 0


# ---- the step


def test_a_clients_weights_are_the_mean_of_its_examples() -> None:
    memory = reply_of(federation(METHOD), usual(METHOD, 1), "ann").memory
    assert memory.weight.sum().item() == pytest.approx(1, abs=1e-6)
    assert fingerprint(memory) != fingerprint(usual(METHOD, 1).memories["ann"])


def test_components_start_apart_and_the_first_from_the_common_weights() -> None:
    start = federation(METHOD).start().server.params
    assert_same(component(start, 0), federation(FedAvg()).start().server.params, "the first component")
    assert len({fingerprint(component(start, m)["classifier.weight"])[""] for m in range(3)}) == 3


def test_a_mixture_of_one_trains_as_fedavg_does() -> None:
    """On the batches of the client's second request, since the first is the E-step."""
    one = FedEM(num_components=1)
    state = usual(one, 1)
    reply = reply_of(federation(one), state, "ann")
    expected, _ = trained_by_hand(state.server.params, "ann", mean_cross_entropy, round=1, fit=1)
    assert_close(reply.upload.params, expected, "what ann trained", within=1e-5)
    assert reply.memory.weight.tolist() == [1.0]
