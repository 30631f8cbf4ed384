"""MP-FedCL (reconstruction): the clusters, the pool, the contrast by hand, FedAvg without it, and a reference."""

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
from protofed.methods.mp_fedcl import MPFedCL, Pool, clustered, pooled, supervised_contrast
from protofed.prototypes.class_means import Prototypes
from protofed.tree import named_leaves
from references import mp_fedcl as reference
from references.plain import largest_difference


def test_prototypes_are_the_means_of_clusters_of_a_class() -> None:
    z = torch.tensor([[0.0, 0.0], [0.0, 2.0], [9.0, 9.0], [9.0, 7.0], [5.0, 5.0]])
    found = clustered(z, torch.tensor([0, 0, 0, 0, 2]), 4, 2, torch.Generator().manual_seed(0))
    assert found.count.tolist() == [[1, 1], [0, 0], [1, 0], [0, 0]]
    assert sorted(found.mean[0].tolist()) == [[0, 1], [9, 8]]
    assert found.mean[2, 0].tolist() == [5, 5]
    assert not found.mean[found.count == 0].any()


def test_one_cluster_is_the_class_mean_of_the_trained_models_features() -> None:
    method = MPFedCL(clusters=1)
    reply = reply_of(federation(method), usual(method, 1), "ann")
    data = TASK.clients["ann"]
    with torch.no_grad():
        z = loaded(reply.upload.params, training=False)["features"](TASK.transform.clean(data.x))
    assert reply.upload.mean.shape == (CLASSES, 1, FEATURES)
    for c in range(CLASSES):
        has = bool((data.y == c).any())
        assert reply.upload.count[c].tolist() == [float(has)]
        expected = z[data.y == c].mean(0) if has else torch.zeros(FEATURES)
        torch.testing.assert_close(reply.upload.mean[c, 0], expected, rtol=1e-4, atol=1e-5)


def test_the_pool_has_all_that_was_sent_and_what_nobody_sent_from_before() -> None:
    ann = Prototypes(torch.tensor([[[1.0], [2.0]], [[0.0], [0.0]]]), torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
    bob = Prototypes(torch.tensor([[[3.0], [0.0]], [[0.0], [0.0]]]), torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    previous = Pool(torch.tensor([[0.0], [7.0], [8.0]]), torch.tensor([-1, 1, 0]))
    found = pooled([ann, bob], previous)
    assert found.label.tolist() == [1, 0, 0, 0]
    assert found.prototypes.flatten().tolist() == [7, 1, 2, 3]


def test_the_contrast_by_hand() -> None:
    # (3, 4) against (1, 0), (0, 1) and (6, 8): cosines 0.6, 0.8 and 1, τ = 0.5. Of class 1 are the last two.
    z, pool = torch.tensor([[3.0, 4.0]] * 2), torch.tensor([[2.0, 0.0], [0.0, 5.0], [6.0, 8.0], [1.0, 1.0]])
    label = torch.tensor([0, 1, 1, -1])
    whole = log(exp(1.2) + exp(1.6) + exp(2.0))
    found = supervised_contrast(z, torch.tensor([1, 2]), pool, label, 0.5)
    assert found.tolist() == pytest.approx([((whole - 1.6) + (whole - 2.0)) / 2, 0], abs=1e-6)
    method, batch = MPFedCL(contrast_weight=3.0, temperature=0.5), batch_of([[3.0, 4.0]], [1])
    loss = method.loss(identity_model(torch.zeros(2, 2)), batch, Pool(pool, label))
    assert loss.item() == pytest.approx(log(2) + 3 * found[0].item(), abs=1e-5)


def test_rows_of_fill_change_nothing() -> None:
    z, y = torch.tensor([[3.0, 4.0]]), torch.tensor([0])
    pool, label = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])
    filled = supervised_contrast(
        z, y, torch.cat([pool, torch.zeros(5, 2)]), torch.cat([label, torch.full((5,), -1)]), 0.07
    )
    assert filled.item() == pytest.approx(supervised_contrast(z, y, pool, label, 0.07).item(), abs=1e-6)


def test_the_pool_grows_with_the_clients() -> None:
    pool = usual(MPFedCL(), 1).server.prototypes
    sent = sum(
        int(named_leaves(reply_of(federation(MPFedCL()), usual(MPFedCL(), 0), c).upload)["count"].sum())
        for c in TASK.clients
    )
    assert len(pool.label) == sent
    assert pool.label.min() >= 0


def test_without_the_contrast_it_is_fedavg() -> None:
    assert_same(usual(MPFedCL(contrast_weight=0.0), 3).server.params, usual(FedAvg(), 3).server.params, "FedAvg")
    with pytest.raises(AssertionError):
        assert_same(usual(MPFedCL(), 2).server.params, usual(FedAvg(), 2).server.params, "FedAvg")


@pytest.mark.parametrize("k", [1, 2])
def test_three_rounds_end_where_the_reference_ends(k: int) -> None:
    of = of_few_numbers(MPFedCL(clusters=k, contrast_weight=0.5, temperature=0.3))
    parts = nn.ModuleDict(network())
    parts.load_state_dict(of.start().server.params)
    expected = reference.final_weights(
        clients(), parts, ROUNDS, epochs=EPOCHS, lr=LR, momentum=MOMENTUM, weight=0.5, temperature=0.3, k=k
    )
    difference = largest_difference(after_all_rounds(of).server.params, expected)
    assert difference < 1e-5, f"largest difference {difference:.1e}"
