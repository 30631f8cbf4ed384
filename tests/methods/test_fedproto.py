"""FedProto: global prototypes (Eq. 6), the pull (Eq. 7), nearest-prototype inference, and models that stay at home."""

from math import exp, log

import pytest
import torch
from torch import Tensor

from methods.conformance import (
    CLASSES,
    FEATURES,
    TASK,
    assert_close,
    assert_same,
    batch_of,
    federation,
    identity_model,
    loaded,
    mean_cross_entropy,
    reply_of,
    trained_by_hand,
    usual,
)
from protofed import wire
from protofed.data.batches import Batch
from protofed.methods.fedproto import FedProto
from protofed.methods.local import LocalOnly
from protofed.nn.networks import Parts
from protofed.prototypes.class_means import Prototypes, no_prototypes


def prototypes(means: list[list[float]], counts: list[float]) -> Prototypes:
    return Prototypes(torch.tensor(means), torch.tensor(counts))


def test_global_prototypes_are_the_plain_mean_over_the_clients_that_own_the_class() -> None:
    uploads = [
        ("a", prototypes([[1.0, 2.0], [9.0, 9.0], [0.0, 0.0]], [1.0, 2.0, 0.0])),
        ("b", prototypes([[3.0, 6.0], [0.0, 0.0], [0.0, 0.0]], [99.0, 0.0, 0.0])),
    ]
    server = FedProto().aggregate(prototypes([[7.0, 7.0]] * 3, [1.0, 1.0, 5.0]), iter(uploads), None)
    # Class 0: ((1, 2) + (3, 6)) / 2 = (2, 4), although b has 99 examples and a one.
    # Class 1: only a has it. Class 2: nobody sent it, so it stays.
    assert server.mean.tolist() == [[2.0, 4.0], [9.0, 9.0], [7.0, 7.0]]
    assert server.count.tolist() == [2.0, 1.0, 5.0]  # owners; the last as before


@pytest.mark.parametrize("pull_weight", [1.0, 0.5])
def test_the_loss_is_cross_entropy_and_the_mean_squared_error_to_the_prototype_of_the_class(pull_weight: float) -> None:
    known = prototypes([[1.0, 1.0], [0.0, 0.0]], [4.0, 0.0])
    batch = batch_of([[2.0, 4.0], [5.0, 5.0]], [0, 1])
    found = FedProto(pull_weight=pull_weight).loss(identity_model([[1.0, 0.0], [0.0, 1.0]]), batch, known)
    # The features are the inputs and the logits are the features: cross-entropies log(1 + e²) and log 2.
    # Pull of the first example: ((2 − 1)² + (4 − 1)²) / 2 = 5. The second's class has no prototype: 0, but it counts.
    cross_entropy = (log(1 + exp(2)) + log(2)) / 2
    assert found.item() == pytest.approx(cross_entropy + pull_weight * 2.5, abs=1e-6)


def test_rows_that_only_fill_the_batch_do_not_count() -> None:
    known = prototypes([[1.0, 1.0], [0.0, 0.0]], [4.0, 1.0])
    model = identity_model([[1.0, 0.0], [0.0, 1.0]])
    short = FedProto().loss(model, batch_of([[2.0, 4.0]], [0]), known)
    filled = FedProto().loss(model, batch_of([[2.0, 4.0], [5.0, -5.0]], [0, 1], [1, 0]), known)
    assert filled.item() == pytest.approx(short.item(), abs=1e-6)


def test_the_nearest_known_prototype_wins() -> None:
    known = prototypes([[0.0, 0.0], [3.0, 4.0], [1.0, 1.0]], [1.0, 1.0, 0.0])
    method = FedProto(inference="nearest_prototype")
    scores = method.predict(identity_model(torch.zeros(3, 2)), torch.tensor([[1.0, 1.0], [2.0, 3.0]]), known, None)
    # Squared distances over two dimensions, halved: (1, 1) to (0, 0) is 1, to (3, 4) is (4 + 9) / 2 = 6.5;
    # (2, 3) to (0, 0) is 6.5, to (3, 4) is 1. The third class has no prototype, though (1, 1) is where it would be.
    assert scores.tolist() == [[-1.0, -6.5, -torch.inf], [-6.5, -1.0, -torch.inf]]
    assert scores.argmax(-1).tolist() == [0, 1]


def test_the_classifier_predicts_by_default() -> None:
    known = prototypes([[0.0, 0.0], [3.0, 4.0]], [1.0, 1.0])
    scores = FedProto().predict(identity_model([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 5.0]]), known, None)
    assert scores.tolist() == [[2.0, 5.0]]


def test_only_prototypes_leave_a_client() -> None:
    of, state = federation(FedProto()), usual(FedProto(), 1)
    upload = reply_of(of, state, "ann").upload
    sizes = {path: tuple(leaf.shape) for path, leaf in wire.to_arrays(upload).items()}
    assert sizes == {"mean": (CLASSES, FEATURES), "count": (CLASSES,)}
    counts = torch.bincount(TASK.clients["ann"].labels, minlength=CLASSES)
    assert counts.max() > 1
    assert torch.equal(upload.count, (counts > 0).float())  # which classes, not how many examples of each


def test_clients_start_alike_keep_their_own_models_and_have_no_public_one() -> None:
    state = usual(FedProto(), 1)
    first, second = state.memories["ann"].params, state.memories["bob"].params
    assert all(not torch.equal(first[name], second[name]) for name in first)
    assert not [name for name in first if name.startswith("recorder")]
    assert FedProto().public(state.server) is None


def test_the_first_round_is_local_training_since_there_are_no_prototypes() -> None:
    assert not usual(FedProto(), 0).server.is_known.any()
    assert_same(usual(FedProto(), 1).memories["ann"].params, usual(LocalOnly(), 1).memories["ann"].params, "round one")


def test_a_client_trains_its_own_model_towards_the_global_prototypes() -> None:
    state = usual(FedProto(), 1)
    target = state.server

    def loss(parts: Parts, z: Tensor, batch: Batch) -> Tensor:
        rows = batch.weight > 0
        pull = ((z - target.mean[batch.y]).square().mean(-1) * target.is_known[batch.y])[rows].mean()
        return mean_cross_entropy(parts, z, batch) + pull

    expected, seen = trained_by_hand(state.memories["ann"].params, "ann", loss, round=1)
    reply = reply_of(federation(FedProto()), state, "ann")
    assert_close(reply.memory.params, expected, "ann's model", within=1e-5)
    last = seen[len(seen) // 2 :]
    z = torch.cat([z[batch.weight > 0] for batch, z in last])
    y = torch.cat([batch.y[batch.weight > 0] for batch, _ in last])
    for c in y.unique().tolist():
        torch.testing.assert_close(reply.upload.mean[c], z[y == c].mean(0), rtol=1e-4, atol=1e-5)


def test_recomputed_prototypes_are_the_trained_models_features_in_evaluation_mode() -> None:
    method = FedProto(prototype_mode="recomputed")
    reply = reply_of(federation(method), usual(method, 1), "ann")
    data = TASK.clients["ann"]
    with torch.no_grad():
        z = loaded(reply.memory.params, training=False)["features"](TASK.transform.clean(data.x))
    expected = no_prototypes(CLASSES, FEATURES)
    for c in range(CLASSES):
        own = z[data.y == c]
        expected.count[c] = len(own) > 0
        if len(own):
            expected.mean[c] = own.mean(0)
    assert_close(reply.upload, expected, "prototypes", within=1e-5)
