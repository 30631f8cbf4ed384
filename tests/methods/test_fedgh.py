"""FedGH: what the server trains its header on and that it does, what a client starts from and predicts with."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from methods.conformance import (
    CHECKS,
    CLASSES,
    FEATURES,
    SIZES,
    TASK,
    after,
    assert_close,
    assert_finite,
    assert_same,
    batch_of,
    federation,
    fingerprint,
    identity_model,
    loaded,
    mean_cross_entropy,
    reply_of,
    small_network,
    small_task,
    trained_by_hand,
    usual,
)
from protofed.api.method import Method
from protofed.api.requests import Fitted
from protofed.api.task import ClientId, TaskSpec
from protofed.errors import BadInput
from protofed.methods._shared.models import HEAD
from protofed.methods.families import Weights
from protofed.methods.fedgh import FedGH, header_loss, pairs
from protofed.methods.local import LocalOnly
from protofed.nn.networks import Parts, matching, without
from protofed.prototypes.class_means import Prototypes, class_sums


@dataclass(frozen=True)
class Projected(FedGH):
    def networks(self, spec: TaskSpec, client: ClientId) -> Parts:
        parts = spec.model(client)
        return {**parts, "projection": nn.Linear(FEATURES, 6), "classifier": nn.Linear(6, CLASSES)}


@dataclass(frozen=True)
class Normalised(FedGH):
    """Its projection has BatchNorm over features."""

    def networks(self, spec: TaskSpec, client: ClientId) -> Parts:
        projection = nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.ReLU())
        return {**spec.model(client), "projection": projection, "classifier": nn.Linear(6, CLASSES)}


SETTINGS = [FedGH(), FedGH(inference="global", header_batch=4, header_epochs=3), Projected()]


@pytest.mark.parametrize("method", SETTINGS, ids=repr)
@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: Callable[[Method], None], method: FedGH) -> None:
    check(method)


# ---- the server


def test_the_header_changes_in_every_round() -> None:
    """The published code never updates it."""
    for method in SETTINGS:
        headers = [usual(method, rounds).server.params for rounds in (0, 1, 2, 3)]
        for before, header in pairwise(headers):
            for name in header:
                assert not torch.equal(header[name], before[name]), name


def test_training_the_header_makes_it_right_on_class_means() -> None:
    method = FedGH(header_epochs=100, header_batch=8, header_rate=0.5)
    means = [3 * torch.eye(CLASSES, FEATURES) + shift for shift in (0.0, 0.5)]
    uploads = [(f"client {k}", Prototypes(mean, torch.ones(CLASSES))) for k, mean in enumerate(means)]
    new = method.aggregate(
        usual(FedGH(), 0).server, iter(uploads), federation(method).server_context(0, "round")
    ).params
    for mean in means:
        assert (mean @ new["classifier.weight"].T + new["classifier.bias"]).argmax(-1).tolist() == list(range(CLASSES))


def test_the_header_takes_one_step_for_each_class_mean() -> None:
    """A plain torch loop over the class means, in the order that the seed of the server's fit draws."""
    of, state = federation(FedGH()), usual(FedGH(), 1)
    uploads = {c: reply_of(of, state, c).upload for c in SIZES}
    data, central = pairs(uploads), of.server_context(1, "round")
    requests: list[Any] = []
    answer = Fitted(central.initial_params(), (), (), None)
    asking = dataclasses.replace(central, answer=lambda request: requests.append(request) or answer)
    FedGH().aggregate(state.server, iter(uploads.items()), asking)
    [request] = requests
    classifier = nn.Linear(FEATURES, CLASSES)
    own = {name.removeprefix("classifier."): leaf.clone() for name, leaf in state.server.params.items()}
    classifier.load_state_dict(own)
    optimizer = torch.optim.SGD(classifier.parameters(), lr=0.01)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(request.seed))
    for i in order:
        optimizer.zero_grad()
        F.cross_entropy(classifier(data.x[i]), data.y[i]).backward()
        optimizer.step()
    found = usual(FedGH(), 2).server.params
    assert_close(found["classifier.weight"], classifier.weight.detach(), "weight", within=1e-6)
    assert_close(found["classifier.bias"], classifier.bias.detach(), "bias", within=1e-6)


def test_pairs_are_the_class_means_that_there_are() -> None:
    ann = Prototypes(torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([1.0, 0.0]))
    bob = Prototypes(torch.tensor([[3.0, 4.0], [5.0, 6.0]]), torch.tensor([1.0, 1.0]))
    data = pairs({"bob": bob, "ann": ann})
    assert data.x.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert data.labels.tolist() == [0, 0, 1]


