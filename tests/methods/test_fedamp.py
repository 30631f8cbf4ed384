"""FedAMP: the attention by hand, and three rounds against a plain torch loop."""

from collections.abc import Callable
from math import exp

import pytest
import torch

from methods.conformance import CHECKS, SIZES, TASK, after, assert_close, federation, scripted, small_task, usual
from protofed.api.method import Method
from protofed.methods.fedamp import FedAMP, by_cosine, by_distance, inner_products
from protofed.methods.local import LocalOnly
from references import fedamp
from references.plain import SGD, counted_batches, largest_difference, network

NEAR = FedAMP(scale=4.0, mixing_rate=0.5, proximal_weight=0.4)
HEURISTIC = FedAMP(attention="cosine", own_weight=0.3)


@pytest.mark.parametrize("method", [NEAR, HEURISTIC, FedAMP(scale=0.5)], ids=["FedAMP", "HeurFedAMP", "too much"])
def test_three_rounds_are_those_of_the_reference(method: FedAMP) -> None:
    """The largest difference of a weight is 0: all are equal."""
    own_weight = method.own_weight if method.attention == "cosine" else None
    expected, attention = fedamp.rounds(
        network(),
        sorted(SIZES),
        counted_batches,
        3,
        SGD,
        method.proximal_weight,
        method.mixing_rate,
        method.scale,
        own_weight,
    )
    found = usual(method, 3)
    for client, model in expected.items():
        assert largest_difference(found.server.models[client], model) < 5e-6
        assert largest_difference(found.memories[client].params, model) < 5e-6
    torch.testing.assert_close(
        found.server.attention, torch.tensor(attention, dtype=torch.float64), rtol=1e-4, atol=1e-6
    )


def test_attention_by_distance_by_hand() -> None:
    # Models 0, 1 and 3 in one dimension: squared distances 1, 9 and 4. With α = 0.5 and σ = 2: ¼ exp(−d/2).
    models = torch.tensor([[0.0], [1.0], [3.0]], dtype=torch.float64)
    near, far, middle = 0.25 * exp(-0.5), 0.25 * exp(-4.5), 0.25 * exp(-2)
    expected = [[1 - near - far, near, far], [near, 1 - near - middle, middle], [far, middle, 1 - far - middle]]
    torch.testing.assert_close(by_distance(models @ models.T, 2.0, 0.5), torch.tensor(expected, dtype=torch.float64))


def test_the_weights_of_others_are_at_most_1_together() -> None:
    # Three equal models with α / σ = 2 would have 4 of the others.
    found = by_distance(torch.ones(3, 3, dtype=torch.float64), 0.5, 1.0)
    torch.testing.assert_close(found, (1 - torch.eye(3, dtype=torch.float64)) / 2)


def test_attention_by_cosine_by_hand() -> None:
    # Cosines of (1, 0), (0, 2) and (3, 3): 0, √½ and √½. With σ = 1 the third has exp(√½) of exp(0) + exp(√½).
    models = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]], dtype=torch.float64)
    much = exp(0.5**0.5) / (1 + exp(0.5**0.5))
    found = by_cosine(models @ models.T, 1.0, 0.4)
    assert found[0].tolist() == pytest.approx([0.4, 0.6 * (1 - much), 0.6 * much])
    assert found[2].tolist() == pytest.approx([0.3, 0.3, 0.4])


def test_attention_reads_parameters_alone() -> None:
    models = [{"w": torch.tensor([1.0, 2.0]), "statistic": torch.tensor([50.0])}, {"w": torch.tensor([0.0, 3.0])}]
    assert inner_products(models, ("w",)).tolist() == [[5.0, 6.0], [6.0, 9.0]]


def test_a_client_that_is_far_from_all_others_and_is_not_held_learns_alone() -> None:
    alone = FedAMP(scale=1e-9, mixing_rate=1e-9, proximal_weight=0.0)
    expected = usual(LocalOnly(), 1).memories
    found = usual(alone, 1)
    for client in TASK.clients:
        assert_close(found.memories[client].params, expected[client].params, client, within=1e-6)


def test_who_did_not_take_part_is_represented_by_what_it_sent_last() -> None:
    present = [("ann", "bob"), ("ann", "cyd")]
    first = after(1, scripted(NEAR, present.__getitem__))
    second = after(2, scripted(NEAR, present.__getitem__))
    initial = usual(NEAR, 0).server.models
    assert torch.equal(
        second.server.models["bob"]["classifier.weight"], first.server.models["bob"]["classifier.weight"]
    )
    assert torch.equal(second.server.models["dan"]["classifier.weight"], initial["dan"]["classifier.weight"])
    assert not torch.equal(second.server.models["cyd"]["classifier.weight"], initial["cyd"]["classifier.weight"])


def test_a_client_that_the_server_does_not_know_is_sent_the_mean() -> None:
    state = usual(NEAR, 1).server
    mean = torch.stack([params["classifier.weight"] for params in state.models.values()]).mean(0)
    torch.testing.assert_close(NEAR.message_for(state, "new").params["classifier.weight"], mean)


@pytest.mark.parametrize("method", [NEAR, HEURISTIC], ids=["FedAMP", "HeurFedAMP"])
def test_a_client_that_is_alone_is_sent_its_own_model(method: FedAMP) -> None:
    of = federation(method, small_task({"ann": [0, 1, 2, 3, 3, 2]}))
    state = after(1, of)
    sent = method.message_for(state.server, "ann").params
    assert_close(sent, state.memories["ann"].params, "what it is sent", within=0.0)


@pytest.mark.parametrize("check", CHECKS)
def test_the_other_version_conforms(check: Callable[[Method], None]) -> None:
    check(HEURISTIC)
