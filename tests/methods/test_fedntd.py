"""FedNTD: the divergence over not-true classes, the teacher, and FedAvg when its weight is 0."""

from math import log
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from methods.conformance import (
    CHECKS,
    TASK,
    assert_close,
    assert_same,
    batch_of,
    federation,
    fingerprint,
    identity_model,
    loaded,
    mean_cross_entropy,
    reply_of,
    trained_by_hand,
    usual,
)
from protofed.data.batches import Batch
from protofed.methods.families import Weights
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedntd import FedNTD, not_true_divergence
from protofed.nn.networks import Networks, Parts
from protofed.tree import Nothing

SETTINGS = {"default": FedNTD(), "off": FedNTD(distillation_weight=0.0), "warm": FedNTD(temperature=3.0)}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Any, setting: str) -> None:
    check(SETTINGS[setting])


# ---- the divergence


def test_the_divergence_is_over_the_not_true_classes_from_the_teacher_to_the_student() -> None:
    # The example is of class 1. Of classes 0 and 2 the teacher thinks e^log 3 : 1 = 3/4, 1/4, the student 1/2, 1/2.
    # KL(teacher ‖ student) = 3/4 log(3/2) + 1/4 log(1/2); the other way round it would be 1/2 log(2/3) + 1/2 log 2.
    teacher, student = torch.tensor([[log(3), 50.0, 0.0]]), torch.tensor([[2.0, -7.0, 2.0]])
    found = not_true_divergence(student, teacher, torch.tensor([1]), 1.0)
    assert found.item() == pytest.approx(0.75 * log(1.5) + 0.25 * log(0.5), abs=1e-6)


def test_scores_are_divided_by_the_temperature_and_the_divergence_is_scaled_by_its_square() -> None:
    # At τ = 2 scores of 2 log 3 and 0 are 3/4 and 1/4 again, and the divergence counts 4 times.
    teacher, student = torch.tensor([[2 * log(3), 50.0, 0.0]]), torch.tensor([[2.0, -7.0, 2.0]])
    found = not_true_divergence(student, teacher, torch.tensor([1]), 2.0)
    assert found.item() == pytest.approx(4 * (0.75 * log(1.5) + 0.25 * log(0.5)), abs=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_it_equals_a_slow_reference_that_removes_the_true_class(temperature: float) -> None:
    draws = torch.Generator().manual_seed(0)
    scores, teacher = torch.randn(9, 5, generator=draws), 3 * torch.randn(9, 5, generator=draws)
    y = torch.randint(0, 5, (9,), generator=draws)
    for i, found in enumerate(not_true_divergence(scores, teacher, y, temperature)):
        others = [c for c in range(5) if c != y[i]]
        q, p = (torch.softmax(t[i, others].double() / temperature, -1) for t in (scores, teacher))
        expected = temperature**2 * (p * (p / q).log()).sum()
        assert found.item() == pytest.approx(expected.item(), abs=1e-5)


def test_extreme_scores_and_two_classes_give_finite_values_and_gradients() -> None:
    scores = torch.tensor([[500.0, -500.0, 0.0], [1.0, 2.0, 3.0]], requires_grad=True)
    teacher = torch.tensor([[-500.0, 0.0, 500.0], [3.0, 1.0, 0.0]])
    found = not_true_divergence(scores, teacher, torch.tensor([0, 2]), 1.0)
    found.sum().backward()
    assert torch.isfinite(found).all()
    assert torch.isfinite(scores.grad).all()
    assert scores.grad[0, 0] == 0  # the true class is out of it
    assert scores.grad[1, 2] == 0
    # Of two classes only one is not true, and both models are sure of it.
    assert (
        not_true_divergence(torch.rand(4, 2), torch.rand(4, 2), torch.tensor([0, 1, 0, 1]), 1.0).tolist() == [0.0] * 4
    )


# ---- the objective


def test_filled_rows_do_not_count_and_the_weight_is_that_of_the_distillation() -> None:
    batch = batch_of([[0.0, 0.0], [1.0, 9.0]], [1, 0], [1.0, 0.0])
    received = torch.tensor([[0.0, 1.0], [4.0, 4.0], [0.0, 0.0]])
    found = FedNTD(distillation_weight=2.0).loss(
        identity_model([[0.0, 0.0]] * 3), batch, Weights({"classifier.weight": received}), Nothing()
    )
    # The only row that counts is zero: all scores of both models are 0, cross-entropy log 3, no divergence.
    assert found.item() == pytest.approx(log(3), abs=1e-6)
    batch = batch_of([[0.0, log(3)], [1.0, 9.0]], [1, 0], [1.0, 0.0])
    found = FedNTD(distillation_weight=2.0).loss(
        identity_model([[0.0, 0.0]] * 3), batch, Weights({"classifier.weight": received}), Nothing()
    )
    # The teacher's not-true scores are log 3 and 0, the student's 0 and 0.
    assert found.item() == pytest.approx(log(3) + 2 * (0.75 * log(1.5) + 0.25 * log(0.5)), abs=1e-6)


def networks() -> Networks:
    return federation(FedNTD()).networks_of("ann")


def test_no_gradient_reaches_the_teacher_and_its_statistics_stay() -> None:
    own, received = networks().init(0), networks().init(1)
    data = TASK.clients["ann"]
    batch = batch_of(TASK.transform.clean(data.x), data.y)
    before = fingerprint(received)
    teacher = [leaf.requires_grad_() for leaf in received.values()]
    weight = own["features.0.weight"].requires_grad_()
    loss = FedNTD().loss(networks().model(own, training=True), batch, Weights(received), Nothing())
    gradients = torch.autograd.grad(loss, [weight, *teacher], allow_unused=True)
    assert gradients[0].abs().sum() > 0
    assert all(gradient is None for gradient in gradients[1:])
    assert fingerprint(received) == before


def test_a_client_distils_from_the_weights_of_this_round_in_evaluation_mode() -> None:
    method = FedNTD(distillation_weight=0.5, temperature=2.0)
    state = usual(method, 1)
    teacher = loaded(state.server.params, training=False)

    def loss(parts: Parts, z: Tensor, batch: Batch) -> Tensor:
        rows = batch.weight > 0
        with torch.no_grad():
            target = teacher["classifier"](teacher["features"](batch.x))[rows]
        hidden = F.one_hot(batch.y[rows], target.shape[-1]).bool()
        q, p = (t[~hidden].view(len(t), -1).div(2.0).log_softmax(-1) for t in (parts["classifier"](z)[rows], target))
        divergence = F.kl_div(q, p, log_target=True, reduction="batchmean")
        return mean_cross_entropy(parts, z, batch) + 0.5 * 4.0 * divergence

    expected, _ = trained_by_hand(state.server.params, "ann", loss, round=1)
    assert_close(reply_of(federation(method), state, "ann").upload.params, expected, "ann", within=1e-5)


# ---- identities


def test_without_its_distillation_it_is_fedavg() -> None:
    off = FedNTD(distillation_weight=0.0)
    assert_same(usual(off, 3).server, usual(FedAvg(), 3).server, "weights after three rounds")


def test_the_distillation_changes_the_result_from_the_first_round_on() -> None:
    assert fingerprint(usual(FedNTD(), 1).server) != fingerprint(usual(FedAvg(), 1).server)
    assert fingerprint(usual(FedNTD(temperature=3.0), 1).server) != fingerprint(usual(FedNTD(), 1).server)
