"""FedETF: the frame, the balanced softmax, the fixed classifier, with and without a projection."""

import dataclasses
from math import log
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from methods.conformance import (
    CHECKS,
    CLASSES,
    FEATURES,
    SIZES,
    TASK,
    after,
    assert_close,
    batch_of,
    federation,
    fingerprint,
    loaded,
    reply_of,
    small_network,
    usual,
)
from protofed.errors import BadInput
from protofed.methods.families import Weights
from protofed.methods.fedetf import ClassCounts, FedETF, FrameClassifier, equiangular_frame
from protofed.nn.networks import Networks, Parts, without
from protofed.tree import Mean

SETTINGS = {
    "default": FedETF(),
    "wide": FedETF(dimension=6, initial_scale=10.0),
    "unbalanced": FedETF(balance=0.0),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Any, setting: str) -> None:
    check(SETTINGS[setting])


# ---- the frame


@pytest.mark.parametrize(("num_classes", "dim"), [(2, 2), (4, 4), (4, 9), (10, 10), (10, 64), (100, 100)])
def test_the_columns_are_an_equiangular_tight_frame(num_classes: int, dim: int) -> None:
    frame = equiangular_frame(num_classes, dim).double()
    assert frame.shape == (dim, num_classes)
    # Length 1, any two at cosine −1/(C−1).
    expected = torch.full((num_classes, num_classes), -1 / (num_classes - 1), dtype=torch.float64).fill_diagonal_(1.0)
    torch.testing.assert_close(frame.T @ frame, expected, rtol=0, atol=1e-6)
    # Tight: V Vᵀ is C/(C−1) times a projection, here onto the C − 1 dimensions that the columns span.
    turned = frame @ frame.T
    torch.testing.assert_close(turned @ turned, num_classes / (num_classes - 1) * turned, rtol=0, atol=1e-5)
    assert torch.linalg.matrix_rank(frame, tol=1e-4) == num_classes - 1


def test_too_few_dimensions_are_refused_with_both_numbers() -> None:
    with pytest.raises(BadInput, match=r"4 classes needs at least as many dimensions, not 3"):
        equiangular_frame(4, 3)
    with pytest.raises(BadInput, match=r"4 classes needs at least as many dimensions, not 3"):
        federation(FedETF(dimension=3)).start()


def test_the_frame_is_the_same_whenever_it_is_made_and_no_part_of_the_weights() -> None:
    torch.testing.assert_close(equiangular_frame(4, 6), equiangular_frame(4, 6), rtol=0, atol=0)
    before = torch.random.get_rng_state()
    equiangular_frame(4, 6)
    assert torch.equal(torch.random.get_rng_state(), before)
    names = [name for name in usual(FedETF(), 1).server.params if name.startswith("classifier")]
    assert names == ["classifier.raw_scale", "classifier.projection.weight", "classifier.projection.bias"]


# ---- the classifier


@pytest.mark.parametrize("scale", [0.5, 1.0, 10.0, 1000.0])
def test_scores_are_the_scale_times_the_cosines_to_the_columns(scale: float) -> None:
    head = FrameClassifier(3, 4, 5, scale)
    z = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    mapped = head.projection(z)
    expected = scale * F.cosine_similarity(mapped[:, None], head.frame.T[None], dim=-1)
    torch.testing.assert_close(head(z), expected, rtol=1e-4, atol=1e-6 * max(scale, 10))


def test_the_scale_stays_positive_whatever_is_learnt() -> None:
    head = FrameClassifier(3, 4, 4, 1.0)
    z = torch.ones(1, 3)
    start = head(z)
    with torch.no_grad():
        head.raw_scale.fill_(-5.0)
    low = head(z)
    assert (low.sign() == start.sign()).all()
    assert torch.allclose(low / low.norm(), start / start.norm(), atol=1e-5)


def test_by_default_there_are_as_many_dimensions_as_classes() -> None:
    head = FedETF().networks(TASK.spec, "ann")["classifier"]
    assert head.frame.shape == (CLASSES, CLASSES)
    assert FedETF(dimension=6).networks(TASK.spec, "ann")["classifier"].frame.shape == (6, CLASSES)


# ---- the objective


