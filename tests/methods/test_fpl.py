"""FPL: its prototypes (Eq. 2 to 6), its losses (Eq. 7 to 12), and the cases that the paper leaves out."""

from math import cos, exp, log, radians, sin

import pytest
import torch
from torch import Tensor

from doubles import sum_of
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
from protofed.data.batches import Batch
from protofed.methods._shared.targets import Targets
from protofed.methods.fedavg import FedAvg
from protofed.methods.fpl import FPL
from protofed.nn.networks import Parts
from protofed.prototypes.class_means import Prototypes

# The prototypes of one class at five clients: three in one direction, two in another.
TWO_DIRECTIONS = [[2.0, 0.0], [4.0, 0.0], [3.0, 0.3], [0.0, 1.0], [0.0, 3.0]]


GLOBAL = FPL(contrast_with="global", consistent_with="global")


def client(*rows: list[float] | None) -> Prototypes:
    """A client's prototypes; None for a class that it does not have."""
    means = [[0.0, 0.0] if row is None else row for row in rows]
    return Prototypes(torch.tensor(means), torch.tensor([0.0 if row is None else 5.0 for row in rows]))


def combined(clients: list[Prototypes], method: FPL | None = None, previous: Targets | None = None) -> Targets:
    method = method or FPL()
    previous = previous or method.no_prototypes(len(clients[0].mean), 2)
    if method.sums:
        return method.combine(sum_of(map(method.added, clients)), previous)
    return method.clustered(clients, previous)


def rows(known: Targets, c: int) -> list[list[float]]:
    """The cluster prototypes of a class, in an order of their own."""
    return sorted(known.clusters[known.label == c].tolist())


# ---- the server


def test_unbiased_prototypes_count_each_cluster_once_and_global_ones_each_client() -> None:
    clients = [client(row, None) for row in TWO_DIRECTIONS]
    known, plain = combined(clients), combined(clients, GLOBAL)
    # Clusters: ((2, 0) + (4, 0) + (3, 0.3)) / 3 = (3, 0.1) and ((0, 1) + (0, 3)) / 2 = (0, 2), Eq. (5).
    # Unbiased: ((3, 0.1) + (0, 2)) / 2 = (1.5, 1.05), Eq. (6).
    # Global: (2 + 4 + 3) / 5 = 1.8 and (0.3 + 1 + 3) / 5 = 0.86, Eq. (3): nearer to the larger cluster.
    torch.testing.assert_close(torch.tensor(rows(known, 0)), torch.tensor([[0.0, 2.0], [3.0, 0.1]]))
    torch.testing.assert_close(known.consistent.mean[0], torch.tensor([1.5, 1.05]))
    torch.testing.assert_close(plain.consistent.mean[0], torch.tensor([1.8, 0.86]))
    torch.testing.assert_close(torch.tensor(rows(plain, 0)), torch.tensor([[1.8, 0.86]]))


def test_numbers_of_examples_do_not_weigh_prototypes() -> None:
    heavy = Prototypes(torch.tensor([[2.0, 0.0]]), torch.tensor([1000.0]))
    light = Prototypes(torch.tensor([[4.0, 0.0]]), torch.tensor([1.0]))
    for method in (FPL(), GLOBAL):
        known = combined([heavy, light], method)
        # (2 + 4) / 2 = 3, where weights would give 2.002.
        assert rows(known, 0) == known.consistent.mean.tolist() == [[3.0, 0.0]]


def test_a_class_that_one_client_has_is_that_clients_prototype() -> None:
    clients = [client([2.0, 0.0], None), client([4.0, 0.0], None), client([3.0, 0.3], [5.0, 6.0])]
    for method in (FPL(), GLOBAL):
        known = combined(clients, method)
        assert rows(known, 1) == [[5.0, 6.0]]
        assert known.consistent.mean[1].tolist() == [5.0, 6.0]


def test_a_class_that_nobody_has_is_not_known() -> None:
    known = combined([client(row, None) for row in TWO_DIRECTIONS])
    assert rows(known, 1) == []
    assert known.consistent.is_known.tolist() == [True, False]


def test_a_class_that_nobody_sends_this_time_keeps_its_prototypes() -> None:
    before = combined([client(None, row) for row in TWO_DIRECTIONS])
    known = combined([client([1.0, 1.0], None), client([1.0, 2.0], None)], previous=before)
    assert rows(known, 1) == rows(before, 1)
    assert len(rows(known, 1)) == 2
    assert_same(known.consistent.mean[1], before.consistent.mean[1], "the prototype of the consistency")
    assert known.consistent.is_known.tolist() == [True, True]


