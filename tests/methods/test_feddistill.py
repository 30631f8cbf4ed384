"""FedDistill: three rounds against a plain reference, the loss and the teachers on numbers, and local training."""

from collections.abc import Callable
from math import exp, log

import pytest
import torch

from methods.conformance import (
    CHECKS,
    after,
    assert_same,
    batch_of,
    federation,
    identity_model,
    scripted,
    small_network,
    usual,
)
from protofed.api.method import Method
from protofed.methods.feddistill import FedDistill, ScoreSums, summed
from protofed.methods.local import LocalOnly
from protofed.prototypes.class_means import Prototypes, no_prototypes
from references import feddistill
from references.plain import largest_difference

METHOD, OF_ALL = FedDistill(), FedDistill(teacher="all")
PRESENT = [("ann", "bob", "cyd", "dan", "eve"), ("bob", "eve"), ("ann", "bob", "dan")]
"""Who takes part in three rounds."""


@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: Callable[[Method], None]) -> None:
    check(OF_ALL)


@pytest.mark.parametrize("method", [METHOD, OF_ALL], ids=["others", "all"])
def test_three_rounds_are_those_of_a_plain_reference(method: FedDistill) -> None:
    """The largest difference of a weight was 6e-8."""
    of = scripted(method, lambda t: PRESENT[t])
    initial = federation(LocalOnly()).server_context(0, "round").initial_params()
    expected = feddistill.rounds(small_network(), initial, PRESENT, 1.0, others=method.teacher == "others")
    found = after(3, of).memories
    assert found.keys() == expected.keys()
    assert max(largest_difference(found[c].params, expected[c]) for c in expected) < 5e-6


def test_the_loss_is_cross_entropy_with_the_label_and_with_the_softmax_of_the_mean_scores() -> None:
    known = Prototypes(torch.tensor([[log(3), 0.0], [0.0, 0.0]]), torch.tensor([2.0, 0.0]))
    model = identity_model([[1.0, 0.0], [0.0, 1.0]])  # scores are inputs
    batch = batch_of([[log(4), 0.0], [0.0, log(4)]], [0, 1])
    # Of both rows the label has probability 4/5. Nobody has sent class 1. For class 0 the teacher says 3/4 and 1/4:
    # −¾ log ⅘ − ¼ log ⅕, of which half counts in the mean over the batch.
    expected = -log(0.8) + 0.5 * (-(3 / 4 * log(0.8) + 1 / 4 * log(0.2)) / 2)
    assert FedDistill(distillation_weight=0.5).loss(model, batch, known).item() == pytest.approx(expected, abs=1e-6)


def test_mean_scores_are_of_the_rows_that_count() -> None:
    model = identity_model([[1.0, 0.0], [0.0, 1.0]])
    batch = batch_of([[1.0, 2.0], [3.0, 6.0], [9.0, 9.0]], [1, 1, 0], [1, 1, 0])
    found = ScoreSums(2)(model, batch).prototypes()
    assert found.mean.tolist() == [[0.0, 0.0], [2.0, 4.0]]
    assert found.count.tolist() == [0.0, 2.0]


def test_teachers_on_numbers() -> None:
    """Class 0 is sent by two clients, class 1 by one, class 2 by nobody; all means count alike."""

    def scores(rows: list[float]) -> Prototypes:
        known = torch.tensor([float(row != 0) for row in rows])
        return Prototypes(torch.tensor(rows)[:, None].expand(3, 3).contiguous(), known)

    sent = {"ann": scores([2.0, 0.0, 0.0]), "bob": scores([4.0, 8.0, 0.0]), "cyd": no_prototypes(3, 3)}
    state = summed(sent, 3)
    expected = {"ann": [4.0, 8.0, 0.0], "bob": [2.0, 0.0, 0.0], "cyd": [3.0, 8.0, 0.0], "a newcomer": [3.0, 8.0, 0.0]}
    known = {"ann": [1, 1, 0], "bob": [1, 0, 0], "cyd": [2, 1, 0], "a newcomer": [2, 1, 0]}
    for client, rows in expected.items():
        found = METHOD.message_for(state, client)
        assert found.mean[:, 0].tolist() == rows
        assert found.count.tolist() == known[client]
        assert OF_ALL.message_for(state, client).mean[:, 0].tolist() == [3.0, 8.0, 0.0]


def test_probabilities_of_a_teacher_are_those_of_the_mean_of_scores() -> None:
    # The mean of the scores (0, 0) and (2, 0) is (1, 0); the mean of their probabilities would be another.
    sent = {
        c: Prototypes(torch.tensor([[s, 0.0], [0.0, 0.0]]), torch.tensor([1.0, 0.0])) for c, s in (("a", 0), ("b", 2))
    }
    found = METHOD.message_for(summed(sent, 2), "c").mean[0].softmax(-1)
    assert found[0].item() == pytest.approx(exp(1) / (exp(1) + 1))


def test_a_client_that_was_away_counts_with_what_it_sent_last() -> None:
    of = scripted(METHOD, lambda t: PRESENT[t])
    first = of.advance(of.start())
    second = of.advance(first)
    assert_same(second.server.sent["cyd"], first.server.sent["cyd"], "cyd, who was away")
    assert usual(METHOD, 1).server.owners.sum() > 0
