"""GRACE: the client's two-step objective as reconstructed, and the server's mean by agreement."""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from methods.conformance import (
    CHECKS,
    FEATURES,
    TASK,
    TRAINING,
    after,
    assert_close,
    assert_finite,
    assert_same,
    batch_of,
    federation,
    fingerprint,
    loaded,
    reply_of,
    usual,
)
from protofed.api.method import Method
from protofed.api.task import ClientId, TaskSpec
from protofed.data.batches import Batch, batch_at, training_plan
from protofed.errors import BadInput
from protofed.methods.families import Weights, WeightUpload
from protofed.methods.fedavg import FedAvg
from protofed.methods.grace import GRACE, agreement, coral, covariance, halves, stepped
from protofed.nn.networks import Parts
from protofed.tree import Nothing, Params

SETTINGS = [GRACE(), GRACE(alignment_weight=0.0, server_rate=0.5)]


@pytest.mark.parametrize("method", SETTINGS, ids=repr)
@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: Callable[[Method], None], method: GRACE) -> None:
    check(method)


# ---- the server


def served(method: Any, uploads: list[tuple[str, WeightUpload]]) -> Params:
    of, state = federation(GRACE()), usual(GRACE(), 1)
    return method.aggregate(state.server, iter(uploads), of.server_context(1, "round")).params


def uploads_of(*clients: str) -> list[tuple[str, WeightUpload]]:
    return [(client, reply_of(federation(GRACE()), usual(GRACE(), 1), client).upload) for client in clients]


def test_with_equal_cosines_the_server_is_that_of_fedavg() -> None:
    uploads = uploads_of("ann", "bob")  # of two, each has the cosine with the other
    assert_same(served(GRACE(), uploads), served(FedAvg(), uploads), "the mean of two")
    alone = uploads_of("cyd")
    assert_same(served(GRACE(), alone), served(FedAvg(), alone), "the mean of one")
    three = uploads_of("ann", "bob", "cyd")
    assert fingerprint(served(GRACE(), three)) != fingerprint(served(FedAvg(), three))


def test_updates_that_point_away_from_each_other_still_have_a_mean() -> None:
    server = usual(GRACE(), 1).server.params
    up, down = ({n: leaf + sign * torch.ones_like(leaf) for n, leaf in server.items()} for sign in (1, -1))
    uploads = [("ann", WeightUpload(up, torch.tensor(3))), ("bob", WeightUpload(down, torch.tensor(1)))]
    assert_same(served(GRACE(), uploads), served(FedAvg(), uploads), "the mean of opposites")


def test_agreement_is_the_mean_cosine_with_the_others_relative_to_the_best() -> None:
    # Rows (1, 0), (0, 2), (3, 3): cosines 0, 1/√2, 1/√2. Means: ½/√2, ½/√2, 1/√2; relative to the best ½, ½, 1.
    rows = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]], dtype=torch.float64)
    assert agreement(rows).tolist() == pytest.approx([0.5, 0.5, 1.0])


