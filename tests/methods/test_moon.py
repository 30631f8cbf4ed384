"""MOON: Eq. (3) and (4), and which model is the previous one."""

from math import exp, log

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from methods.conformance import (
    TASK,
    assert_close,
    assert_same,
    batch_of,
    federation,
    fingerprint,
    loaded,
    mean_cross_entropy,
    reply_of,
    scripted,
    trained_by_hand,
    usual,
)
from protofed.data.batches import Batch
from protofed.methods.families import Weights
from protofed.methods.fedavg import FedAvg
from protofed.methods.moon import Moon, Previous, model_contrast
from protofed.nn.networks import Networks, Parts

MOON = Moon(contrast_weight=5.0)


def networks() -> Networks:
    return federation(MOON).networks_of("ann")


def batch() -> Batch:
    data = TASK.clients["ann"]
    return batch_of(TASK.transform.clean(data.x), data.y)


@pytest.mark.parametrize(
    ("z", "z_global", "z_previous", "expected"),
    [
        # cos 1 to the global model and 0 to the previous: −log(e² / (e² + e⁰)) with τ = 0.5, = log(1 + e⁻²) = 0.1269
        ([1.0, 0.0], [2.0, 0.0], [0.0, 3.0], log(1 + exp(-2))),
        # (3, 4) · (4, 3) / 25 = 0.96 and (3, 4) · (−4, 3) / 25 = 0: log(1 + e^−1.92)
        ([3.0, 4.0], [4.0, 3.0], [-4.0, 3.0], log(1 + exp(-1.92))),
        # Like the previous model and unlike the global one costs much: cosines 0 and 1, log(1 + e²) = 2.1269
        ([0.0, 1.0], [1.0, 0.0], [0.0, 1.0], log(1 + exp(2))),
        # Equally near to both: log 2
        ([1.0, 1.0], [1.0, 0.0], [0.0, 1.0], log(2)),
    ],
)
def test_the_contrast_is_equation_3(z: list, z_global: list, z_previous: list, expected: float) -> None:
    found = model_contrast(torch.tensor([z]), torch.tensor([z_global]), torch.tensor([z_previous]), 0.5)
    assert found.item() == pytest.approx(expected, abs=1e-6)


def teacher_features(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Plain torch in evaluation mode."""
    with torch.no_grad():
        return loaded(params, training=False)["features"](x)


@pytest.mark.parametrize("exists", [0.0, 1.0])
def test_the_loss_is_equation_4_with_teachers_in_evaluation_mode(exists: float) -> None:
    own, received, previous = (networks().init(seed) for seed in range(3))
    message, memory = Weights(received), Previous(previous, torch.tensor(exists))
    before = fingerprint((message, memory))
    found = MOON.loss(networks().model({n: t.clone() for n, t in own.items()}, training=True), batch(), message, memory)
    parts = loaded(own, training=True)
    z = parts["features"](batch().x)
    to_global = F.cosine_similarity(z, teacher_features(received, batch().x)).double() / 0.5
    to_previous = F.cosine_similarity(z, teacher_features(previous, batch().x)).double() / 0.5
    contrast = -(to_global.exp() / (to_global.exp() + to_previous.exp())).log().mean()
    expected = F.cross_entropy(parts["classifier"](z), batch().y) + 5.0 * contrast * exists
    assert found.item() == pytest.approx(expected.item(), abs=1e-5)
    assert fingerprint((message, memory)) == before, "statistics of a teacher have moved"


def test_no_gradient_reaches_the_teachers() -> None:
    own, received, previous = (networks().init(seed) for seed in range(3))
    teachers = [leaf.requires_grad_() for params in (received, previous) for leaf in params.values()]
    weight = own["features.0.weight"].requires_grad_()
    memory = Previous(previous, torch.tensor(1.0))
    loss = MOON.loss(networks().model(own, training=True), batch(), Weights(received), memory)
    gradients = torch.autograd.grad(loss, [weight, *teachers], allow_unused=True)
    assert gradients[0].abs().sum() > 0
    assert all(gradient is None for gradient in gradients[1:])


def test_there_is_no_contrast_in_the_first_round_of_a_client_and_there_is_in_the_second() -> None:
    assert_same(usual(MOON, 1).server, usual(FedAvg(), 1).server, "the first round")
    assert fingerprint(usual(MOON, 2).server) != fingerprint(usual(FedAvg(), 2).server)


def test_the_first_round_is_the_clients_own_not_the_federations() -> None:
    """Ann joins in the second round, with bob, who trained in the first."""
    rounds = [("bob", "cyd"), ("ann", "bob")]
    of = scripted(MOON, rounds.__getitem__)
    state = of.advance(of.start())
    expected, _ = trained_by_hand(state.server.params, "ann", mean_cross_entropy, round=1)
    assert_close(reply_of(of, state, "ann").upload.params, expected, "ann, without contrast", within=1e-5)
    plain, _ = trained_by_hand(state.server.params, "bob", mean_cross_entropy, round=1)
    bob = reply_of(of, state, "bob").upload.params
    assert (bob["features.0.weight"] - plain["features.0.weight"]).abs().max() > 1e-4


def test_the_previous_model_is_that_of_the_clients_last_participation() -> None:
    rounds = [("ann", "bob"), ("bob", "cyd"), ("ann", "bob")]
    of = scripted(MOON, rounds.__getitem__)
    start = of.start()
    trained = reply_of(of, start, "ann").upload.params
    first = of.advance(start)
    second = of.advance(first)
    for state in (first, second):
        assert_same(state.memories["ann"], Previous(trained, torch.tensor(1.0)), "what ann trained in the first round")
    received = second.server.params

    def loss(parts: Parts, z: Tensor, batch: Batch) -> Tensor:
        z_global, z_previous = teacher_features(received, batch.x), teacher_features(trained, batch.x)
        logits = torch.stack([F.cosine_similarity(z, z_global), F.cosine_similarity(z, z_previous)], -1) / 0.5
        rows = batch.weight > 0
        contrast = F.cross_entropy(logits[rows], torch.zeros(int(rows.sum()), dtype=torch.int64))
        return mean_cross_entropy(parts, z, batch) + 5.0 * contrast

    expected, _ = trained_by_hand(received, "ann", loss, round=2)
    third = of.advance(second)
    assert_close(third.memories["ann"].params, expected, "ann's second participation", within=1e-5)
