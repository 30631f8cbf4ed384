"""FedPLVM: both levels of clustering, the α-sparsity loss, the correction, and three rounds by a reference."""

from math import exp, log

import pytest
import torch
from torch import nn

from methods.conformance import (
    CLASSES,
    FEATURES,
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
from protofed.methods.fedplvm import FedPLVM, Targets, coarsest_means, correction, joined, sparse_contrast
from protofed.prototypes.class_means import Prototypes
from references import fedplvm as reference
from references.plain import largest_difference

# Two pairs of directions, near (1, 0) and near (0, 1).
PAIRS = torch.tensor([[4.0, 0.0], [2.0, 0.2], [0.0, 3.0], [0.1, 1.0]])


def prototypes(means: list[list[float]], counts: list[float]) -> Prototypes:
    return Prototypes(torch.tensor(means), torch.tensor(counts))


# ---- clustering


def test_means_are_those_of_the_coarsest_partition_of_more_than_one_cluster() -> None:
    torch.testing.assert_close(coarsest_means(PAIRS), torch.tensor([[3.0, 0.1], [0.05, 2.0]]))
    torch.testing.assert_close(coarsest_means(PAIRS[:1]), PAIRS[:1])
    torch.testing.assert_close(coarsest_means(PAIRS[:2]), torch.tensor([[3.0, 0.1]]))


def test_clusters_are_joined_by_the_largest_cosine_until_so_many_are_left() -> None:
    # Directions at 0°, 10°, 90° and 95°: the last two are joined first, then the first two.
    angles = torch.tensor([0.0, 10.0, 90.0, 95.0]).deg2rad()
    points = torch.stack([angles.cos(), angles.sin()], -1)
    labels = torch.arange(4)
    assert joined(points, labels, 4).tolist() == [0, 1, 2, 3]
    assert joined(points, labels, 3).tolist() == [0, 1, 2, 2]
    assert joined(points, labels, 2).tolist() == [0, 0, 1, 1]
    assert joined(points, labels, 1).tolist() == [0, 0, 0, 0]


def test_a_client_sends_cluster_means_of_its_features_in_slots() -> None:
    z = torch.cat([PAIRS, torch.tensor([[7.0, 7.0]])])
    found = FedPLVM(most_prototypes=3).local_prototypes(z, torch.tensor([1, 1, 1, 1, 2]), 4)
    assert found.count.tolist() == [[0, 0, 0], [1, 1, 0], [1, 0, 0], [0, 0, 0]]
    torch.testing.assert_close(found.mean[1, :2], torch.tensor([[3.0, 0.1], [0.05, 2.0]]))
    assert found.mean[2, 0].tolist() == [7, 7]
    assert not found.mean[found.count == 0].any()
    one = FedPLVM(most_prototypes=1).local_prototypes(z, torch.tensor([1, 1, 1, 1, 2]), 4)
    torch.testing.assert_close(one.mean[1, 0], PAIRS.mean(0))


def test_features_are_those_of_the_trained_model_in_evaluation_mode() -> None:
    reply = reply_of(federation(FedPLVM()), usual(FedPLVM(), 1), "ann")
    data = TASK.clients["ann"]
    with torch.no_grad():
        z = loaded(reply.upload.params, training=False)["features"](TASK.transform.clean(data.x))
    expected = FedPLVM().local_prototypes(z, data.y, CLASSES)
    assert torch.equal(reply.upload.count, expected.count)
    torch.testing.assert_close(reply.upload.mean, expected.mean, rtol=1e-4, atol=1e-5)
    assert reply.upload.mean.shape == (CLASSES, 8, FEATURES)


def test_the_server_clusters_the_prototypes_of_all_clients_and_averages_the_clusters() -> None:
    near = torch.cat([PAIRS[:2], torch.tensor([[3.0, 0.1]])])  # three near (1, 0) against two near (0, 1)
    ann = Prototypes(
        torch.stack([near, torch.tensor([[4.0, 0.0], [0.0, 0.0], [0.0, 0.0]])]),
        torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]),
    )
    bob = Prototypes(
        torch.stack([torch.cat([PAIRS[2:], torch.zeros(1, 2)]), torch.zeros(3, 2)]),
        torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]),
    )
    kept = prototypes([[9.0, 9.0], [9.0, 9.0]], [0.0, 0.0])
    found = FedPLVM().clustered([ann, bob], Targets(torch.zeros(1, 2), torch.tensor([-1]), kept))
    assert found.label.tolist() == [0, 0, 1]
    torch.testing.assert_close(found.clusters, torch.tensor([[3.0, 0.1], [0.05, 2.0], [4.0, 0.0]]))
    torch.testing.assert_close(found.average.mean, torch.tensor([[1.525, 1.05], [4.0, 0.0]]))
    assert found.average.count.tolist() == [5, 1]  # local prototypes behind it
    again = FedPLVM().clustered([bob], found)  # nobody sends the second class
    assert again.label.tolist() == [0, 1]
    assert again.clusters[1].tolist() == [4, 0]
    assert again.average.mean[1].tolist() == [4, 0]


