"""LG-Fed: features stay, classifiers are averaged."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn

from methods.conformance import (
    CHECKS,
    CLASSES,
    FEATURES,
    SIZES,
    TASK,
    after,
    assert_close,
    assert_same,
    federation,
    fingerprint,
    mean_cross_entropy,
    reply_of,
    small_network,
    small_task,
    trained_by_hand,
    usual,
)
from protofed.api.method import Method
from protofed.methods.families import WeightUpload
from protofed.methods.lg_fed import BODY, LGFed
from protofed.methods.local import LocalOnly
from protofed.nn.networks import Networks, matching, without

METHOD = LGFed()
UNIFORM = LGFed(weighting="uniform")


@pytest.mark.parametrize("method", [METHOD, UNIFORM], ids=repr)
@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: Callable[[Method], None], method: LGFed) -> None:
    check(method)


def test_all_layers_train_together_as_plain_torch_does() -> None:
    state = usual(METHOD, 1)
    start = {**state.server.params, **state.memories["ann"].params}
    expected, _ = trained_by_hand(start, "ann", mean_cross_entropy, round=1)
    reply = reply_of(federation(METHOD), state, "ann")
    assert_close(reply.upload.params, without(expected, BODY), "the classifier", within=1e-5)
    assert_close(reply.memory.params, matching(expected, BODY), "the features", within=1e-5)
    assert_close(METHOD.trained_weights(reply.upload, reply.memory), expected, "right after training", within=1e-5)


def test_the_classifier_travels_and_the_features_with_their_statistics_stay() -> None:
    state = usual(METHOD, 1)
    assert reply_of(federation(METHOD), state, "ann").upload.params.keys() == {"classifier.weight", "classifier.bias"}
    assert METHOD.message_for(state.server, "ann").params.keys() == {"classifier.weight", "classifier.bias"}
    assert "features.1.running_mean" in state.memories["ann"].params
    own = {c: METHOD.local_weights(state.server, state.memories[c]) for c in ("ann", "bob")}
    assert torch.equal(own["ann"]["classifier.weight"], own["bob"]["classifier.weight"])
    assert not torch.equal(own["ann"]["features.0.weight"], own["bob"]["features.0.weight"])


@pytest.mark.parametrize("method", [METHOD, UNIFORM], ids=repr)
def test_the_classifier_is_the_mean_over_clients_counting_as_set(method: LGFed) -> None:
    of, state = federation(method), usual(method, 1)
    heads = {client: reply_of(of, state, client).upload.params for client in TASK.clients}
    share = {c: 1 / 5 if method is UNIFORM else SIZES[c] / 38 for c in SIZES}
    expected = {name: sum(share[c] * heads[c][name].double() for c in SIZES).float() for name in state.server.params}
    assert_close(usual(method, 2).server.params, expected, "the classifier", within=1e-6)


def test_uploads_count_once_or_by_their_examples() -> None:
    uploads = [WeightUpload({}, torch.tensor(7)), WeightUpload({}, torch.tensor(2))]
    assert [UNIFORM.weight_of(upload.num_examples) for upload in uploads] == [1, 1]
    assert [METHOD.weight_of(upload.num_examples) for upload in uploads] == [7, 2]


def test_the_weighting_changes_the_result() -> None:
    assert fingerprint(usual(METHOD, 2).server) != fingerprint(usual(UNIFORM, 2).server)


def test_a_projection_stays_at_the_client() -> None:
    parts = {**small_network(), "projection": nn.Linear(FEATURES, FEATURES)}
    assert parts["classifier"].weight.shape == (CLASSES, FEATURES)
    params = Networks(lambda: parts).init(0)
    assert without(params, METHOD.private).keys() == {"classifier.weight", "classifier.bias"}


def test_networks_may_differ_below_the_classifier() -> None:
    def own_network(client: str) -> dict[str, nn.Module]:
        linear = nn.Sequential(nn.Flatten(), nn.Linear(192, FEATURES))
        return small_network() if client != "bob" else {**small_network(), "features": linear}

    state = after(2, federation(METHOD, dataclasses.replace(TASK, model=own_network)))
    assert not state.failures
    assert state.memories["bob"].params.keys() == {"features.1.weight", "features.1.bias"}
    assert state.memories["ann"].params.keys() != state.memories["bob"].params.keys()


def test_alone_it_is_local_training() -> None:
    alone = small_task({"ann": [0, 1, 2, 3, 0, 1, 2, 3, 3]})
    state = after(3, federation(METHOD, alone))
    local = after(3, federation(LocalOnly(), alone)).memories["ann"].params
    own = METHOD.local_weights(state.server, state.memories["ann"])
    assert_same(dict(sorted(own.items())), dict(sorted(local.items())), "the only client's weights")
    assert METHOD.public(state.server) is None
