"""CCVR: the pooled Gaussians, the features that are drawn from them, and what is retrained after the last round."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from methods.conformance import (
    CHECKS,
    CLASSES,
    FEATURES,
    ODD_TASK,
    TASK,
    ReversedClients,
    after,
    assert_close,
    assert_same,
    batch_of,
    federation,
    fingerprint,
    identity_model,
    loaded,
    small_task,
    usual,
    whole,
)
from protofed import tree, wire
from protofed.api.method import Method
from protofed.api.requests import Fitted
from protofed.api.task import ClientId, Task, TaskSpec
from protofed.engine.round import RoundClients
from protofed.evaluation.evaluate import evaluate
from protofed.methods._shared.models import CLASSIFIER
from protofed.methods.ccvr import CCVR, virtual_loss
from protofed.methods.fedasam import FedASAM
from protofed.methods.fedavg import FedAvg
from protofed.methods.moon import Moon
from protofed.nn.networks import Parts, matching, without
from protofed.prototypes.gaussians import (
    ClassGaussians,
    class_gaussians,
    no_gaussians,
    pooled,
    square_root,
    virtual_features,
)
from protofed.runs.runner import Experiment, execute

WIDTH = 6


@dataclass(frozen=True)
class Projected(CCVR):
    """The method on networks with a projection, which the small task's networks lack."""

    def networks(self, spec: TaskSpec, client: ClientId) -> Parts:
        parts = spec.model(client)
        return {**parts, "projection": nn.Linear(FEATURES, WIDTH), "classifier": nn.Linear(WIDTH, CLASSES)}


@pytest.mark.parametrize("method", [CCVR(), CCVR(base=Moon()), Projected()], ids=repr)
@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: Callable[[Method], None], method: CCVR) -> None:
    check(method)


# ---- Gaussians