def test_the_first_partition_of_finch_is_finer_than_the_last() -> None:
    degrees = [0, 1, 10, 11, 60, 61, 75, 76]
    clients = [client([cos(radians(d)), sin(radians(d))]) for d in degrees]
    # First neighbours pair 0 with 1, 10 with 11, 60 with 61, 75 with 76. The means lie at 0.5, 10.5, 60.5 and 75.5
    # degrees and pair again: {0, 1, 10, 11} and {60, 61, 75, 76}. The next partition would be one cluster.
    assert len(rows(combined(clients, FPL(finch_level="first")), 0)) == 4
    last = combined(clients, FPL(finch_level="last"))
    expected = [
        [sum(f(radians(d)) for d in group) / 4 for f in (cos, sin)] for group in ([60, 61, 75, 76], [0, 1, 10, 11])
    ]
    torch.testing.assert_close(torch.tensor(rows(last, 0)), torch.tensor(expected))


def test_a_real_run_finds_more_than_one_cluster() -> None:
    """Otherwise runs would say nothing about clusters."""
    known = usual(FPL(), 1).server.prototypes
    assert known.label.bincount().max() > 1
    assert not torch.equal(known.consistent.mean, usual(GLOBAL, 1).server.prototypes.consistent.mean)


# ---- the loss


def test_the_contrast_by_hand() -> None:
    # z = (1, 0). Class 0 has prototypes along (1, 0) and (0, 1), class 1 along (−1, 0): cosines 1, 0 and −1.
    clusters = torch.tensor([[2.0, 0.0], [0.0, 3.0], [-1.0, 0.0], [0.0, 0.0]])
    nothing = Prototypes(torch.zeros(2, 2), torch.zeros(2))
    known = Targets(clusters, torch.tensor([0, 0, 1, -1]), nothing)
    z = torch.tensor([[5.0, 0.0], [5.0, 0.0]])
    found = FPL(consistency=False, temperature=0.5).prototype_loss(z, batch_of(z, [0, 1]), known)
    # τ = 0.5: of class 0, −log((e² + e⁰) / (e² + e⁰ + e⁻²)); of class 1, −log(e⁻² / (e² + e⁰ + e⁻²)).
    everything = exp(2) + 1 + exp(-2)
    assert found[0].item() == pytest.approx(-log((exp(2) + 1) / everything), abs=1e-6)
    assert found[1].item() == pytest.approx(-log(exp(-2) / everything), abs=1e-6)


@pytest.mark.parametrize(("reduction", "expected"), [("mean", 5.0), ("sum", 10.0)])
def test_the_consistency_by_hand(reduction: str, expected: float) -> None:
    unbiased = Prototypes(torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.tensor([3.0, 0.0]))
    known = Targets(torch.zeros(1, 2), torch.tensor([-1]), unbiased)
    z = torch.tensor([[2.0, 4.0], [9.0, 9.0]])
    method = FPL(contrast=False, consistency_reduction=reduction)
    # (2 − 1)² + (4 − 1)² = 10, or 5 on average; the second class has no prototype.
    assert method.prototype_loss(z, batch_of(z, [0, 1]), known).tolist() == [expected, 0.0]


def known_and_batch() -> tuple[Targets, Batch, Tensor]:
    """Three clusters for class 0, one for class 1, none for class 2, two for class 3; a batch with all classes."""
    draws = torch.Generator().manual_seed(0)
    label = torch.tensor([0, 0, 0, 1, 3, 3])
    clusters = torch.rand(6, FEATURES, generator=draws)
    count = torch.tensor([9.0, 1.0, 0.0, 4.0])
    consistent = Prototypes(torch.rand(4, FEATURES, generator=draws) * (count > 0)[:, None], count)
    x = torch.rand(7, FEATURES, generator=draws)
    batch = batch_of(x, [0, 1, 2, 3, 0, 3, 1], [1, 1, 1, 1, 1, 0, 1])
    return Targets(clusters, label, consistent), batch, torch.rand(4, FEATURES, generator=draws)


def loss_by_hand(method: FPL, known: Targets, batch: Batch, classifier: Tensor) -> float:
    """Eq. (12), an example at a time, with plain exp in float64."""
    total, counted = 0.0, 0
    for z, y, weight in zip(batch.x.double(), batch.y.tolist(), batch.weight.tolist(), strict=True):
        if not weight:
            continue
        counted += 1
        logits = classifier.double() @ z
        total += -log(logits[y].exp().item() / logits.exp().sum().item())
        by_class = {c: known.clusters[known.label == c] for c in known.label.unique().tolist()}
        if method.contrast and y in by_class:
            shares = {
                c: sum(exp(float(z @ p.double() / (z.norm() * p.double().norm())) / method.temperature) for p in own)
                for c, own in by_class.items()
            }
            total += -log(shares[y] / sum(shares.values()))
        if method.consistency and y in by_class:
            target = known.consistent.mean[y].double()
            squares = sum((float(a) - float(b)) ** 2 for a, b in zip(z, target, strict=True))
            total += squares / len(z) if method.consistency_reduction == "mean" else squares
    return total / counted