# ---- the loss


def test_the_contrast_by_hand() -> None:
    # z = (3, 4): cosines 0.6 and 0.8 to the axes, 1 to (3, 4) itself. Roots (α = ½), τ = 0.5.
    z, clusters = torch.tensor([[3.0, 4.0]]), torch.tensor([[2.0, 0.0], [0.0, 5.0], [6.0, 8.0], [1.0, 1.0]])
    label = torch.tensor([0, 1, 1, -1])
    a, b, c = (exp(cosine**0.5 / 0.5) for cosine in (0.6, 0.8, 1.0))
    found = sparse_contrast(z, torch.tensor([1]), clusters, label, 0.5, 0.5)
    assert found.item() == pytest.approx(-log((b + c) / (a + b + c)), abs=1e-6)
    assert sparse_contrast(z, torch.tensor([2]), clusters, label, 0.5, 0.5).item() == 0  # a class without any


def test_at_power_1_it_is_the_usual_contrast_and_below_it_differences_of_cosines_shrink() -> None:
    z, clusters, label = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])
    usual_contrast = sparse_contrast(z, torch.tensor([0]), clusters, label, 1.0, 0.1).item()
    assert usual_contrast == pytest.approx(log(1 + exp(2)), abs=1e-5)
    sparse = sparse_contrast(z, torch.tensor([0]), clusters, label, 0.25, 0.1).item()
    assert sparse == pytest.approx(log(1 + exp((0.8**0.25 - 0.6**0.25) / 0.1)), abs=1e-5)


def test_cosines_at_and_below_0_have_a_finite_slope() -> None:
    z = torch.tensor([[1.0, 0.0], [1.0, 1e-9]], requires_grad=True)
    clusters, label = torch.tensor([[-1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])
    sparse_contrast(z, torch.tensor([0, 1]), clusters, label, 0.25, 0.07).sum().backward()
    assert torch.isfinite(z.grad).all()


def test_the_correction_is_twice_the_squared_difference_of_the_cosine_from_1() -> None:
    average = prototypes([[1.0, 0.0], [0.0, 0.0]], [3.0, 0.0])
    found = correction(torch.tensor([[3.0, 4.0], [3.0, 4.0]]), torch.tensor([0, 1]), average)
    torch.testing.assert_close(found, torch.tensor([2 * 0.4**2, 0.0]))


def test_the_loss_adds_both_terms_to_cross_entropy() -> None:
    targets = Targets(
        torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1]), prototypes([[1.0, 0.0]] * 2, [1.0] * 2)
    )
    batch = batch_of([[3.0, 4.0]], [0])
    model = identity_model([[0.0, 0.0], [0.0, 0.0]])
    term = log(1 + exp((0.8**0.25 - 0.6**0.25) / 0.1))
    method = FedPLVM(prototype_weight=2.0, temperature=0.1)
    assert method.loss(model, batch, targets).item() == pytest.approx(log(2) + 2 * (term + 0.32), abs=1e-5)
    bare = FedPLVM(prototype_weight=2.0, temperature=0.1, correction=False)
    assert bare.loss(model, batch, targets).item() == pytest.approx(log(2) + 2 * term, abs=1e-5)


def test_without_the_prototypes_it_is_fedavg() -> None:
    assert_same(usual(FedPLVM(prototype_weight=0.0), 3).server.params, usual(FedAvg(), 3).server.params, "FedAvg")
    with pytest.raises(AssertionError):
        assert_same(usual(FedPLVM(), 2).server.params, usual(FedAvg(), 2).server.params, "FedAvg")


def test_three_rounds_end_where_the_reference_ends() -> None:
    of = of_few_numbers(FedPLVM(prototype_weight=0.5, temperature=0.2))
    parts = nn.ModuleDict(network())
    parts.load_state_dict(of.start().server.params)
    params, clusters = reference.final_weights(
        clients(), parts, ROUNDS, epochs=EPOCHS, lr=LR, momentum=MOMENTUM, weight=0.5, alpha=0.25, tau=0.2
    )
    state = after_all_rounds(of).server
    difference = largest_difference(state.params, params)
    assert difference < 1e-5, f"largest difference {difference:.1e}"
    targets = state.prototypes
    assert any(len(own) > 1 for own in clusters.values())
    for c, own in clusters.items():
        found = sorted(targets.clusters[targets.label == c].tolist())
        torch.testing.assert_close(
            torch.tensor(found), torch.tensor(sorted(p.tolist() for p in own)), rtol=1e-4, atol=1e-4
        )