def fixed_scores(scores: list[float]) -> Networks:
    """A network that says the same of every example."""

    class Said(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            return torch.tensor(scores).expand(len(z), -1)

    return Networks(lambda: {"features": nn.Identity(), "classifier": Said()})


@pytest.mark.parametrize(
    ("balance", "expected"),
    [
        # Equal scores shifted by log 6, log 2 and, for the class that is not there, log 1: shares 6/9, 2/9, 1/9.
        # Labels 0 and 1 at weight 1, label 2 at weight 0: −(log 6/9 + log 2/9) / 2.
        (1.0, -(log(6 / 9) + log(2 / 9)) / 2),
        # Half of the shift: shares √6, √2, 1.
        (0.5, log(6**0.5 + 2**0.5 + 1) - (0.5 * log(6) + 0.5 * log(2)) / 2),
        (0.0, log(3)),
    ],
)
def test_scores_are_shifted_by_the_logarithms_of_the_counts(balance: float, expected: float) -> None:
    batch = batch_of([[0.0], [0.0], [0.0]], [0, 1, 2], [1.0, 1.0, 0.0])
    model = fixed_scores([1.0, 1.0, 1.0]).model({}, training=True)
    memory = ClassCounts(torch.tensor([6.0, 2.0, 0.0]))
    found = FedETF(balance=balance).loss(model, batch, Weights({}), memory)
    assert found.item() == pytest.approx(expected, abs=1e-6)


def test_a_client_keeps_the_numbers_of_examples_of_its_classes() -> None:
    for client, memory in usual(FedETF(), 2).memories.items():
        labels = TASK.clients[client].labels
        assert memory.count.tolist() == [int((labels == c).sum()) for c in range(CLASSES)]


def test_prediction_is_not_shifted() -> None:
    method = FedETF(dimension=6)
    of, state = federation(method), usual(method, 2)
    params, message = method.public(state.server)
    x = TASK.transform.clean(TASK.tests["domain 0"].x)
    with torch.no_grad():
        z = loaded(without(params, ("classifier.*",)), training=False)["features"](x)
        mapped = F.linear(z, params["classifier.projection.weight"], params["classifier.projection.bias"])
        expected = F.softplus(params["classifier.raw_scale"]) * F.normalize(mapped, dim=-1) @ equiangular_frame(4, 6)
        model = of.networks_of("ann").model(params)
        for memory in (None, state.memories["ann"]):
            torch.testing.assert_close(method.predict(model, x, message, memory), expected)


def test_the_gradient_is_that_of_plain_torch() -> None:
    method = FedETF(initial_scale=3.0)
    of, state = federation(method), usual(method, 1)
    params, networks = state.server.params, of.networks_of("ann")
    data = TASK.clients["ann"]
    batch = batch_of(TASK.transform.clean(data.x), data.y)
    own = {name: leaf.clone().requires_grad_(name in networks.trainable) for name, leaf in params.items()}
    loss = method.loss(networks.model(own, training=True), batch, state.server, state.memories["ann"])
    found = torch.autograd.grad(loss, [own[f"classifier.{n}"] for n in ("projection.weight", "raw_scale")])
    z = loaded(without(params, ("classifier.*",)), training=True)["features"](batch.x)
    weight, raw = (params[f"classifier.{n}"].clone().requires_grad_() for n in ("projection.weight", "raw_scale"))
    mapped = F.linear(z, weight, params["classifier.projection.bias"])
    cosines = F.cosine_similarity(mapped[:, None], equiangular_frame(4, 4).T[None], dim=-1)
    counts = torch.tensor([max(1, int((data.y == c).sum())) for c in range(CLASSES)]).float()
    plain = F.cross_entropy((1 + raw.exp()).log() * cosines + counts.log(), batch.y)
    for one, other in zip(found, torch.autograd.grad(plain, [weight, raw]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_the_server_takes_the_mean_by_examples() -> None:
    of, state = federation(FedETF()), usual(FedETF(), 1)
    mean = Mean()
    for client in TASK.clients:
        mean.add(reply_of(of, state, client).upload.params, SIZES[client])
    assert_close(of.advance(state).server.params, mean.value(), "weights", within=1e-7)


def test_the_balance_and_the_dimension_change_the_result() -> None:
    plain = fingerprint(usual(FedETF(), 1).server)
    assert fingerprint(usual(FedETF(balance=0.0), 1).server) != plain
    assert fingerprint(usual(FedETF(initial_scale=10.0), 1).server) != plain


# ---- a projection


def projected_network(client: str) -> Parts:
    parts = small_network(client)
    projection = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU(), nn.Linear(FEATURES, 5))
    return {"features": parts["features"], "projection": projection, "classifier": nn.Linear(5, CLASSES)}


def test_behind_a_projection_the_layer_reads_its_output() -> None:
    of = federation(FedETF(), dataclasses.replace(TASK, model=projected_network))
    state = after(2, of)
    assert not state.failures
    params, message = of.method.public(state.server)
    assert params["classifier.projection.weight"].shape == (CLASSES, 5)
    start = of.start().server.params
    assert not torch.equal(params["projection.0.weight"], start["projection.0.weight"])
    model, x = of.networks_of("ann").model(params), TASK.transform.clean(TASK.tests["domain 0"].x)
    with torch.no_grad():
        scores = of.method.predict(model, x, message, None)
        expected = model.classifier(model.projection(model.features(x)))
    assert torch.equal(scores, expected)
    assert scores.shape == (3 * CLASSES, CLASSES)