def test_negative_agreement_is_shifted() -> None:
    # Rows (1, 0), (1, 1), (−1, 0): cosines 1/√2, −1, −1/√2. Means: a = (1/√2 − 1)/2, 0, c = −(1 + 1/√2)/2.
    # Less the least, c, and 0.001 more: a − c = 1/√2, −c, 0; the best is −c + 0.001.
    rows = torch.tensor([[1.0, 0.0], [1.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    least = (1 + 1 / sqrt(2)) / 2
    best = least + 1e-3
    assert agreement(rows).tolist() == pytest.approx([(1 / sqrt(2) + 1e-3) / best, 1.0, 1e-3 / best])


def test_without_any_agreement_all_count_the_same() -> None:
    assert agreement(torch.eye(3, dtype=torch.float64)).tolist() == [1.0, 1.0, 1.0]
    assert agreement(torch.zeros(2, 4, dtype=torch.float64)).tolist() == [1.0, 1.0]


def test_the_mean_is_weighted_by_examples_and_agreement_of_parameters() -> None:
    uploads, server = uploads_of("ann", "bob", "cyd", "dan"), usual(GRACE(), 1).server.params
    names = federation(GRACE()).networks_of("ann").trainable
    assert "features.1.running_mean" not in names
    updates = [
        np.concatenate([(server[n].double() - u.params[n].double()).flatten() for n in names]) for _, u in uploads
    ]
    unit = [row / np.linalg.norm(row) for row in updates]
    cosines = [np.mean([a @ b for j, b in enumerate(unit) if j != i]) for i, a in enumerate(unit)]
    assert min(cosines) >= 0
    weights = [c * u.num_examples.item() for c, (_, u) in zip(cosines, uploads, strict=True)]
    expected = {
        name: sum(w * u.params[name].double() for w, (_, u) in zip(weights, uploads, strict=True)) / sum(weights)
        for name in server
    }
    assert_close(served(GRACE(), uploads), expected, "the mean", within=1e-6)


def test_the_server_goes_part_of_the_way_with_parameters_and_all_of_it_with_statistics() -> None:
    # A quarter of the way from 2 to 6 is 3.
    start, mean = ({"w": torch.tensor(v), "s": torch.tensor(v)} for v in (2.0, 6.0))
    found = stepped(start, mean, ("w",), 0.25)
    assert (found["w"].item(), found["s"].item()) == (3.0, 6.0)
    uploads = uploads_of("ann", "bob", "cyd")
    half, full = served(GRACE(server_rate=0.5), uploads), served(GRACE(), uploads)
    old, name = usual(GRACE(), 1).server.params, "classifier.weight"
    torch.testing.assert_close(half[name], (old[name] + full[name]) / 2, rtol=1e-6, atol=1e-7)
    assert torch.equal(half["features.1.running_var"], full["features.1.running_var"])


# ---- the client


def test_a_batch_is_halved_by_every_other_row() -> None:
    batch = batch_of([[0.0], [1.0], [2.0], [3.0], [4.0]], [0, 1, 2, 3, 0], [1, 1, 1, 1, 0])
    first, second = halves(batch)
    assert (first.y.tolist(), first.weight.tolist()) == ([0, 2, 0], [1, 1, 0])
    assert (second.x.tolist(), second.y.tolist(), second.weight.tolist()) == ([[1], [3]], [1, 3], [1, 1])


def test_rows_that_fill_the_batch_stand_in_for_a_second_half() -> None:
    _, second = halves(batch_of([[5.0]] * 4, [2] * 4, [1, 0, 0, 0]))
    assert second.weight.tolist() == [1, 1]


def test_batches_that_cannot_be_halved_are_refused() -> None:
    with pytest.raises(BadInput, match="batch size of at least 2"):
        halves(batch_of([[1.0]], [0]))


@dataclass(frozen=True)
class Normalised(GRACE):
    """Its features go through BatchNorm over features, which sees one value in each row."""

    def networks(self, spec: TaskSpec, client: ClientId) -> Parts:
        parts = spec.model(client)
        return {**parts, "features": nn.Sequential(parts["features"], nn.BatchNorm1d(FEATURES))}


@pytest.mark.parametrize("batch_size", [2, 3])
def test_halves_of_one_row_are_refused_before_the_run_where_batchnorm_needs_two(batch_size: int) -> None:
    with pytest.raises(BadInput, match=r"training\.batch_size: GRACE halves .* set it to 4 or more"):
        federation(Normalised(), batch_size=batch_size)
    state = after(1, federation(GRACE(), batch_size=batch_size))  # BatchNorm over images has many values in each row
    assert not state.failures


def test_halves_of_two_rows_are_enough_for_batchnorm() -> None:
    state = after(2, federation(Normalised(), batch_size=4))
    assert not state.failures
    assert_finite(state.server, "the weights")


def test_covariance_is_of_the_rows_that_count() -> None:
    z = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    weight = torch.tensor([1.0, 1, 0, 1, 1, 0, 1])
    expected = np.cov(z[weight > 0].double().numpy().T)
    np.testing.assert_allclose(covariance(z, weight).numpy(), expected, atol=1e-6)
    assert covariance(z, torch.eye(7)[0]).abs().sum() == 0


def test_coral_is_the_squared_distance_of_covariances_over_four_times_the_dimensions_squared() -> None:
    # One dimension apart: covariances of ±1 and of ±3 over 2 rows are 2 and 18. (16)² / (4 · 2²) = 16.
    z, target = torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), torch.tensor([[3.0, 7.0], [-3.0, 7.0]])
    assert coral(z, target, torch.ones(2)).item() == pytest.approx(16.0)


def two_steps(method: GRACE, params: Params, received: Params, batch: Batch) -> tuple[Params, Params]:
    """The gradient at the place of the trial step, by plain torch; and the statistics after it."""
    parts = loaded(params, training=True)
    named = {f"{part}.{name}": p for part, module in parts.items() for name, p in module.named_parameters()}
    rows = [[i for i in range(k, len(batch.y), 2) if batch.weight[i] > 0] for k in (0, 1)]
    everything = [list(range(k, len(batch.y), 2)) for k in (0, 1)]
    second = rows[1] or everything[1]

    def logits(half: list[int], among: list[int]) -> tuple[Tensor, Tensor]:
        z = parts["features"](batch.x[among])  # BatchNorm sees the rows that fill the batch
        kept = z[[among.index(i) for i in half]]
        return parts["classifier"](kept), kept

    F.cross_entropy(logits(rows[0], everything[0])[0], batch.y[rows[0]]).backward()
    with torch.no_grad():
        for p in named.values():
            p.sub_(method.trial_rate * p.grad)
            p.grad = None
    untouched = loaded(params, training=True)["features"].state_dict()
    for name, leaf in parts["features"].named_buffers():
        leaf.copy_(untouched[name])  # the trial does not move statistics
    scores, z = logits(second, everything[1])
    with torch.no_grad():
        z_received = loaded(received, training=False)["features"](batch.x[second])
    gap = torch.cov(z.T) - torch.cov(z_received.T) if len(second) > 1 else torch.zeros(1)
    (F.cross_entropy(scores, batch.y[second]) + 0.1 * gap.square().sum() / (4 * 8**2)).backward()
    statistics = {f"features.{name}": leaf for name, leaf in parts["features"].named_buffers()}
    return {name: p.grad for name, p in named.items()}, statistics


def test_a_client_descends_the_gradient_after_the_trial_step() -> None:
    method = GRACE(trial_rate=0.5)
    state = usual(method, 1)
    of, received = federation(method), state.server.params
    request = method.train(of.client_context("ann", 1), state.server, Nothing()).send(None)
    draws = torch.Generator().manual_seed(request.seed)
    plan = training_plan(TASK.clients["ann"], TRAINING.batch_size, TRAINING.epochs, TASK.transform, draws)
    sgd, params = TRAINING.optimizer, dict(received)
    momentum = {name: torch.zeros_like(params[name]) for name in of.networks_of("ann").trainable}
    for step in range(len(plan.index)):
        grads, statistics = two_steps(
            method, params, received, batch_at(TASK.clients["ann"], plan, step, TASK.transform)
        )
        for name, grad in grads.items():
            momentum[name] = sgd.momentum * momentum[name] + grad + sgd.weight_decay * params[name]
            params[name] = params[name] - sgd.lr * momentum[name]
        params |= {name: leaf for name, leaf in statistics.items() if name in params}
    found = reply_of(of, state, "ann").upload.params
    assert_close(found, params, "ann's weights", within=2e-5)
    assert fingerprint(found) != fingerprint(reply_of(federation(GRACE()), usual(GRACE(), 1), "ann").upload.params)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (GRACE(), GRACE(alignment_weight=0.0)),
        (GRACE(), GRACE(trial_rate=0.0)),
        (GRACE(), GRACE(server_rate=0.5)),
        (GRACE(), FedAvg()),
    ],
    ids=["the alignment", "the trial step", "the server's rate", "FedAvg"],
)
def test_a_setting_makes_a_difference(one: Method, other: Method) -> None:
    assert fingerprint(usual(one, 2).server) != fingerprint(usual(other, 2).server)


def test_without_trial_and_alignment_the_loss_is_that_of_the_second_half() -> None:
    of = federation(GRACE())
    networks, params = of.networks_of("ann"), of.start().server.params
    leaves = {n: p.clone().requires_grad_(n in networks.trainable) for n, p in params.items()}
    data = TASK.clients["ann"]
    batch = batch_of(TASK.transform.clean(data.x), data.y)
    method = GRACE(trial_rate=0.0, alignment_weight=0.0)
    found = method.loss(networks.model(leaves, training=True), batch, Weights(params), Nothing())
    parts = loaded(params, training=True)
    expected = F.cross_entropy(parts["classifier"](parts["features"](batch.x[1::2])), batch.y[1::2])
    assert found.item() == pytest.approx(expected.item(), abs=1e-6)
