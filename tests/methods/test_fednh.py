"""FedNH: cosines to prototypes that only the server turns, on the sphere, with and without a projection."""

import dataclasses
from math import log, sqrt
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from methods.conformance import (
    CHECKS,
    CLASSES,
    FEATURES,
    ODD_TASK,
    SIZES,
    TASK,
    after,
    assert_close,
    federation,
    loaded,
    reply_of,
    scripted,
    small_network,
    usual,
)
from protofed.data.batches import Batch
from protofed.methods._shared.models import embedding_dim
from protofed.methods.fednh import PROTOTYPES, FedNH, SphereClassifier, turned
from protofed.nn.networks import Parts, without
from protofed.prototypes.class_means import Prototypes

WIDTH = 5
SETTINGS = {
    "default": FedNH(),
    "fast and large": FedNH(smoothing=0.0, initial_scale=20.0),
    "by examples": FedNH(weighting="examples"),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Any, setting: str) -> None:
    check(SETTINGS[setting])


# ---- the classifier


def test_scores_are_the_scale_times_the_cosines() -> None:
    head = SphereClassifier(2, 2, 3.0)
    head.prototypes.copy_(torch.tensor([[1.0, 0.0], [0.6, 0.8]]))
    # (3, 4) / 5 has cosine 0.6 with the first prototype and 0.36 + 0.64 = 1 with the second.
    assert head(torch.tensor([[3.0, 4.0], [0.0, 0.0]])).flatten().tolist() == pytest.approx([1.8, 3.0, 0.0, 0.0])


@pytest.mark.parametrize(("num_classes", "dim"), [(4, 8), (4, 4), (7, 3)])
def test_prototypes_start_with_length_1_and_orthogonal_if_there_is_room(num_classes: int, dim: int) -> None:
    rows = SphereClassifier(num_classes, dim, 1.0).prototypes
    torch.testing.assert_close(rows.norm(dim=-1), torch.ones(num_classes))
    cosines = rows @ rows.T - torch.eye(num_classes)
    assert (cosines.abs().max() < 1e-5) == (num_classes <= dim)


def test_clients_train_the_scale_and_not_the_prototypes() -> None:
    of, state = federation(FedNH()), usual(FedNH(), 1)
    assert "classifier.scale" in of.networks_of("ann").trainable
    assert PROTOTYPES not in of.networks_of("ann").trainable
    sent = reply_of(of, state, "ann").upload.params
    assert torch.equal(sent[PROTOTYPES], state.server.params[PROTOTYPES])
    assert sent["classifier.scale"] != state.server.params["classifier.scale"]


# ---- the server


def test_a_prototype_is_turned_towards_the_direction_that_was_seen() -> None:
    prototypes = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8], [0.0, -1.0]])
    seen = Prototypes(
        torch.tensor([[0.0, 0.25], [-3.0, 0.0], [7.0, 7.0], [0.0, 0.0]]), torch.tensor([3.0, 1.0, 0.0, 2.0])
    )
    found = turned(prototypes, seen, 0.75)
    # Class 0: 0.75 · (1, 0) + 0.25 · (0, 1) = (3, 1) / 4, of length 1 (3, 1) / √10. Class 1: (−1, 3) / √10 alike.
    # Nobody has class 2, and the mean of class 3 has no direction: both stay.
    expected = [[3 / sqrt(10), 1 / sqrt(10)], [-1 / sqrt(10), 3 / sqrt(10)]]
    torch.testing.assert_close(found[:2], torch.tensor(expected))
    assert torch.equal(found[2:], prototypes[2:])


def test_opposite_directions_of_equal_weight_leave_a_prototype_as_it_is() -> None:
    prototypes = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.28, -0.96]])
    assert torch.equal(turned(prototypes, Prototypes(-prototypes, torch.ones(3)), 0.5), prototypes)


def test_classes_whose_features_are_all_zero_keep_their_prototypes_exactly() -> None:
    """Also where rounding has left a length that is not exactly 1."""
    prototypes = F.normalize(torch.randn(200, 3, generator=torch.Generator().manual_seed(0)), dim=-1)
    for smoothing in (0.0, 0.7):
        found = turned(prototypes, Prototypes(torch.zeros(200, 3), torch.ones(200)), smoothing)
        assert torch.equal(found, prototypes)


def direction(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_a_round_is_that_of_a_slow_reference(weighting: Any) -> None:
    method = FedNH(smoothing=0.8, weighting=weighting)
    of, state = federation(method), usual(method, 1)
    total = torch.zeros(CLASSES, FEATURES, dtype=torch.float64)
    count = torch.zeros(CLASSES, dtype=torch.float64)
    params = []
    for client, data in TASK.clients.items():
        upload = reply_of(of, state, client).upload
        params.append(upload.params)
        with torch.no_grad():
            features = loaded(without(upload.params, ("classifier.*",)), training=False)["features"]
            z = direction(features(TASK.transform.clean(data.x)).double())
        for c in data.y.unique().tolist():
            own, number = direction(z[data.y == c].mean(0)), int((data.y == c).sum())
            torch.testing.assert_close(upload.prototypes.mean[c].double(), own, rtol=0, atol=1e-5)
            assert upload.prototypes.count[c] == number
            total[c] += number * own
            count[c] += number
    assert (count > 0).all()
    found = of.advance(state).server.params
    previous = state.server.params[PROTOTYPES].double()
    expected = direction(0.8 * previous + 0.2 * direction(total / count[:, None]))
    torch.testing.assert_close(found[PROTOTYPES].double(), expected, rtol=0, atol=1e-5)
    sizes = [SIZES[client] if weighting == "examples" else 1 for client in TASK.clients]
    means = {
        name: sum(size * own[name].double() for size, own in zip(sizes, params, strict=True)) / sum(sizes)
        for name in params[0]
    }
    assert_close(without(found, (PROTOTYPES,)), without(means, (PROTOTYPES,)), "weights", within=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.9])
