"""FedProc: the share of the contrast, the contrast, prototypes by examples, and the first round."""

from math import exp, log
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from doubles import sum_of
from methods.conformance import (
    CHECKS,
    TASK,
    TRAINING,
    assert_close,
    assert_same,
    batch_of,
    federation,
    fingerprint,
    identity_model,
    loaded,
    reply_of,
    trained_by_hand,
    usual,
)
from protofed.data.batches import Batch
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedproc import FedProc
from protofed.nn.networks import Parts
from protofed.prototypes import class_means
from protofed.prototypes.class_means import Prototypes

SETTINGS = {
    "default": FedProc(),
    "uniform": FedProc(prototype_weighting="uniform"),
    "closed": FedProc(schedule="closed"),
    "recomputed": FedProc(prototype_mode="recomputed"),
}
KNOWN = Prototypes(torch.tensor([[2.0, 0.0], [0.0, 5.0], [0.0, 0.0]]), torch.tensor([4.0, 1.0, 0.0]))
ZERO = [[0.0, 0.0]] * 3


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Any, setting: str) -> None:
    check(SETTINGS[setting])


# ---- the objective


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("open", [1.0, 0.75, 0.5, 0.25]),  # 1 − t/4
        ("closed", [1.0, 2 / 3, 1 / 3, 0.0]),  # 1 − t/3
    ],
)
def test_the_share_of_the_contrast_falls_from_round_to_round(schedule: Any, expected: list[float]) -> None:
    method = FedProc(schedule=schedule)
    assert [method.share(t, 4) for t in range(4)] == pytest.approx(expected, abs=1e-12)


def test_a_run_of_one_round_has_a_share() -> None:
    assert FedProc(schedule="closed").share(0, 1) == 1.0


def test_the_contrast_is_a_softmax_of_cosines_to_the_known_prototypes() -> None:
    # (3, 4) has cosines 0.6 and 0.8 with the two known prototypes, whatever their lengths; class 2 is not known.
    # −log(e^0.6 / (e^0.6 + e^0.8)) = log(1 + e^0.2), and for class 1 log(1 + e^−0.2). An example of class 2 adds 0.
    batch = batch_of([[3.0, 4.0]] * 3, [0, 1, 2])
    found = FedProc().prototype_loss(batch.x, batch, KNOWN)
    assert found.tolist() == pytest.approx([log(1 + exp(0.2)), log(1 + exp(-0.2)), 0.0], abs=1e-6)


def test_the_objective_mixes_contrast_and_cross_entropy_and_leaves_unknown_classes_to_the_latter() -> None:
    batch = batch_of([[3.0, 4.0]] * 4, [0, 1, 2, 0], [1.0, 1.0, 1.0, 0.0])
    found = FedProc().shared_loss(identity_model(ZERO), batch, KNOWN, torch.tensor(0.75))
    # All logits are 0: cross-entropy is log 3. Known classes: 0.75 · contrast + 0.25 · log 3. Class 2: log 3 whole.
    known = 0.75 * (log(1 + exp(0.2)) + log(1 + exp(-0.2))) + 0.5 * log(3)
    assert found.item() == pytest.approx((known + log(3)) / 3, abs=1e-6)


def test_the_contrast_is_never_below_its_bound() -> None:
    # Three classes, own cosine 1 and others −1 is the best there is: log(1 + 2 e⁻²).
    known = Prototypes(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [-3.0, 0.0]]), torch.ones(3))
    batch = batch_of([[7.0, 0.0]], [0])
    assert FedProc().prototype_loss(batch.x, batch, known).item() == pytest.approx(log(1 + 2 * exp(-2)), abs=1e-6)


# ---- the server