@pytest.mark.parametrize(
    "method",
    [
        FPL(),
        FPL(consistency_reduction="sum"),
        FPL(contrast=False),
        FPL(consistency=False, temperature=0.2),
        FPL(contrast=False, consistency=False),
    ],
    ids=repr,
)
def test_the_loss_of_a_batch_is_equation_12(method: FPL) -> None:
    known, batch, classifier = known_and_batch()
    found = method.loss(identity_model(classifier), batch, known)
    assert found.item() == pytest.approx(loss_by_hand(method, known, batch, classifier), rel=1e-5, abs=1e-5)


def test_a_temperature_at_which_exp_overflows_trains() -> None:
    known, batch, _ = known_and_batch()
    opposite = torch.cat([-known.clusters[:1], known.clusters[3:4], torch.zeros(1, FEATURES)])
    z = torch.cat([batch.x, opposite]).requires_grad_()
    y = torch.cat([batch.y, torch.tensor([0, 1, 0])])
    loss = FPL(temperature=0.01).prototype_loss(z, batch_of(z.detach(), y), known)
    (gradient,) = torch.autograd.grad(loss[:-1].sum(), z)
    assert torch.isfinite(loss).all()
    assert torch.isfinite(gradient).all()
    # cos −1 to one of its own prototypes: about (cos of the best other − cos of the best own) / τ, tens, not NaN.
    assert loss[7].item() > 1
    assert torch.exp(torch.tensor(1 / 0.01)).isinf()


def test_no_gradient_reaches_prototypes() -> None:
    known, batch, _ = known_and_batch()
    leaves = [known.clusters, known.consistent.mean]
    for leaf in leaves:
        leaf.requires_grad_()
    z = batch.x.requires_grad_()
    loss = FPL().prototype_loss(z, batch, known).sum()
    gradient, *others = torch.autograd.grad(loss, [z, *leaves], allow_unused=True)
    assert gradient.abs().sum() > 0
    assert others == [None, None]


# ---- the client


def means_of(z: Tensor, y: Tensor) -> Prototypes:
    """Eq. (2) by a loop."""
    mean, count = torch.zeros(CLASSES, FEATURES), torch.zeros(CLASSES)
    for c in y.unique().tolist():
        mean[c], count[c] = z[y == c].double().mean(0).float(), 1.0  # which classes, not how many examples of each
    return Prototypes(mean, count)


def test_a_client_descends_equation_12_and_sends_the_mean_features_of_its_last_epoch() -> None:
    state = usual(FPL(temperature=0.5), 1)
    known = state.server.prototypes

    def loss(parts: Parts, z: Tensor, batch: Batch) -> Tensor:
        rows = batch.weight > 0
        shares = (torch.nn.functional.cosine_similarity(z[:, None], known.clusters, dim=-1) / 0.5).softmax(-1)
        own = (shares * (known.label == batch.y[:, None])).sum(-1)
        pull = (z - known.consistent.mean[batch.y]).square().mean(-1)
        return mean_cross_entropy(parts, z, batch) + (-own.log() + pull)[rows].mean()

    expected, seen = trained_by_hand(state.server.params, "ann", loss, round=1)
    reply = reply_of(federation(FPL(temperature=0.5)), state, "ann").upload
    assert_close(reply.params, expected, "ann's weights", within=2e-5)
    # Two epochs of two batches (11 examples, batches of 8): the last two batches, in training mode as they came.
    last = seen[2:]
    z = torch.cat([z[batch.weight > 0] for batch, z in last])
    y = torch.cat([batch.y[batch.weight > 0] for batch, _ in last])
    assert len(seen) == 4
    assert len(y) == 11
    assert_close(reply.prototypes, means_of(z, y), "ann's prototypes", within=2e-5)


def test_recomputed_prototypes_are_the_mean_features_of_the_final_weights_in_evaluation_mode() -> None:
    method = FPL(prototype_mode="recomputed")
    reply = reply_of(federation(method), usual(method, 1), "ann").upload
    data = TASK.clients["ann"]
    with torch.no_grad():
        z = loaded(reply.params, training=False)["features"](TASK.transform.clean(data.x))
    assert_close(reply.prototypes, means_of(z, data.y), "ann's prototypes", within=1e-5)
    running = reply_of(federation(FPL()), usual(FPL(), 1), "ann").upload
    assert (running.prototypes.mean - reply.prototypes.mean).abs().max() > 1e-3


def test_the_first_round_is_cross_entropy_alone() -> None:
    assert usual(FPL(), 0).server.prototypes.label.tolist() == [-1]
    assert_same(usual(FPL(), 1).server.params, usual(FedAvg(), 1).server.params, "the first round")
