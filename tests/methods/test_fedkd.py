"""FedKD: three rounds against a plain reference, mutual distillation and thinned updates on numbers."""

from collections.abc import Callable
from math import log

import pytest
import torch
from torch import nn

from methods.conformance import (
    CHECKS,
    after,
    assert_same,
    batch_of,
    federation,
    fingerprint,
    memories,
    reply_of,
    small_network,
    usual,
)
from protofed.api.method import Method
from protofed.methods.fedkd import FedKD, divergence, moved, thinned
from protofed.nn.networks import Networks
from references import fedkd
from references.plain import largest_difference

METHOD = FedKD()


@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: Callable[[Method], None]) -> None:
    check(FedKD(first_energy=1.0, last_energy=0.5))


def test_three_rounds_are_those_of_a_plain_reference() -> None:
    """The largest difference of a weight was 1.8e-7."""
    method = FedKD(first_energy=0.7, last_energy=0.9)
    of = federation(method)
    initial = of.server_context(0, "round").initial_params()
    mentee, kept = fedkd.rounds(small_network, initial, 3, (0.7, 0.9), 0.1)
    state = after(3, of)
    assert largest_difference(state.server.params, mentee) < 1e-5
    for client, memory in memories(state).items():
        assert largest_difference(memory.params, kept[client]) < 1e-5


# ---- on numbers


@pytest.mark.parametrize(("least", "denominator"), [(0.1, log(8)), (10.0, 10.0)])
def test_the_objective_on_numbers(least: float, denominator: float) -> None:
    def parts() -> dict[str, nn.Module]:
        linear = [nn.Linear(2, 2, bias=False) for _ in range(3)]
        names = ("classifier", "mentee_classifier", "adapter")
        return {"features": nn.Identity(), "mentee_features": nn.Identity(), **dict(zip(names, linear, strict=True))}

    weights = {
        "classifier.weight": torch.zeros(2, 2),  # the mentor says ½ and ½
        "mentee_classifier.weight": torch.tensor([[0.0, 0.0], [log(3), 0.0]]),  # the mentee says ¼ and ¾
        "adapter.weight": torch.tensor([[3.0, 0.0], [0.0, 0.0]]),  # its features (1, 0) become (3, 0)
    }
    model = Networks(parts).model(weights, training=True)
    found = FedKD(least_loss=least).loss(model, batch_of([[1.0, 0.0]], [0]), None, None)
    # The cross-entropies are log 2 and log 4, log 8 together. The divergences of (½, ½) from (¼, ¾) and back are
    # ¼ log ½ + ¾ log 3/2 and ½ log 2 + ½ log ⅔. The mean squared distance is 4/2, and counts for both.
    divergences = 0.25 * log(0.5) + 0.75 * log(1.5) + 0.5 * log(2) + 0.5 * log(2 / 3)
    assert found.item() == pytest.approx(log(8) + (divergences + 2 * 2) / denominator, abs=1e-5)


def test_a_divergence_is_from_the_teacher() -> None:
    scores, teacher = torch.tensor([[0.0, 0.0]]), torch.tensor([[log(3), 0.0]])
    # ¾ log(¾ / ½) + ¼ log(¼ / ½)
    assert divergence(scores, teacher).item() == pytest.approx(0.75 * log(1.5) - 0.25 * log(2), abs=1e-6)
    assert divergence(teacher, teacher).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("energy", "diagonal"),
    # Singular values 4, 2, 1: squares 16, 4, 1 of 21. One value has 0.762 of them, two have 0.952.
    [(0.76, [4, 0, 0]), (0.77, [4, 0, 2]), (0.95, [4, 0, 2]), (0.96, [4, 1, 2]), (1.0, [4, 1, 2])],
)
def test_the_fewest_singular_values_that_have_the_energy_are_kept(energy: float, diagonal: list[float]) -> None:
    update = torch.diag(torch.tensor([4.0, -1.0, 2.0]))
    expected = torch.diag(torch.tensor(diagonal) * torch.tensor([1.0, -1.0, 1.0]))
    torch.testing.assert_close(thinned(update, energy), expected, rtol=0, atol=1e-6)


def test_kernels_are_one_matrix() -> None:
    rows = torch.tensor([[1.0, 2.0, 0.0, 1.0], [2.0, 4.0, 0.0, 2.0]])  # rank 1
    noise = torch.tensor([[0.0, 0.0, 1e-3, 0.0], [0.0, 0.0, 0.0, 0.0]])
    found = thinned((rows + noise).view(2, 1, 2, 2), 0.99)
    assert found.shape == (2, 1, 2, 2)
    assert torch.linalg.matrix_rank(found.flatten(1), rtol=1e-5) == 1
    torch.testing.assert_close(found.flatten(1), rows, rtol=0, atol=2e-3)


def test_an_update_of_zeros_stays() -> None:
    assert thinned(torch.zeros(3, 2), 0.95).tolist() == torch.zeros(3, 2).tolist()


def test_weights_move_by_the_thinned_update_and_the_rest_is_at_its_end() -> None:
    start = {"w": torch.eye(2), "bias": torch.zeros(2), "mean": torch.zeros(2)}
    end = {"w": torch.eye(2) + torch.diag(torch.tensor([3.0, 0.1])), "bias": torch.ones(2), "mean": torch.ones(2)}
    found = moved(start, end, ("w", "bias"), 0.9)
    torch.testing.assert_close(found["w"], torch.diag(torch.tensor([4.0, 1.0])))
    assert found["bias"].tolist() == found["mean"].tolist() == [1.0, 1.0]


def test_the_energy_of_a_round() -> None:
    found = [FedKD(first_energy=0.8, last_energy=0.9).energy(t, 4) for t in range(4)]
    assert found == pytest.approx([0.825, 0.85, 0.875, 0.9])


# ---- the step


def test_the_mentee_is_sent_and_mentor_and_map_stay() -> None:
    reply = reply_of(federation(METHOD), usual(METHOD, 1), "ann")
    assert {name.partition(".")[0] for name in reply.upload.params} == {"mentee_features", "mentee_classifier"}
    assert {name.partition(".")[0] for name in reply.memory.params} == {"features", "classifier", "adapter"}


def test_what_is_sent_is_thinned() -> None:
    method = FedKD(first_energy=0.3, last_energy=0.3)
    state = usual(method, 1)
    upload = reply_of(federation(method), state, "ann").upload
    update = upload.params["mentee_classifier.weight"] - state.server.params["mentee_classifier.weight"]
    values = torch.linalg.svdvals(update.double())
    assert values[1] < 1e-5 * values[0]


def test_mentor_and_mentee_begin_apart() -> None:
    initial = federation(METHOD).server_context(0, "round").initial_params()
    assert fingerprint(initial["mentee_classifier.weight"]) != fingerprint(initial["classifier.weight"])


def test_a_client_uses_its_mentor() -> None:
    state, of = usual(METHOD, 1), federation(METHOD)
    memory = state.memories["ann"]
    weights = METHOD.local_weights(state.server, memory)
    assert_same({n: weights[n] for n in memory.params}, memory.params, "the mentor")
    x = torch.zeros(1, 3, 8, 8)
    model = of.networks_of("ann").model(weights)
    expected = model.classifier(model.features(x))
    assert_same(METHOD.predict(model, x, state.server, memory), expected, "what it says")