def test_prototypes_are_weighted_by_examples_and_an_absent_class_keeps_its_own() -> None:
    ann = Prototypes(torch.tensor([[1.0, 0.0], [6.0, 6.0], [0.0, 0.0]]), torch.tensor([3.0, 2.0, 0.0]))
    bob = Prototypes(torch.tensor([[5.0, 4.0], [0.0, 0.0], [0.0, 0.0]]), torch.tensor([1.0, 0.0, 0.0]))
    previous = Prototypes(torch.tensor([[9.0, 9.0], [9.0, 9.0], [0.1, 0.7]]), torch.tensor([8.0, 8.0, 5.0]))
    found = class_means.mean_of(sum_of(map(class_means.by_count, [ann, bob])), previous)
    # Class 0: (3 · (1, 0) + 1 · (5, 4)) / 4 = (2, 1). Class 1 is ann's alone. Nobody has class 2.
    assert found.mean[:2].tolist() == [[2.0, 1.0], [6.0, 6.0]]
    assert torch.equal(found.mean[2], previous.mean[2])
    assert found.count.tolist() == [4.0, 2.0, 5.0]
    assert found.mean.dtype == found.count.dtype == torch.float32


def test_clients_send_how_many_examples_are_behind_a_prototype_unless_all_count_alike() -> None:
    labels = TASK.clients["ann"].labels
    counts = labels.bincount(minlength=TASK.num_classes)
    assert counts.max() > 1
    state = usual(FedProc(), 1)
    assert reply_of(federation(FedProc()), state, "ann").upload.prototypes.count.tolist() == counts.tolist()
    alike = FedProc(prototype_weighting="uniform")
    assert (
        reply_of(federation(alike), usual(alike, 1), "ann").upload.prototypes.count.tolist()
        == (counts > 0).float().tolist()
    )


def test_global_prototypes_are_the_means_of_all_examples_of_a_class() -> None:
    method = FedProc(prototype_mode="recomputed")
    of, state = federation(method), usual(method, 1)
    total, count = torch.zeros(TASK.num_classes, 8, dtype=torch.float64), torch.zeros(TASK.num_classes)
    for client, data in TASK.clients.items():
        params = reply_of(of, state, client).upload.params
        with torch.no_grad():
            z = loaded(params, training=False)["features"](TASK.transform.clean(data.x))
        total.index_add_(0, data.y, z.double())
        count += data.y.bincount(minlength=TASK.num_classes)
    found = of.advance(state).server.prototypes
    assert_close(found.mean, total / count[:, None], "global prototypes", within=1e-5)
    assert torch.equal(found.count, count)


# ---- a client


def test_a_client_trains_by_the_share_of_its_round() -> None:
    state = usual(FedProc(), 1)
    known = state.server.prototypes
    assert known.is_known.all()
    assert TRAINING.rounds == 3

    def loss(parts: Parts, z: Tensor, batch: Batch) -> Tensor:
        rows = batch.weight > 0
        cosines = F.normalize(z[rows], dim=-1) @ F.normalize(known.mean, dim=-1).T
        contrast = F.cross_entropy(cosines, batch.y[rows])
        return 2 / 3 * contrast + 1 / 3 * F.cross_entropy(parts["classifier"](z)[rows], batch.y[rows])

    expected, _ = trained_by_hand(state.server.params, "ann", loss, round=1)  # the second of three: α = 1 − 1/3
    assert_close(reply_of(federation(FedProc()), state, "ann").upload.params, expected, "ann", within=2e-5)


def test_the_first_round_is_cross_entropy_alone() -> None:
    assert_same(usual(FedProc(), 1).server.params, usual(FedAvg(), 1).server.params, "the first round")
    assert fingerprint(usual(FedProc(), 2).server.params) != fingerprint(usual(FedAvg(), 2).server.params)


def test_with_the_closed_schedule_the_last_round_is_cross_entropy_alone() -> None:
    method = FedProc(schedule="closed")
    state = usual(method, 2)
    expected = reply_of(federation(FedAvg()), state, "ann").upload.params
    assert_same(reply_of(federation(method), state, "ann").upload.params, expected, "the last round")