def features(size: int, seed: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    z = torch.randn(size, 5, generator=draws) @ torch.randn(5, 5, generator=draws) + 3 * seed
    return z, torch.randint(0, 3, (size,), generator=draws)


def test_a_clients_gaussians_are_those_of_numpy() -> None:
    z, y = features(40, 1)
    found = class_gaussians(z, y, 4)
    for c in range(3):
        own = z[y == c].double().numpy()
        assert found.count[c] == len(own)
        np.testing.assert_allclose(found.mean[c].numpy(), own.mean(0), atol=1e-5)
        np.testing.assert_allclose(found.covariance[c].numpy(), np.cov(own.T), atol=1e-5)
    assert (found.count[3], found.mean[3].abs().sum(), found.covariance[3].abs().sum()) == (0, 0, 0)


def test_one_example_has_no_covariance() -> None:
    found = class_gaussians(torch.tensor([[1.0, 2.0]]), torch.tensor([1]), 2)
    assert found.count.tolist() == [0, 1]
    assert found.mean.tolist() == [[0, 0], [1, 2]]
    assert found.covariance.abs().sum() == 0


def test_the_pooled_covariance_is_that_of_all_features_together() -> None:
    clients = [features(size, seed) for seed, size in enumerate((30, 1, 17, 2, 50))]
    uploads = [(str(k), class_gaussians(z, y, 4)) for k, (z, y) in enumerate(clients)]
    found = pooled(uploads, no_gaussians(4, 5))
    z, y = torch.cat([z for z, _ in clients]), torch.cat([y for _, y in clients])
    for c in range(3):
        own = z[y == c].double().numpy()
        assert found.count[c] == len(own)
        np.testing.assert_allclose(found.mean[c].numpy(), own.mean(0), atol=1e-5)
        np.testing.assert_allclose(found.covariance[c].numpy(), np.cov(own.T), atol=1e-5 * np.cov(own.T).max())
    assert (found.count[3], found.covariance[3].abs().sum()) == (0, 0)


def test_pooling_loses_no_digits_far_from_the_origin() -> None:
    clients = [(z.double() + 1e6, y) for z, y in (features(30, 1), features(20, 1))]
    exact = [class_gaussians(z - 1e6, y, 3) for z, y in clients]
    shifted = [(str(k), ClassGaussians(e.count, e.mean.double() + 1e6, e.covariance)) for k, e in enumerate(exact)]
    expected = pooled([(str(k), e) for k, e in enumerate(exact)], no_gaussians(3, 5)).covariance
    torch.testing.assert_close(pooled(shifted, no_gaussians(3, 5)).covariance, expected, rtol=1e-6, atol=1e-6)


def test_two_clients_of_one_example_have_the_covariance_of_two() -> None:
    # (0, 0) and (2, 4): mean (1, 2), deviations ∓(1, 2), covariance [[2, 4], [4, 8]] / 1.
    ends = [class_gaussians(torch.tensor([z]), torch.tensor([0]), 1) for z in ([0.0, 0.0], [2.0, 4.0])]
    found = pooled([("ann", ends[0]), ("bob", ends[1])], no_gaussians(1, 2))
    assert found.mean.tolist() == [[1, 2]]
    assert found.covariance.tolist() == [[[2, 4], [4, 8]]]


# ---- virtual features


def test_draws_have_the_mean_and_covariance_of_the_class() -> None:
    z, y = features(60, 2)
    known = pooled([("ann", class_gaussians(z, y, 4))], no_gaussians(4, 5))
    data = virtual_features(known, 20_000, torch.Generator().manual_seed(0))
    assert data.x.dtype == torch.float32
    assert data.y.tolist() == [0] * 20_000 + [1] * 20_000 + [2] * 20_000
    for c in range(3):
        drawn, scale = data.x[data.y == c].double().numpy(), known.covariance[c].abs().max().item()
        np.testing.assert_allclose(drawn.mean(0), known.mean[c].numpy(), atol=0.05 * scale**0.5)
        np.testing.assert_allclose(np.cov(drawn.T), known.covariance[c].numpy(), atol=0.05 * scale)


def test_a_class_of_one_example_is_drawn_near_it() -> None:
    known = pooled([("ann", class_gaussians(torch.full((1, 3), 5.0), torch.tensor([0]), 1))], no_gaussians(1, 3))
    drawn = virtual_features(known, 10_000, torch.Generator().manual_seed(0)).x.double()
    assert drawn.mean().item() == pytest.approx(5.0, abs=2e-3)
    assert drawn.var().item() == pytest.approx(1e-3, rel=0.05)


def test_the_root_of_a_covariance_of_low_rank_is_finite_and_squares_to_it() -> None:
    row = torch.tensor([[1.0, 2.0, -1.0]], dtype=torch.float64)
    covariance = row.T @ row
    root = square_root(covariance)
    torch.testing.assert_close(root @ root.T, covariance, rtol=1e-9, atol=1e-9)
    # Symmetric: of a covariance v vᵀ the root is v vᵀ / ‖v‖, and ‖v‖ is √6.
    torch.testing.assert_close(root, covariance / 6**0.5, rtol=1e-6, atol=1e-6)


def test_a_class_that_nobody_has_is_left_out_of_the_loss() -> None:
    # Logits of (1, 0) are 1, 0, 5. Without the third class: log(e¹ + e⁰) − 1 = 0.3133.
    model = identity_model([[1.0, 0.0], [0.0, 1.0], [5.0, 5.0]])
    found = virtual_loss(model, batch_of([[1.0, 0.0]], [0]), torch.tensor([True, True, False]))
    assert found.item() == pytest.approx(0.31326, abs=1e-5)


# ---- the end of a run


def finished(method: CCVR, task: Task = TASK) -> Any:
    of = federation(method, task)
    return of.finish(after(3, of))


def test_until_the_end_it_is_its_base() -> None:
    for base in (FedAvg(), FedASAM(averaging=True, averaging_start=0.0)):
        method = CCVR(base=base)
        for rounds in (0, 1, 3):
            assert_same(usual(method, rounds).server.base, usual(base, rounds).server, f"round {rounds}")
            public = method.public(usual(method, rounds).server)[0]
            assert_same(public, base.public(usual(base, rounds).server)[0], "the public model")


@pytest.mark.parametrize("base", [FedAvg(), Moon(), FedASAM(averaging=True, averaging_start=0.0)], ids=repr)
def test_the_end_changes_the_public_classifier_and_nothing_else(base: Any) -> None:
    method = CCVR(base=base)
    before, end = usual(method, 3), finished(method)
    assert_same(end.server.base, before.server.base, "the base")
    assert_same(end.memories, before.memories, "the memories")
    old, new = method.public(before.server)[0], method.public(end.server)[0]
    assert_same(without(new, CLASSIFIER), without(old, CLASSIFIER), "features")
    for name in matching(old, CLASSIFIER):
        assert not torch.equal(new[name], old[name])
    assert new.keys() == old.keys()


def test_clients_describe_the_features_of_the_public_model() -> None:
    """Around a base that averages its global models, these are not the features of the last one."""
    method = CCVR(base=FedASAM(averaging=True, averaging_start=0.0))
    of, state = federation(method), usual(method, 3)
    sent: list[Any] = []

    class Watching(RoundClients):
        def run(self, step: Any, message_for: Any, like: Any) -> Any:
            sent.append(message_for("ann").params)
            return super().run(step, message_for, like)

    method.finish(state.server, Watching(of, state, of.ids, "finish"))
    [params] = sent
    assert_same(params, method.public(state.server)[0], "the message")
    assert fingerprint(params) != fingerprint(method.message_for(state.server, "ann").params)


def test_behind_a_projection_the_classifier_alone_is_calibrated() -> None:
    before, end = usual(Projected(), 3), finished(Projected())
    assert end.server.classifier.keys() == {"classifier.weight", "classifier.bias"}
    old, new = (Projected().public(state.server)[0] for state in (before, end))
    assert torch.equal(old["projection.weight"], new["projection.weight"])
    assert not torch.equal(old["classifier.weight"], new["classifier.weight"])


def test_the_classifier_descends_on_draws_from_the_gaussians_of_the_global_features() -> None:
    """A plain torch loop on the same draws."""
    of, state = federation(CCVR()), usual(CCVR(), 3)
    params = state.server.base.params
    parts = loaded(params, training=False)
    with torch.no_grad():
        z = {c: parts["features"](TASK.transform.clean(data.x)) for c, data in TASK.clients.items()}
    everything, y = torch.cat(list(z.values())), torch.cat([data.y for data in TASK.clients.values()])
    central = of.server_context(3, "finish")
    known = pooled([("all", class_gaussians(everything, y, CLASSES))], no_gaussians(CLASSES, FEATURES))
    data = virtual_features(known, 100, central.generator)
    fitted: list[Any] = []
    fit = dataclasses.replace(central, answer=lambda request: fitted.append(request) or Fitted(params, (), (), None))
    fit.fit(params=params, data=data, epochs=10, batch_size=64)  # the seed of the server's first fit
    classifier, seed = parts["classifier"], fitted[0].seed
    optimizer = torch.optim.SGD(classifier.parameters(), lr=0.01, momentum=0.9)
    draws = torch.Generator().manual_seed(seed)
    for _ in range(10):
        order = torch.randperm(400, generator=draws)
        for rows in order.split(64):
            optimizer.zero_grad()
            F.cross_entropy(classifier(data.x[rows]), data.y[rows]).backward()
            optimizer.step()
    found = finished(CCVR()).server.classifier
    torch.testing.assert_close(found["classifier.weight"], classifier.weight.detach(), rtol=0, atol=1e-4)
    torch.testing.assert_close(found["classifier.bias"], classifier.bias.detach(), rtol=0, atol=1e-4)


def test_the_calibration_helps_a_classifier_that_is_wrong() -> None:
    of, state = federation(CCVR(rate=0.1, epochs=50)), usual(CCVR(), 3)
    flipped = {**state.server.base.params}
    flipped["classifier.weight"] = -flipped["classifier.weight"]
    server = type(state.server)(type(state.server.base)(flipped), matching(flipped, CLASSIFIER))
    end = of.finish(dataclasses.replace(state, server=server))

    def loss(server: Any) -> float:
        parts = loaded(CCVR().public(server)[0], training=False)
        rows = [(TASK.transform.clean(data.x), data.y) for data in TASK.clients.values()]
        with torch.no_grad():
            return sum(F.cross_entropy(parts["classifier"](parts["features"](x)), y).item() for x, y in rows)

    assert loss(end.server) < loss(server) - 0.5


def test_a_row_of_a_class_that_nobody_has_stays() -> None:
    of = federation(CCVR(), ODD_TASK)
    state = after(3, of)
    end = of.finish(state)
    assert not end.failures
    old, new = state.server.classifier, end.server.classifier
    assert torch.equal(old["classifier.weight"][3], new["classifier.weight"][3])
    assert not torch.equal(old["classifier.weight"][0], new["classifier.weight"][0])


@pytest.mark.parametrize("method", [CCVR(), Projected()], ids=repr)
def test_the_end_is_the_same_every_time_and_survives_the_wire(method: CCVR) -> None:
    of = federation(method)
    state, end = after(3, of), finished(method)
    assert_same(whole(of.finish(state)), whole(end), "the same seed")
    server = wire.decode(wire.encode(state.server), method.init_server(of.server_context(0, "round")))
    resumed = of.finish(dataclasses.replace(state, server=server))
    assert_same(whole(resumed), whole(end), "after the wire")
    assert fingerprint(finished(method).server) == fingerprint(end.server)
    other = federation(method, seed=77)
    assert fingerprint(other.finish(state).server) != fingerprint(end.server)


def test_the_order_of_uploads_does_not_matter() -> None:
    of, state = federation(CCVR()), usual(CCVR(), 3)
    found = [of.method.finish(state.server, kind(RoundClients(of, state, of.ids, "finish"))) for kind in (
        lambda clients: clients,
        ReversedClients,
    )]  # fmt: skip
    assert_close(found[1], found[0], "uploads read in reverse", within=1e-4)


def test_who_never_took_part_is_asked_too() -> None:
    of = federation(CCVR(base=Moon()), fraction=0.2)
    end = of.finish(after(1, of))
    assert not end.failures
    assert set(end.memories) == set(TASK.clients)
    assert all(torch.isfinite(leaf).all() for leaf in tree.leaves(end.server))


# ---- rounds that are evaluated before the last


def skewed() -> Experiment:
    labels = {"ann": [0] * 9 + [1, 2], "bob": [1] * 8 + [3], "cyd": [2] * 7 + [0, 3], "dan": [3] * 6 + [1]}
    of = federation(CCVR(rate=0.5), small_task(labels), rounds=3, epochs=8)
    return Experiment(of, evaluate_every=1)


def test_a_round_is_tested_as_if_it_were_the_last_and_the_run_goes_on_without_it() -> None:
    found, of = execute(skewed()), skewed().federation
    state = of.advance(of.start())
    tested = of.judged(state)
    assert_same(tested.server.base, state.server.base, "the base's record")
    assert fingerprint(tested.server.classifier) != fingerprint(state.server.classifier)
    assert tested.receipts.keys() == state.receipts.keys()
    assert found.rounds[0].domains == evaluate(of, tested).domains
    assert found.rounds[0].domains != evaluate(of, state).domains
    assert found.rounds[0].traffic == execute(replace(skewed(), evaluate_every=3)).rounds[0].traffic
    assert_same(found.state.server, execute(replace(skewed(), evaluate_every=3)).state.server, "the end of the run")


@pytest.mark.parametrize("settings", [{"norm_statistics": "local"}, {"optimizer_state": "kept"}], ids=str)
def test_it_is_calibrated_for_tests_also_inside_settings(settings: dict[str, Any]) -> None:
    of = federation(CCVR(), **settings)
    state = of.advance(of.start())
    assert fingerprint(of.judged(state).server.classifier) != fingerprint(state.server.classifier)


def test_other_methods_are_tested_as_they_are() -> None:
    of = federation(FedAvg())
    state = of.start()
    assert of.judged(state) is state
