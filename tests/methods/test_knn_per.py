"""kNN-Per: weights of FedAvg, neighbours on numbers and against a plain reference, and how λ is chosen."""

from collections.abc import Callable
from math import exp, log

import pytest
import torch

from methods.conformance import (
    CHECKS,
    SIZES,
    TASK,
    after,
    assert_same,
    batch_of,
    federation,
    identity_model,
    memories,
    small_network,
    usual,
)
from protofed.api.method import Method
from protofed.methods.knn_per import KnnPer, Memorised, best_mixing, neighbour_shares
from references import knn_per
from references.plain import largest_difference

METHOD, TUNED = KnnPer(neighbours=3), KnnPer(neighbours=3, validation=0.3, capacity=4)
TEST = TASK.transform.clean(TASK.tests["domain 0"].x)


@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: Callable[[Method], None]) -> None:
    check(TUNED)


def memorised(z: list[list[float]], label: list[int], mixing: float = 0.5) -> Memorised:
    return Memorised(torch.tensor(z), torch.tensor(label), torch.tensor(mixing))


# ---- against a plain reference


def test_three_rounds_and_what_clients_then_say_are_those_of_a_plain_reference() -> None:
    """The largest difference of a weight and of a probability was 1.2e-7."""
    method = KnnPer(neighbours=3, mixing_weight=0.7)
    of = federation(method)
    state = of.finish(after(3, of))
    params = knn_per.averaged(small_network(), of.start().server.params, 3)
    assert largest_difference(state.server.params, params) < 5e-6
    for client, memory in memories(state).items():
        expected = knn_per.probabilities(small_network(), params, client, TEST, k=3, mixing=0.7)
        model = of.networks_of(client).model(state.server.params)
        found = method.predict(model, TEST, state.server, memory).exp()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_clients_are_judged_by_what_they_would_say_after_remembering() -> None:
    method = KnnPer(neighbours=3, mixing_weight=0.9)
    of, state = federation(method), usual(method, 2)
    params, labels = state.server.params, TASK.tests["domain 0"].labels
    for client, evaluation in of.evaluated(state).items():
        confusion = evaluation.confusion[0]
        said = knn_per.probabilities(small_network(), params, client, TEST, k=3, mixing=0.9).argmax(-1)
        expected = torch.zeros(4, 4, dtype=confusion.dtype)
        for label, answer in zip(labels.tolist(), said.tolist(), strict=True):
            expected[label, answer] += 1
        assert confusion.tolist() == expected.tolist()


# ---- on numbers


def test_neighbours_count_by_their_distance() -> None:
    memory = memorised([[0.0, 0.0], [0.0, 2.0], [4.0, 0.0], [9.0, 9.0]], [1, 0, 1, 2])
    # Squared distances from (0, 0) are 0, 4, 16, 162; over 2 dimensions and a scale of 2 they are 0, 1, 4.
    found = neighbour_shares(torch.zeros(1, 2), memory, 3, 2.0, 3)[0]
    total = 1 + exp(-1) + exp(-4)
    torch.testing.assert_close(found, torch.tensor([exp(-1), 1 + exp(-4), 0.0]) / total)
    # The nearest alone decides.
    assert neighbour_shares(torch.zeros(1, 2), memory, 1, 2.0, 3)[0].tolist() == [0.0, 1.0, 0.0]


def test_neighbours_that_are_far_away_still_sum_to_one() -> None:
    memory = memorised([[1e4, 0.0], [0.0, 1e4]], [0, 1])
    assert neighbour_shares(torch.zeros(1, 2), memory, 2, 1e-3, 2).tolist() == [[0.5, 0.5]]


def test_rows_of_fill_are_nobodys_neighbours() -> None:
    memory = memorised([[3.0, 0.0], [0.0, 0.0], [0.0, 0.0]], [0, -1, -1])
    assert neighbour_shares(torch.zeros(1, 2), memory, 3, 1.0, 2).tolist() == [[1.0, 0.0]]


def test_the_prediction_mixes_probabilities() -> None:
    model, method = identity_model([[1.0, 0.0], [0.0, 1.0]]), KnnPer(neighbours=1)
    x = torch.tensor([[log(3), 0.0]])  # the network says 3/4 and 1/4
    found = method.predict(model, x, None, memorised([[0.0, 0.0]], [1], mixing=0.2)).exp()
    torch.testing.assert_close(found, torch.tensor([[0.8 * 0.75, 0.8 * 0.25 + 0.2]]))
    assert torch.equal(method.predict(model, x, None, None), x)
    # Who remembers nothing says what the network says.
    nothing = method.predict(model, x, None, memorised([[0.0, 0.0]], [-1])).exp()
    torch.testing.assert_close(nothing, torch.tensor([[0.75, 0.25]]))


def test_fine_tuning_descends_the_networks_cross_entropy() -> None:
    model, batch = identity_model([[1.0, 0.0], [0.0, 1.0]]), batch_of([[log(3), 0.0]], [1])
    memory = memorised([[0.0, 0.0]], [1])
    assert METHOD.prediction_loss(model, batch, None, memory).item() == pytest.approx(-log(0.25), abs=1e-6)


@pytest.mark.parametrize(
    ("local", "shared", "expected"),
    [
        ([[0.6, 0.4]], [[0.0, 1.0]], 0.9),  # 0.6 λ > 0.4 λ + 1 − λ holds from λ above 5/6 on
        ([[0.0, 1.0]], [[1.0, 0.0]], 0.0),  # the network is right
        ([[1.0, 0.0]], [[1.0, 0.0]], 0.0),  # both are: the lowest λ
    ],
)
def test_the_best_share_is_the_lowest_of_the_highest_accuracy(
    local: list[list[float]], shared: list[list[float]], expected: float
) -> None:
    found = best_mixing(torch.tensor(local), torch.tensor(shared), torch.tensor([0]))
    assert found.item() == pytest.approx(expected)


# ---- what is remembered


def test_clients_remember_under_the_last_global_model() -> None:
    of = federation(METHOD)
    last = after(2, of)
    state = of.finish(last)
    assert_same(state.server, last.server, "the server")
    for client, memory in memories(state).items():
        assert memory.label.tolist() == TASK.clients[client].labels.tolist()
        model = of.networks_of(client).model(state.server.params)
        x = TASK.transform.clean(TASK.clients[client].x[TASK.clients[client].index])
        torch.testing.assert_close(memory.z, model.features(x), rtol=0, atol=1e-6)


def test_held_out_examples_are_neither_trained_on_nor_remembered() -> None:
    of = federation(TUNED)
    state = of.finish(after(2, of))
    context = of.client_context("ann", 2)
    training, held = TUNED.split(context)
    assert sorted([*training.index.tolist(), *held.index.tolist()]) == TASK.clients["ann"].index.tolist()
    assert 3 <= len(held) <= 4  # 0.3 · 11
    memory = memories(state)["ann"]
    assert len(memory.label) == 4  # the capacity
    tenths = [k / 10 for k in range(11)]
    assert min(abs(memory.mixing.item() - share) for share in tenths) < 1e-6
    whole_data = KnnPer(neighbours=3, capacity=4)
    assert len(memories(federation(whole_data).finish(usual(whole_data, 1)))["ann"].label) == 4
    assert len(training) < SIZES["ann"]
