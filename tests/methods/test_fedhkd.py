"""FedHKD: what clients send and keep back, the server's means, both distances, and three rounds by a reference."""

from math import exp, log

import pytest
import torch
from torch import nn

from methods.conformance import (
    CLASSES,
    TASK,
    assert_same,
    batch_of,
    federation,
    identity_model,
    loaded,
    reply_of,
    usual,
)
from methods.few_numbers import EPOCHS, LR, MOMENTUM, ROUNDS, after_all_rounds, clients, network
from methods.few_numbers import federation as of_few_numbers
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedhkd import FedHKD, Knowledge, State, Upload, no_knowledge
from protofed.prototypes.class_means import ClassSums
from references import fedhkd as reference
from references.plain import largest_difference

ZERO = identity_model([[0.0, 0.0], [0.0, 0.0]])


def knowledge(means: list[list[float]], predictions: list[list[float]], counts: list[float]) -> Knowledge:
    return Knowledge(torch.tensor(means), torch.tensor(predictions), torch.tensor(counts))


# ---- hyper-knowledge


def test_a_client_sends_class_means_of_features_and_soft_predictions() -> None:
    reply = reply_of(federation(FedHKD()), usual(FedHKD(), 1), "ann")
    data = TASK.clients["ann"]
    parts = loaded(reply.upload.params, training=False)
    with torch.no_grad():
        z = parts["features"](TASK.transform.clean(data.x))
        q = torch.softmax(parts["classifier"](z) / 0.5, -1)
    sent = reply.upload.knowledge
    assert torch.equal(sent.count, data.y.bincount(minlength=CLASSES).float())
    for c in data.y.unique().tolist():
        torch.testing.assert_close(sent.mean[c], z[data.y == c].mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(sent.prediction[c], q[data.y == c].mean(0), rtol=1e-4, atol=1e-5)


def test_a_class_below_the_threshold_is_kept_back() -> None:
    sums = ClassSums(torch.tensor([[2.0], [6.0], [0.0]]), torch.tensor([1.0, 3.0, 0.0]))
    told = ClassSums(torch.tensor([[1.0, 0.0, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, 0.0]]), sums.count)
    draws = torch.Generator().manual_seed(0)
    found = FedHKD(threshold=0.25).shown(sums, told, draws)  # shares 1/4 and 3/4
    assert found.mean.flatten().tolist() == [2, 2, 0]
    assert found.count.tolist() == [1, 3, 0]
    found = FedHKD(threshold=0.3).shown(sums, told, draws)
    assert found.mean.flatten().tolist() == [0, 2, 0]
    assert found.prediction.tolist() == [[0, 0, 0], [0, 1, 0], [0, 0, 0]]
    assert found.count.tolist() == [0, 3, 0]


def test_noise_has_its_deviation_and_falls_on_the_means_of_features_alone() -> None:
    sums = ClassSums(torch.ones(3, 2000), torch.tensor([1.0, 1.0, 0.0]))
    told = ClassSums(torch.eye(3), sums.count)
    found = FedHKD(noise=2.0).shown(sums, told, torch.Generator().manual_seed(0))
    assert (found.mean[:2] - 1).std().item() == pytest.approx(2, abs=0.1)
    assert not torch.equal(found.mean[0], found.mean[1])
    assert not found.mean[2].any()
    assert found.prediction[:2].tolist() == [[1, 0, 0], [0, 1, 0]]


def test_noise_differs_between_rounds_and_clients() -> None:
    method, quiet = FedHKD(noise=1.0), FedHKD()
    first, state = usual(method, 0), usual(method, 1)
    replies = [reply_of(federation(method), s, c) for s, c in ((first, "ann"), (state, "ann"), (first, "bob"))]
    clean = reply_of(federation(quiet), usual(quiet, 0), "ann")
    noise = replies[0].upload.knowledge.mean - clean.upload.knowledge.mean
    assert noise.abs().max() > 0.5
    for other in replies[1:]:
        assert not torch.equal(other.upload.knowledge.mean[0], replies[0].upload.knowledge.mean[0])


def test_the_server_averages_hyper_knowledge_by_the_examples_of_the_class() -> None:
    ann = knowledge([[1.0], [0.0]], [[1.0, 0.0], [0.0, 0.0]], [1.0, 0.0])
    bob = knowledge([[5.0], [0.0]], [[0.2, 0.8], [0.0, 0.0]], [3.0, 0.0])
    before = State({"w": torch.zeros(1)}, knowledge([[9.0], [7.0]], [[0.5, 0.5], [0.3, 0.7]], [1.0, 2.0]))
    sent = [
        ("a", Upload({"w": torch.ones(1)}, ann, torch.tensor(1))),
        ("b", Upload({"w": 3 * torch.ones(1)}, bob, torch.tensor(3))),
    ]
    found = FedHKD().aggregate(before, iter(sent), None)
    # (1 · 1 + 3 · 5) / 4 = 4, and (1 · 1 + 3 · 0.2) / 4 = 0.4. Nobody sent the second class, so it stays.
    assert found.knowledge.mean.tolist() == [[4], [7]]
    torch.testing.assert_close(found.knowledge.prediction, torch.tensor([[0.4, 0.6], [0.3, 0.7]]))
    assert found.knowledge.count.tolist() == [4, 2]
    assert found.params["w"].item() == 2.5


# ---- the loss


def test_the_objective_with_euclidean_distances_by_hand() -> None:
    means, third = [[0.0, 1.0], [3.0, 4.0], [0.0, 0.0]], [1 / 3, 1 / 3, 1 / 3]
    known = knowledge(means, [[0.8, 0.1, 0.1], third, [0.0, 0.0, 0.0]], [1.0, 1.0, 0.0])
    model = identity_model([[0.0, 0.0]] * 3)
    batch = batch_of([[3.0, 5.0], [3.0, 4.0], [8.0, 8.0]], [0, 1, 2])
    found = FedHKD(prediction_weight=2.0, feature_weight=3.0).loss(model, batch, known)
    # All scores are 0, so soft predictions are thirds: those of the first class are off by 0.8 − ⅓ and twice 0.1 − ⅓.
    first = ((0.8 - 1 / 3) ** 2 + 2 * (0.1 - 1 / 3) ** 2) ** 0.5
    # Features are 5 from (0, 1), 0 from (3, 4), and the third class has no mean.
    assert found.item() == pytest.approx(log(3) + 2 * (first + 0) / 2 + 3 * 5 / 3, abs=1e-5)


def test_the_objective_of_the_authors_code_by_hand() -> None:
    known = knowledge([[2.0, 0.0], [0.0, 0.0]], [[0.75, 0.25], [0.0, 0.0]], [1.0, 0.0])
    model = identity_model([[1.0, 0.0], [0.0, 0.0]])
    batch = batch_of([[0.0, 1.0]], [0])
    method = FedHKD(2.0, 3.0, temperature=2.0, prediction_distance="divergence", feature_distance="mean_square")
    # The classifier's scores of (2, 0) are 2 and 0, by temperature 2: softmax (σ, 1 − σ) with σ = 1 / (1 + e⁻¹).
    sigma = 1 / (1 + exp(-1))
    divergence = (0.75 * log(0.75 / sigma) + 0.25 * log(0.25 / (1 - sigma))) / 2
    assert method.loss(model, batch, known).item() == pytest.approx(log(2) + 2 * divergence + 3 * 2.5, abs=1e-5)


def test_the_first_round_has_no_hyper_knowledge_and_is_that_of_fedavg() -> None:
    batch = batch_of([[3.0, 5.0], [0.0, 0.0]], [0, 1])
    assert FedHKD().loss(ZERO, batch, no_knowledge(2, 2)).item() == pytest.approx(log(2))
    assert_same(usual(FedHKD(), 1).server.params, usual(FedAvg(), 1).server.params, "the first round")


def test_gradients_are_finite_where_distances_are_0() -> None:
    model = identity_model([[0.0, 0.0], [0.0, 0.0]])
    weight = model.params["classifier.weight"].requires_grad_()
    known = knowledge([[0.0, 0.0], [1.0, 1.0]], [[0.5, 0.5], [0.5, 0.5]], [1.0, 1.0])
    FedHKD(1.0, 1.0).loss(model, batch_of([[0.0, 0.0], [1.0, 1.0]], [0, 1]), known).backward()
    assert torch.isfinite(weight.grad).all()


def test_without_both_terms_it_is_fedavg() -> None:
    method = FedHKD(prediction_weight=0.0, feature_weight=0.0)
    assert_same(usual(method, 3).server.params, usual(FedAvg(), 3).server.params, "FedAvg")
    for other in (FedHKD(prediction_weight=0.0), FedHKD(feature_weight=0.0)):
        with pytest.raises(AssertionError):
            assert_same(usual(other, 2).server.params, usual(FedAvg(), 2).server.params, "FedAvg")


@pytest.mark.parametrize("as_in_code", [False, True])
def test_three_rounds_end_where_the_reference_ends(as_in_code: bool) -> None:
    distances = {"prediction_distance": "divergence", "feature_distance": "mean_square"} if as_in_code else {}
    of = of_few_numbers(FedHKD(prediction_weight=0.5, feature_weight=0.3, **distances))
    parts = nn.ModuleDict(network())
    parts.load_state_dict(of.start().server.params)
    expected = reference.final_weights(
        clients(),
        parts,
        ROUNDS,
        epochs=EPOCHS,
        lr=LR,
        momentum=MOMENTUM,
        lam=0.5,
        gamma=0.3,
        temperature=0.5,
        as_in_code=as_in_code,
    )
    difference = largest_difference(after_all_rounds(of).server.params, expected)
    assert difference < 1e-5, f"largest difference {difference:.1e}"
