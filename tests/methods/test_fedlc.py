"""FedLC: the calibrated scores by hand, both sums, and three rounds against a plain torch loop."""

from collections.abc import Callable
from math import exp, log

import pytest
import torch

from methods.conformance import CHECKS, TASK, assert_same, batch_of, federation, identity_model, small_task, usual
from protofed.api.method import Method
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedlc import FedLC, calibrated, loss_against_others
from protofed.prototypes.contrast import ABSENT
from references import fedlc
from references.plain import SGD, counted_batches, largest_difference, network

LABELS = {client: data.labels for client, data in TASK.clients.items()}
PAPER = FedLC(competitors="other classes")


@pytest.mark.parametrize("method", [FedLC(), FedLC(margin_weight=2.0), PAPER], ids=repr)
def test_three_rounds_are_those_of_the_reference(method: FedLC) -> None:
    """The largest difference of a weight is 1.2e-7."""
    with_true = method.competitors == "all classes"
    expected = fedlc.rounds(network(), LABELS, counted_batches, 3, SGD, method.margin_weight, with_true)
    assert largest_difference(usual(method, 3).server.params, expected) < 5e-6


def test_scores_are_lowered_by_the_fourth_root_of_the_count_and_absent_classes_are_out() -> None:
    # 16 examples: 2 · 16^(−1/4) = 1. One example: 2. None: out.
    found = calibrated(torch.tensor([[5.0, 5.0, 5.0]]), torch.tensor([16, 1, 0]), 2.0)
    assert found.tolist() == [[4.0, 3.0, ABSENT]]


def test_the_loss_is_cross_entropy_of_the_calibrated_scores() -> None:
    model = identity_model([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    batch, count = batch_of([[2.0, 0.0]], [1]), torch.tensor([16, 1, 0])
    # Scores 2, 0, 0 become 2 − ½, 0 − 1 and out: −(−1) + log(e^1.5 + e^−1), and without the true class 1 + 1.5.
    loss = FedLC(margin_weight=1.0).calibrated_loss(model, batch, count)
    assert loss.item() == pytest.approx(1 + log(exp(1.5) + exp(-1)), abs=1e-6)
    assert PAPER.calibrated_loss(model, batch, count).item() == pytest.approx(2.5, abs=1e-6)


def test_a_client_of_one_class_has_no_loss_against_others() -> None:
    scores = torch.tensor([[1.0, ABSENT]], requires_grad=True)
    loss = loss_against_others(scores, torch.tensor([0])).sum()
    loss.backward()
    assert loss.item() == 0
    assert scores.grad is not None
    assert scores.grad.tolist() == [[0.0, 0.0]]


def test_without_margins_a_client_that_has_all_classes_learns_as_in_fedavg() -> None:
    task = small_task({"ann": [0, 1, 2, 3, 0, 1, 2, 3, 3], "bob": [3, 2, 2, 1, 0]})
    ours, plain = (federation(method, task) for method in (FedLC(margin_weight=0.0), FedAvg()))
    assert_same(ours.advance(ours.start()).server, plain.advance(plain.start()).server, "the weights")
    assert not torch.equal(
        usual(FedLC(), 1).server.params["classifier.weight"], usual(FedAvg(), 1).server.params["classifier.weight"]
    )


@pytest.mark.parametrize("check", CHECKS)
def test_the_other_version_conforms(check: Callable[[Method], None]) -> None:
    check(PAPER)