def test_the_loss_reads_features() -> None:
    # Logits of (1, 0) are 1 and 0: log(1 + e⁻¹) = 0.3133.
    found = header_loss(identity_model([[1.0, 0.0], [0.0, 1.0]]), batch_of([[1.0, 0.0]], [0]))
    assert found.item() == pytest.approx(0.31326, abs=1e-5)


def test_behind_a_projection_both_are_the_header() -> None:
    before, found = (usual(Projected(), rounds).server.params for rounds in (1, 2))
    assert found.keys() == {"projection.weight", "projection.bias", "classifier.weight", "classifier.bias"}
    assert not torch.equal(found["projection.weight"], before["projection.weight"])


def test_a_header_with_batchnorm_and_steps_of_one_class_mean_is_refused_before_the_run() -> None:
    with pytest.raises(BadInput, match=r"method\.header_batch: the header has BatchNorm, .* set it to 2 or more"):
        federation(Normalised())
    federation(Projected())  # without BatchNorm one is enough


def test_a_header_with_batchnorm_trains_on_two_class_means_at_a_time() -> None:
    method = Normalised(header_batch=2)
    state = after(2, federation(method))
    assert not state.failures
    before, found = usual(method, 1).server.params, state.server.params
    for name in ("projection.0.weight", "projection.1.weight", "projection.1.running_mean", "classifier.weight"):
        assert not torch.equal(before[name], found[name]), name


def test_a_single_class_mean_does_not_fail_with_batchnorm() -> None:
    """Batches are filled with rows that there are, here with the same one."""
    state = after(2, federation(Normalised(header_batch=2), small_task({"ann": [1, 1, 1]})))
    assert not state.failures
    assert_finite(state.server, "the header")


# ---- the client


def test_a_client_trains_everything_from_its_own_body_and_the_servers_header() -> None:
    state = usual(FedGH(), 1)
    start = {**state.memories["ann"].params, **state.server.params}
    assert fingerprint(start) != fingerprint(state.memories["ann"].params)
    expected, _ = trained_by_hand(start, "ann", mean_cross_entropy, round=1)
    reply = reply_of(federation(FedGH()), state, "ann")
    assert_close(reply.memory.params, expected, "ann's model", within=1e-5)
    data, parts = TASK.clients["ann"], loaded(reply.memory.params, training=False)
    with torch.no_grad():
        z = parts["features"](TASK.transform.clean(data.x))
    means = class_sums(z, data.y, torch.ones(len(z)), CLASSES).prototypes()
    assert_close(reply.upload.mean, means.mean, "ann's class means", within=1e-5)
    assert reply.upload.count.tolist() == (means.count > 0).float().tolist()


def test_the_first_round_of_a_client_is_local_training() -> None:
    found, alone = usual(FedGH(), 1).memories["bob"], usual(LocalOnly(), 1).memories["bob"]
    assert_same(found.params, alone.params, "bob's model")
    assert fingerprint(usual(FedGH(), 2).memories) != fingerprint(usual(LocalOnly(), 2).memories)


def test_a_client_predicts_with_the_header_it_trained_or_with_the_servers() -> None:
    state = usual(FedGH(), 2)
    message, memory = state.server, state.memories["ann"]
    assert_same(FedGH().local_weights(message, memory), memory.params, "trained")
    found = FedGH(inference="global").local_weights(message, memory)
    assert_same(matching(found, HEAD), message.params, "the header")
    assert_same(without(found, HEAD), without(memory.params, HEAD), "the body")
    for method in (FedGH(), FedGH(inference="global")):
        upload = reply_of(federation(method), usual(method, 1), "ann").upload
        assert_same(method.trained_weights(upload, memory), memory.params, "right after training")


def deeper_for_bob(client: ClientId) -> Parts:
    if client != "bob":
        return small_network(client)
    features = nn.Sequential(nn.Flatten(), nn.Linear(192, 20), nn.ReLU(), nn.Linear(20, FEATURES))
    return {"features": features, "classifier": nn.Linear(FEATURES, CLASSES)}


def test_networks_may_differ_in_front_of_the_header() -> None:
    of = federation(FedGH(), dataclasses.replace(TASK, model=deeper_for_bob))
    state = after(3, of)
    assert not state.failures
    assert state.memories["bob"].params.keys() != state.memories["ann"].params.keys()
    assert isinstance(state.server, Weights)
    start = of.start()
    message = of.method.message_for(start.server, "bob")
    own = matching(of.client_context("bob", 0).initial_params(), HEAD)
    assert fingerprint(own) != fingerprint(message.params)
    assert_same(matching(of.client_state(start, "bob", message).params, HEAD), message.params, "bob's first header")
