"""FedProto with averaged weights: FedAvg's mean of the weights, FedProto's mean of the prototypes, one loss."""

from math import exp, log

import pytest
import torch
from torch import Tensor

from methods.conformance import (
    SIZES,
    TASK,
    assert_close,
    assert_same,
    batch_of,
    federation,
    identity_model,
    mean_cross_entropy,
    reply_of,
    trained_by_hand,
    usual,
)
from protofed.data.batches import Batch
from protofed.methods.families import PrototypeUpload, WeightsAndPrototypes
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedproto_avg import FedProtoAvg
from protofed.nn.networks import Parts
from protofed.prototypes.class_means import Prototypes


def upload(weight: float, means: list[list[float]], counts: list[float], num_examples: int) -> PrototypeUpload:
    prototypes = Prototypes(torch.tensor(means), torch.tensor(counts))
    return PrototypeUpload({"w": torch.tensor([weight])}, prototypes, torch.tensor(num_examples))


def test_weights_are_averaged_by_examples_and_prototypes_are_not() -> None:
    server = WeightsAndPrototypes({"w": torch.zeros(1)}, Prototypes(torch.full((3, 1), 7.0), torch.tensor([0.0, 0, 4])))
    uploads = [
        ("a", upload(1.0, [[1.0], [5.0], [0.0]], [1.0, 0.0, 0.0], 1)),
        ("b", upload(5.0, [[3.0], [6.0], [0.0]], [2.0, 1.0, 0.0], 3)),
    ]
    after = FedProtoAvg().aggregate(server, iter(uploads), None)
    # Weights: (1 · 1 + 3 · 5) / 4 = 4. Class 0: (1 + 3) / 2 = 2, not (1 · 1 + 2 · 3) / 3. Class 1: only b owns it,
    # whatever a put there. Class 2: nobody owns it, so it stays 7.
    assert after.params["w"].tolist() == [4.0]
    assert after.prototypes.mean.tolist() == [[2.0], [6.0], [7.0]]
    assert after.prototypes.count.tolist() == [2.0, 1.0, 4.0]  # owners; the last as before


@pytest.mark.parametrize("pull_weight", [1.0, 2.0])
def test_the_loss_is_equation_7(pull_weight: float) -> None:
    known = Prototypes(torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.tensor([4.0, 0.0]))
    batch = batch_of([[2.0, 4.0], [5.0, 5.0]], [0, 1])
    found = FedProtoAvg(pull_weight=pull_weight).loss(identity_model([[1.0, 0.0], [0.0, 1.0]]), batch, known)
    # Cross-entropies log(1 + e²) and log 2; pull ((2 − 1)² + (4 − 1)²) / 2 = 5 of the first example only, over two.
    assert found.item() == pytest.approx((log(1 + exp(2)) + log(2)) / 2 + pull_weight * 2.5, abs=1e-6)


def test_the_first_round_is_fedavg_and_the_recorder_stays_at_home() -> None:
    assert_same(usual(FedProtoAvg(), 1).server.params, usual(FedAvg(), 1).server.params, "the first round")


def test_a_client_is_pulled_to_the_prototypes_of_the_round_before() -> None:
    state = usual(FedProtoAvg(), 1)
    target = state.server.prototypes

    def loss(parts: Parts, z: Tensor, batch: Batch) -> Tensor:
        rows = batch.weight > 0
        pull = ((z - target.mean[batch.y]).square().mean(-1) * target.is_known[batch.y])[rows].mean()
        return mean_cross_entropy(parts, z, batch) + pull

    expected, _ = trained_by_hand(state.server.params, "ann", loss, round=1)
    reply = reply_of(federation(FedProtoAvg()), state, "ann")
    assert_close(reply.upload.params, expected, "ann's weights", within=1e-5)
    assert int(reply.upload.num_examples) == SIZES["ann"]


def test_the_public_model_is_the_mean_and_predicts_with_its_classifier() -> None:
    state = usual(FedProtoAvg(), 2)
    params, message = FedProtoAvg().public(state.server)
    assert_same(params, state.server.params, "the public weights")
    model = federation(FedProtoAvg()).networks_of("ann").model(params)
    x = TASK.transform.clean(TASK.tests["domain 0"].x)
    assert torch.equal(FedProtoAvg().predict(model, x, message, None), model.logits(x))
