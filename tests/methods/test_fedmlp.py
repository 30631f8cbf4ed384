"""FedMLP (reconstruction): semantic prototypes, the three regularisations, and FedAvg without them."""

from math import exp, log
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from doubles import sum_of
from methods.conformance import (
    CHECKS,
    ODD_TASK,
    after,
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
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedmlp import FedMLP, Levels, semantic_prototypes
from protofed.methods.fedproto_avg import FedProtoAvg
from protofed.nn.networks import Parts
from protofed.prototypes.class_means import Prototypes

SETTINGS = {
    "default": FedMLP(),
    "recomputed": FedMLP(prototype_mode="recomputed"),
    "retaining": FedMLP(retention_weight=0.5),
}
OFF = {"pull_weight": 0.0, "semantic_weight": 0.0}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Any, setting: str) -> None:
    check(SETTINGS[setting])


# ---- semantic prototypes


def test_a_semantic_prototype_is_mixed_with_related_classes() -> None:
    classes = Prototypes(torch.tensor([[2.0, 0.0], [0.0, 4.0], [0.0, 0.0]]), torch.tensor([1.0, 3.0, 0.0]))
    found = semantic_prototypes(classes, 0.5)
    # Cosines 1 to itself and 0 to the other: shares e² : 1. Class 2 has no prototype and takes no part.
    own, other = exp(2) / (exp(2) + 1), 1 / (exp(2) + 1)
    expected = [[2 * own, 4 * other], [2 * other, 4 * own], [0.0, 0.0]]
    torch.testing.assert_close(found, torch.tensor(expected))


def test_it_equals_a_slow_reference() -> None:
    means = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    found = semantic_prototypes(Prototypes(means, torch.ones(5)), 0.2)
    for c in range(5):
        weights = torch.stack([F.cosine_similarity(means[c], means[k], dim=0).double() / 0.2 for k in range(5)]).exp()
        expected = sum(w * means[k].double() for k, w in enumerate(weights)) / weights.sum()
        torch.testing.assert_close(found[c].double(), expected, rtol=0, atol=1e-5)


def test_no_prototypes_at_all_and_prototypes_of_zero_are_fine() -> None:
    assert semantic_prototypes(Prototypes(torch.zeros(3, 2), torch.zeros(3)), 0.5).tolist() == [[0.0, 0.0]] * 3
    assert torch.isfinite(semantic_prototypes(Prototypes(torch.zeros(3, 2), torch.ones(3)), 0.5)).all()


def test_the_server_makes_both_levels_and_an_absent_class_keeps_its_prototype() -> None:
    method = FedMLP()
    ann = Prototypes(torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]), torch.tensor([1.0, 0.0, 0.0]))
    bob = Prototypes(torch.tensor([[3.0, 2.0], [0.0, 5.0], [0.0, 0.0]]), torch.tensor([1.0, 1.0, 0.0]))
    old = Prototypes(torch.tensor([[9.0, 9.0], [9.0, 9.0], [-1.0, 0.0]]), torch.tensor([2.0, 2.0, 1.0]))
    found = method.combine(sum_of(map(method.added, [ann, bob])), Levels(old, torch.full((3, 2), 7.0)))
    # Class 0: ((1, 0) + (3, 2)) / 2 = (2, 1), whatever the numbers of examples. Class 1 is bob's. Class 2 stays.
    assert found.classes.mean.tolist() == [[2.0, 1.0], [0.0, 5.0], [-1.0, 0.0]]
    assert torch.equal(found.semantic, semantic_prototypes(found.classes, 0.5))


# ---- the objective

KNOWN = Levels(
    Prototypes(torch.tensor([[1.0, 4.0], [0.0, 5.0], [0.0, 0.0]]), torch.tensor([1.0, 2.0, 0.0])),
    torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 0.0]]),
)


