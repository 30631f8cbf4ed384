"""FedBN: layers of normalisation stay, everything else is averaged."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn

from methods.conformance import (
    CHECKS,
    CLASSES,
    SIZES,
    TASK,
    after,
    assert_close,
    assert_same,
    federation,
    fingerprint,
    holds,
    mean_cross_entropy,
    reply_of,
    small_task,
    trained_by_hand,
    usual,
)
from protofed import tree
from protofed.api.method import Method
from protofed.errors import BadInput
from protofed.methods.fedbn import FedBN
from protofed.methods.local import LocalOnly

METHOD = FedBN()
UNIFORM = FedBN(weighting="uniform")
KEPT = {f"features.1.{own}" for own in ("weight", "bias", "running_mean", "running_var")}


@pytest.mark.parametrize("method", [METHOD, UNIFORM], ids=repr)
@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: Callable[[Method], None], method: FedBN) -> None:
    check(method)


def test_weights_and_statistics_of_normalisation_are_kept_and_nothing_else() -> None:
    state = usual(METHOD, 1)
    message, reply = METHOD.message_for(state.server, "ann"), reply_of(federation(METHOD), state, "ann")
    assert reply.memory.params.keys() == KEPT
    shared = {"features.0.weight", "features.0.bias", "classifier.weight", "classifier.bias"}
    assert message.params.keys() == reply.upload.params.keys() == shared
    assert reply.upload.num_examples.item() == SIZES["ann"]
    for name, secret in reply.memory.params.items():
        found = [path for path, leaf in tree.named_leaves(reply.upload).items() if holds(leaf, secret)]
        assert not found, f"{name} is in the upload"


def test_all_layers_train_together_as_plain_torch_does() -> None:
    state = usual(METHOD, 1)
    start = {**state.server.params, **state.memories["ann"].params}
    expected, _ = trained_by_hand(start, "ann", mean_cross_entropy, round=1)
    reply = reply_of(federation(METHOD), state, "ann")
    trained = METHOD.trained_weights(reply.upload, reply.memory)
    assert_close(tree.select(trained, list(expected)), expected, "right after training", within=1e-5)


@pytest.mark.parametrize("method", [METHOD, UNIFORM], ids=repr)
def test_the_rest_is_the_mean_over_clients_counting_as_set(method: FedBN) -> None:
    of, state = federation(method), usual(method, 1)
    sent = {client: reply_of(of, state, client).upload.params for client in TASK.clients}
    share = {c: 1 / 5 if method is UNIFORM else SIZES[c] / 38 for c in SIZES}
    expected = {name: sum(share[c] * sent[c][name].double() for c in SIZES).float() for name in state.server.params}
    assert_close(usual(method, 2).server.params, expected, "the shared weights", within=1e-6)


def test_between_rounds_a_client_has_the_shared_weights_and_its_own_normalisation() -> None:
    state = usual(METHOD, 2)
    own = {c: METHOD.local_weights(METHOD.message_for(state.server, c), state.memories[c]) for c in ("ann", "bob")}
    for client, params in own.items():
        assert_same(tree.select(params, sorted(KEPT)), tree.select(state.memories[client].params, sorted(KEPT)), client)
        assert torch.equal(params["classifier.weight"], state.server.params["classifier.weight"])
    for name in KEPT:
        assert not torch.equal(own["ann"][name], own["bob"][name]), name
    assert METHOD.public(state.server) is None


def test_normalisation_starts_from_the_common_initial_weights() -> None:
    of, state = federation(METHOD), usual(METHOD, 0)
    memory = of.client_state(state, "ann", METHOD.message_for(state.server, "ann"))
    initial = of.server_context(0, "round").initial_params()
    whole = METHOD.local_weights(state.server, memory)
    assert_same(tree.select(whole, list(initial)), initial, "the start")


def test_a_network_without_normalisation_is_refused_and_sent_to_fedavg() -> None:
    def plain(client: str) -> dict[str, nn.Module]:
        return {"features": nn.Sequential(nn.Flatten(), nn.Linear(192, 8)), "classifier": nn.Linear(8, CLASSES)}

    with pytest.raises(BadInput, match="FedAvg"):
        federation(METHOD, dataclasses.replace(TASK, model=plain)).start()


def test_group_and_layer_norm_are_kept_too() -> None:
    def other(client: str) -> dict[str, nn.Module]:
        layers = (nn.Flatten(), nn.Linear(192, 8), nn.LayerNorm(8), nn.ReLU(), nn.GroupNorm(2, 8))
        return {"features": nn.Sequential(*layers), "classifier": nn.Linear(8, CLASSES)}

    state = after(1, federation(METHOD, dataclasses.replace(TASK, model=other)))
    norms = {"features.2.weight", "features.2.bias", "features.4.weight", "features.4.bias"}
    assert state.memories["ann"].params.keys() == norms
    assert not state.server.params.keys() & norms


def test_alone_it_is_local_training() -> None:
    alone = small_task({"ann": [0, 1, 2, 3, 0, 1, 2, 3, 3]})
    state = after(3, federation(METHOD, alone))
    local = after(3, federation(LocalOnly(), alone)).memories["ann"].params
    own = METHOD.local_weights(state.server, state.memories["ann"])
    assert_same(tree.select(own, list(local)), local, "the only client's weights")


def test_the_weighting_changes_the_result() -> None:
    assert fingerprint(usual(METHOD, 2).server) != fingerprint(usual(UNIFORM, 2).server)