def test_prototypes_stay_on_the_sphere_and_that_of_an_absent_class_stays_where_it_is(smoothing: float) -> None:
    of = federation(FedNH(smoothing=smoothing), ODD_TASK)
    state = of.start()
    for _ in range(3):
        before, state = state.server.params[PROTOTYPES], of.advance(state)
        now = state.server.params[PROTOTYPES]
        torch.testing.assert_close(now.norm(dim=-1), torch.ones(CLASSES), rtol=0, atol=1e-6)
        assert torch.equal(now[3], before[3])  # nobody has class 3
        assert ((now[:3] - before[:3]).abs().amax(-1) > 1e-4).all()


def test_a_class_that_is_absent_in_one_round_only_keeps_its_prototype_in_that_round() -> None:
    labels = {client: set(data.labels.tolist()) for client, data in TASK.clients.items()}
    alone = next(client for client in sorted(labels) if len(labels[client]) < CLASSES)
    absent = sorted(set(range(CLASSES)) - labels[alone])
    of = scripted(FedNH(), lambda t: (alone,) if t == 1 else tuple(sorted(TASK.clients)))
    states = [of.start()]
    for _ in range(3):
        states.append(of.advance(states[-1]))
    rows = [state.server.params[PROTOTYPES] for state in states]
    for c in range(CLASSES):
        assert torch.equal(rows[2][c], rows[1][c]) == (c in absent)
        assert not torch.equal(rows[3][c], rows[2][c])


# ---- a client


class Head(nn.Module):
    """Plain torch: scaled cosines to fixed rows."""

    def __init__(self, rows: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.scale, self.rows = scale, rows

    def forward(self, z: Tensor) -> Tensor:
        return self.scale * F.cosine_similarity(z[:, None], self.rows[None], dim=-1)


def test_a_client_trains_by_cross_entropy_of_the_scaled_cosines() -> None:
    method = FedNH(initial_scale=2.0)
    of, state = federation(method), usual(method, 1)
    model = of.networks_of("ann").model(state.server.params)
    x = TASK.transform.clean(TASK.tests["domain 0"].x)
    head = Head(state.server.params[PROTOTYPES], state.server.params["classifier.scale"])
    with torch.no_grad():
        torch.testing.assert_close(method.predict(model, x, state.server, None), head(model.features(x)))
    # Gradients at the received weights, by the method and by plain torch.
    params = state.server.params
    own = {name: leaf.clone().requires_grad_(name in model.networks.trainable) for name, leaf in params.items()}
    data = TASK.clients["ann"]
    batch = Batch(
        TASK.transform.clean(data.x), data.y, torch.ones(len(data)), data.index, torch.tensor(True), torch.tensor(0)
    )
    loss = method.loss(of.networks_of("ann").model(own, training=True), batch, state.server, None)
    found = torch.autograd.grad(loss, [own["features.0.weight"], own["classifier.scale"]])
    features = loaded(without(params, ("classifier.*",)), training=True)["features"]
    scale = params["classifier.scale"].clone().requires_grad_()
    plain = F.cross_entropy(Head(params[PROTOTYPES], scale)(features(batch.x)), batch.y)
    expected = torch.autograd.grad(plain, [features[0].weight, scale])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_at_the_start_of_a_tiny_scale_the_loss_is_log_c() -> None:
    of = federation(FedNH(initial_scale=1e-6))
    model = of.networks_of("ann").model(of.start().server.params, training=True)
    data = TASK.clients["ann"]
    batch = Batch(
        TASK.transform.clean(data.x), data.y, torch.ones(len(data)), data.index, torch.tensor(True), torch.tensor(0)
    )
    assert of.method.loss(model, batch, None, None).item() == pytest.approx(log(CLASSES), abs=1e-5)


# ---- a projection


def projected_network(client: str) -> Parts:
    parts = small_network(client)
    projection = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, WIDTH))
    return {"features": parts["features"], "projection": projection, "classifier": nn.Linear(WIDTH, CLASSES)}


PROJECTED = dataclasses.replace(TASK, model=projected_network)


def test_behind_a_projection_the_sphere_is_that_of_its_output() -> None:
    assert embedding_dim(PROJECTED.spec, projected_network("")) == WIDTH
    assert embedding_dim(TASK.spec, small_network("")) == FEATURES
    of = federation(FedNH(), PROJECTED)
    state = after(2, of)
    assert not state.failures
    assert state.server.params[PROTOTYPES].shape == (CLASSES, WIDTH)
    upload = reply_of(of, state, "ann").upload
    model, data = of.networks_of("ann").model(upload.params), TASK.clients["ann"]
    with torch.no_grad():
        z = direction(model.projection(model.features(TASK.transform.clean(data.x))))
        scores = FedNH().predict(model, TASK.transform.clean(data.x), state.server, None)
    for c in data.y.unique().tolist():
        expected = direction(z[data.y == c].mean(0))
        torch.testing.assert_close(upload.prototypes.mean[c], expected, rtol=0, atol=1e-5)
    expected = upload.params["classifier.scale"] * z @ state.server.params[PROTOTYPES].T
    torch.testing.assert_close(scores, expected)