def test_the_two_regularisations_by_prototypes() -> None:
    batch = batch_of([[3.0, 4.0]] * 3, [0, 1, 2])
    found = FedMLP(pull_weight=2.0, semantic_weight=0.5).prototype_loss(batch.x, batch, KNOWN)
    # Pull: ((3 − 1)² + 0) / 2 = 2 and (3² + 1) / 2 = 5. Cosines to semantic prototypes 0.6 and 0.8, over 0.5: 1.2, 1.6;
    # log(1 + e^0.4) for class 0, log(1 + e^−0.4) for class 1. Class 2 has no prototype.
    expected = [4 + 0.5 * log(1 + exp(0.4)), 10 + 0.5 * log(1 + exp(-0.4)), 0.0]
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


def test_the_retention_is_the_divergence_from_the_received_model() -> None:
    batch = batch_of([[log(3), 0.0], [5.0, 1.0]], [0, 1], [1.0, 0.0])
    received = {"classifier.weight": torch.tensor([[1.0, 0.0], [0.0, 0.0]])}
    found = FedMLP(retention_weight=2.0).retention(identity_model([[0.0, 0.0], [0.0, 0.0]]), batch, received)
    # The received model says 3/4, 1/4, the own 1/2, 1/2: KL = 3/4 log(3/2) + 1/4 log(1/2). The second row only fills.
    assert found.item() == pytest.approx(2 * (0.75 * log(1.5) + 0.25 * log(0.5)), abs=1e-6)


def test_a_client_descends_all_three() -> None:
    method = FedMLP(pull_weight=0.7, semantic_weight=0.3, temperature=0.4, retention_weight=0.6)
    state = usual(method, 1)
    known, teacher = state.server.prototypes, loaded(state.server.params, training=False)
    assert known.classes.is_known.all()

    def loss(parts: Parts, z: Tensor, batch: Batch) -> Tensor:
        rows = batch.weight > 0
        own, y = z[rows], batch.y[rows]
        pull = (own - known.classes.mean[y]).square().mean()
        cosines = F.normalize(own, dim=-1) @ F.normalize(known.semantic, dim=-1).T
        with torch.no_grad():
            target = teacher["classifier"](teacher["features"](batch.x[rows])).softmax(-1)
        kept = F.kl_div(parts["classifier"](own).log_softmax(-1), target, reduction="batchmean")
        regularised = 0.7 * pull + 0.3 * F.cross_entropy(cosines / 0.4, y) + 0.6 * kept
        return mean_cross_entropy(parts, z, batch) + regularised

    expected, _ = trained_by_hand(state.server.params, "ann", loss, round=1)
    assert_close(reply_of(federation(method), state, "ann").upload.params, expected, "ann", within=2e-5)


# ---- identities


def test_without_regularisations_it_is_fedavg() -> None:
    assert_same(usual(FedMLP(**OFF), 3).server.params, usual(FedAvg(), 3).server.params, "three rounds")


def test_the_first_round_is_fedavg() -> None:
    assert_same(usual(FedMLP(), 1).server.params, usual(FedAvg(), 1).server.params, "the first round")


def test_with_class_prototypes_alone_it_is_fedproto_with_averaged_weights() -> None:
    found = usual(FedMLP(semantic_weight=0.0), 3).server
    expected = usual(FedProtoAvg(), 3).server
    assert_same(found.params, expected.params, "three rounds")
    assert_same(found.prototypes.classes, expected.prototypes, "class prototypes")


DIFFERENCES = {
    "the pull": (FedMLP(semantic_weight=0.0), FedMLP(**OFF)),
    "semantic prototypes": (FedMLP(), FedMLP(semantic_weight=0.0)),
    "the temperature": (FedMLP(), FedMLP(temperature=0.1)),
    "the retention": (FedMLP(retention_weight=0.5), FedMLP()),
    "the mode": (FedMLP(prototype_mode="recomputed"), FedMLP()),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_setting_makes_a_difference(what: str) -> None:
    one, other = (fingerprint(usual(method, 2).server.params) for method in DIFFERENCES[what])
    assert one != other


def test_a_class_that_nobody_has_has_no_prototypes() -> None:
    known = after(2, federation(FedMLP(), ODD_TASK)).server.prototypes
    assert known.classes.is_known.tolist() == [True, True, True, False]
    assert known.semantic[3].abs().sum() == 0
    assert (known.semantic[:3].abs().sum(-1) > 0).all()
