"""FedSR: random features, their length, their divergence from the class, and predictions over samples."""

import dataclasses
from math import log
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from methods.conformance import (
    CHECKS,
    CLASSES,
    FEATURES,
    SIZES,
    TASK,
    after,
    assert_close,
    assert_same,
    batch_of,
    federation,
    fingerprint,
    loaded,
    reply_of,
    scripted,
    small_network,
    usual,
    usual_reply,
)
from protofed.methods.families import OwnWeights, Weights
from protofed.methods.fedsr import REFERENCE, FedSR, ReferenceGaussians, divergence
from protofed.nn.networks import Model, Networks, Parts, matching, without
from protofed.seeds import normal
from protofed.tree import Mean, Params

SETTINGS = {
    "default": FedSR(),
    "square and examples": FedSR(length="square", weighting="examples", samples=3),
    "cross-entropy alone": FedSR(length_weight=0.0, information_weight=0.0),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Any, setting: str) -> None:
    check(SETTINGS[setting])


# ---- the divergence


def test_the_divergence_is_that_of_torch_distributions() -> None:
    draws = torch.Generator().manual_seed(0)
    mean, other_mean = torch.randn(2, 5, 7, generator=draws, dtype=torch.float64)
    spread, other_spread = torch.rand(2, 5, 7, generator=draws, dtype=torch.float64) + 0.05
    found = divergence(mean, spread, other_mean, other_spread)
    expected = kl_divergence(Normal(mean, spread), Normal(other_mean, other_spread)).sum(-1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(found, divergence(other_mean, other_spread, mean, spread))
    assert divergence(mean, spread, mean, spread).abs().max() < 1e-12


def test_an_example_is_compared_with_its_own_class_after_scaling() -> None:
    reference = ReferenceGaussians(3, 2).double()
    assert (reference.mean == 0).all()
    assert (reference.raw_spread == 1).all()
    assert reference.scale == 1
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        reference.mean.copy_(torch.randn(3, 2, generator=draws))
        reference.raw_spread.copy_(torch.randn(3, 2, generator=draws))
        reference.scale.fill_(-2.0)  # the absolute value counts
    mean, spread = torch.randn(4, 2, generator=draws).double(), torch.rand(4, 2, generator=draws).double() + 0.1
    y = torch.tensor([2, 0, 2, 1])
    own = Normal((2 + 1e-6) * mean, (2 + 1e-6) * spread)
    expected = kl_divergence(own, Normal(reference.mean[y], (1 + reference.raw_spread[y].exp()).log())).sum(-1)
    torch.testing.assert_close(reference(mean, spread, y), expected, rtol=1e-9, atol=1e-9)


def test_spreads_and_scales_that_vanish_give_finite_values_and_gradients() -> None:
    reference = ReferenceGaussians(2, 3)
    with torch.no_grad():
        reference.scale.zero_()
        reference.raw_spread.fill_(-50.0)
    networks = constant_networks(torch.full((6,), -200.0))
    model = networks.model({**networks.init(0), **prefixed(reference)}, training=True)
    leaves = {name: leaf.requires_grad_() for name, leaf in model.trainable.items()}
    loss = FedSR().loss(model, batch_of([[0.0, 0.0, 0.0]], [1]), Weights({}), OwnWeights({}))
    assert torch.isfinite(loss)
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    assert all(torch.isfinite(g).all() for g in gradients if g is not None)


# ---- the objective


def constant_networks(both: Tensor) -> Networks:
    """Features of three numbers, whose mean and raw spread are the same for every example."""

    def build() -> Parts:
        gaussian = nn.Linear(3, 6)
        with torch.no_grad():
            gaussian.weight.zero_()
            gaussian.bias.copy_(both)
        classifier = nn.Linear(3, 2, bias=False)
        return {
            "features": nn.Identity(),
            "classifier": classifier,
            "gaussian": gaussian,
            "reference": ReferenceGaussians(2, 3),
        }

    return Networks(build)


def prefixed(module: nn.Module) -> Params:
    return {f"reference.{name}": leaf.detach().clone() for name, leaf in module.state_dict().items()}


def constant_model(mean: list[float], raw_spread: float) -> Model:
    networks = constant_networks(torch.tensor([*mean, *[raw_spread] * 3]))
    params = networks.init(0)
    return networks.model({**params, "classifier.weight": torch.zeros(2, 3)}, training=True)


@pytest.mark.parametrize(("length", "expected"), [("norm", 3.0), ("square", 9.0)])
def test_the_length_is_that_of_the_sample(length: Any, expected: float) -> None:
    # The spread is 10⁻⁶, so the sample is its mean (1, 2, 2), of length 3. All scores are 0. The second row only fills.
    batch = batch_of([[0.0] * 3, [9.0] * 3], [0, 1], [1.0, 0.0])
    method = FedSR(length_weight=0.5, information_weight=0.0, length=length)
    found = method.loss(constant_model([1.0, 2.0, 2.0], -50.0), batch, Weights({}), OwnWeights({}))
    assert found.item() == pytest.approx(log(2) + 0.5 * expected, abs=1e-4)


def test_the_information_is_the_divergence_and_not_of_the_sample() -> None:
    batch = batch_of([[0.0] * 3], [0])
    method = FedSR(length_weight=0.0, information_weight=0.5)
    found = method.loss(constant_model([1.0, 2.0, 2.0], 0.3), batch, Weights({}), OwnWeights({}))
    # References start at mean 0 and spread softplus(1); the scale is 1 (and 10⁻⁶).
    own = Normal(torch.tensor([1.0, 2.0, 2.0]), F.softplus(torch.tensor(0.3)))
    expected = kl_divergence(own, Normal(torch.zeros(3), F.softplus(torch.tensor(1.0)))).sum()
    assert found.item() == pytest.approx(log(2) + 0.5 * expected.item(), abs=1e-4)


def test_a_sample_is_mean_and_spread_times_the_noise_of_its_batch() -> None:
    batch = batch_of([[0.0] * 3] * 4, [0, 1, 0, 1])
    model = constant_model([1.0, 2.0, 2.0], 0.3)
    method = FedSR(length_weight=1.0, information_weight=0.0, length="square")
    found = method.loss(model, batch, Weights({}), OwnWeights({}))
    z = torch.tensor([1.0, 2.0, 2.0]) + F.softplus(torch.tensor(0.3)) * batch.normal(4, 3)
    assert found.item() == pytest.approx(log(2) + z.square().sum(-1).mean().item(), rel=1e-5)


def test_the_gradient_is_that_of_plain_torch() -> None:
    method = FedSR(length_weight=0.2, information_weight=0.3)
    of, state = federation(method), usual(method, 1)
    networks, params = of.networks_of("ann"), method.local_weights(state.server, state.memories["ann"])
    data = TASK.clients["ann"]
    batch = batch_of(TASK.transform.clean(data.x), data.y, [1.0] * (len(data) - 1) + [0.0])
    rows = batch.weight > 0  # the last one only fills, though BatchNorm sees it
    own = {name: leaf.clone().requires_grad_(name in networks.trainable) for name, leaf in params.items()}
    wanted = ["gaussian.weight", "gaussian.bias", "reference.mean", "reference.raw_spread", "reference.scale"]
    plain = {name: params[name].clone().requires_grad_() for name in wanted}
    parts = loaded(matching(params, ("features.*", "classifier.*")), training=True)
    loss = method.loss(networks.model(own, training=True), batch, state.server, state.memories["ann"])
    both = F.linear(parts["features"](batch.x), plain["gaussian.weight"], plain["gaussian.bias"])
    mean, spread = both[:, :FEATURES], F.softplus(both[:, FEATURES:])
    z = mean + spread * batch.normal(len(data), FEATURES)
    scale = plain["reference.scale"]
    reference = Normal(plain["reference.mean"][batch.y], F.softplus(plain["reference.raw_spread"])[batch.y])
    information = kl_divergence(Normal(scale * mean, scale * spread), reference).sum(-1)
    penalty = (0.2 * z.norm(dim=-1) + 0.3 * information)[rows].mean()
    expected = F.cross_entropy(parts["classifier"](z)[rows], batch.y[rows]) + penalty
    assert loss.item() == pytest.approx(expected.item(), abs=1e-4)
    found = torch.autograd.grad(loss, [own[name] for name in wanted])
    for one, other in zip(found, torch.autograd.grad(expected, list(plain.values())), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


# ---- prediction


@pytest.mark.parametrize("samples", [20, 3])
def test_prediction_is_the_mean_of_the_softmax_over_samples(samples: int) -> None:
    method = FedSR(samples=samples)
    assert FedSR().samples == 20
    of, state = federation(method), usual(method, 1)
    params, message = method.public(state.server)
    model, x = of.networks_of("ann").model(params), TASK.transform.clean(TASK.tests["domain 0"].x)
    with torch.no_grad():
        found = method.predict(model, x, message, None)
        noise = normal(torch.tensor(0), samples, 1, FEATURES)
        both = model.gaussian(model.features(x))
        shares = [
            model.classifier(both[:, :FEATURES] + F.softplus(both[:, FEATURES:]) * one).double().softmax(-1)
            for one in noise
        ]
    expected = torch.stack(shares).mean(0)
    torch.testing.assert_close(found.double().exp(), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(len(x)))


def test_without_spread_all_samples_agree_with_the_plain_classifier() -> None:
    model = constant_model([1.0, -2.0, 0.5], -50.0)
    model.params["classifier.weight"] = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 2.0]])
    found = FedSR().predict(model, torch.zeros(4, 3), Weights({}), None)
    # Scores 1.5 and −2 + 1 = −1.
    expected = torch.tensor([[1.5, -1.0]]).log_softmax(-1).expand(4, -1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_predictions_repeat_and_leave_the_global_generator_alone() -> None:
    of, state = federation(FedSR()), usual(FedSR(), 2)
    params, message = FedSR().public(state.server)
    model, x = of.networks_of("ann").model(params), TASK.transform.clean(TASK.tests["domain 0"].x)
    before = torch.random.get_rng_state()
    with torch.no_grad():
        first, again = (FedSR().predict(model, x, message, None) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(torch.random.get_rng_state(), before)


# ---- what is kept, and the server


def test_reference_distributions_are_trained_and_stay_at_the_client() -> None:
    of, state = federation(FedSR(information_weight=0.1)), usual(FedSR(information_weight=0.1), 1)
    start = matching(of.networks_of("ann").init(0), REFERENCE)
    assert len(start) == 3
    assert not matching(state.server.params, REFERENCE)
    _, reply = usual_reply(FedSR(information_weight=0.1), "ann")
    assert not matching(reply.upload.params, REFERENCE)
    for name in start:
        assert not torch.equal(reply.memory.params[name], start[name])
        assert not torch.equal(state.memories["ann"].params[name], state.memories["bob"].params[name])


def test_a_client_goes_on_from_the_distributions_that_it_kept() -> None:
    of = scripted(FedSR(information_weight=0.1), [("ann",), ("bob",), ("ann",)].__getitem__)
    first = of.advance(of.start())
    second = of.advance(first)
    assert_same(second.memories["ann"], first.memories["ann"], "ann, who was not asked")
    used = matching(of.method.local_weights(second.server, second.memories["ann"]), REFERENCE)
    assert_same(used, second.memories["ann"].params, "what ann goes on from")
    fresh = dataclasses.replace(second, receipts={})
    assert fingerprint(reply_of(of, second, "ann")) != fingerprint(reply_of(of, fresh, "ann"))


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_the_server_takes_the_mean_over_clients_or_examples(weighting: Any) -> None:
    method = FedSR(weighting=weighting)
    of, state = federation(method), usual(method, 1)
    mean = Mean()
    for client in TASK.clients:
        mean.add(reply_of(of, state, client).upload.params, SIZES[client] if weighting == "examples" else 1.0)
    assert_close(of.advance(state).server.params, mean.value(), "weights", within=1e-7)


# ---- a projection


def projected_network(client: str) -> Parts:
    parts = small_network(client)
    projection = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU(), nn.Linear(FEATURES, 5))
    return {"features": parts["features"], "projection": projection, "classifier": nn.Linear(5, CLASSES)}


def test_behind_a_projection_its_output_is_random() -> None:
    of = federation(FedSR(), dataclasses.replace(TASK, model=projected_network))
    state = after(2, of)
    assert not state.failures
    params, message = of.method.public(state.server)
    assert params["gaussian.weight"].shape == (10, 5)
    assert not torch.equal(params["projection.0.weight"], of.start().server.params["projection.0.weight"])
    assert without(params, ("features.*", "projection.*", "gaussian.*", "classifier.*")) == {}
    x = TASK.transform.clean(TASK.tests["domain 0"].x)
    with torch.no_grad():
        scores = of.method.predict(of.networks_of("ann").model(params), x, message, None)
    assert scores.shape == (3 * CLASSES, CLASSES)
    assert torch.isfinite(scores).all()
