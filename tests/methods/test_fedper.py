"""FedPer: body and head train together; heads stay, bodies are averaged."""

import torch

from methods.conformance import (
    SIZES,
    TASK,
    after,
    assert_close,
    assert_same,
    federation,
    mean_cross_entropy,
    reply_of,
    small_task,
    trained_by_hand,
    usual,
)
from protofed.methods._shared.models import CLASSIFIER
from protofed.methods.fedper import FedPer
from protofed.methods.local import LocalOnly
from protofed.nn.networks import matching, without

METHOD = FedPer()
HEAD_NAMES = {"classifier.weight", "classifier.bias"}


def test_body_and_head_train_together_as_plain_torch_does() -> None:
    state = usual(METHOD, 1)
    start = {**state.server.params, **state.memories["ann"].params}
    expected, _ = trained_by_hand(start, "ann", mean_cross_entropy, round=1)
    reply = reply_of(federation(METHOD), state, "ann")
    assert_close(reply.upload.params, without(expected, CLASSIFIER), "the body", within=1e-5)
    assert_close(reply.memory.params, matching(expected, CLASSIFIER), "the head", within=1e-5)
    assert reply.upload.num_examples.item() == SIZES["ann"]


def test_the_head_is_kept_and_in_no_message_and_no_upload() -> None:
    state = usual(METHOD, 1)
    upload, message = reply_of(federation(METHOD), state, "ann").upload, METHOD.message_for(state.server, "ann")
    assert state.memories["ann"].params.keys() == HEAD_NAMES
    assert upload.params.keys() == message.params.keys()
    assert not upload.params.keys() & HEAD_NAMES
    assert not torch.equal(
        state.memories["ann"].params["classifier.weight"], state.memories["bob"].params["classifier.weight"]
    )


def test_the_body_is_the_mean_by_numbers_of_examples() -> None:
    of, state = federation(METHOD), usual(METHOD, 1)
    bodies = {client: reply_of(of, state, client).upload.params for client in TASK.clients}
    total = sum(SIZES.values())  # 38
    expected = {
        name: sum(SIZES[c] / total * bodies[c][name].double() for c in SIZES).float() for name in state.server.params
    }
    assert_close(usual(METHOD, 2).server.params, expected, "the body", within=1e-6)


def test_between_rounds_a_client_has_the_servers_body_and_its_own_head() -> None:
    state = usual(METHOD, 2)
    own = METHOD.local_weights(METHOD.message_for(state.server, "bob"), state.memories["bob"])
    assert_same(without(own, CLASSIFIER), state.server.params, "the body")
    assert_same(matching(own, CLASSIFIER), state.memories["bob"].params, "the head")
    assert METHOD.public(state.server) is None


def test_right_after_training_a_client_has_the_body_and_the_head_that_it_trained() -> None:
    state = usual(METHOD, 1)
    reply = reply_of(federation(METHOD), state, "ann")
    start = {**state.server.params, **state.memories["ann"].params}
    expected, _ = trained_by_hand(start, "ann", mean_cross_entropy, round=1)
    assert_close(METHOD.trained_weights(reply.upload, reply.memory), expected, "the trained model", within=1e-5)


def test_heads_start_from_the_common_initial_weights_even_late() -> None:
    of, state = federation(METHOD), usual(METHOD, 0)
    initial = of.server_context(0, "round").initial_params()
    for server in (state.server, usual(METHOD, 2).server):
        memory = of.client_state(state, "ann", METHOD.message_for(server, "ann"))
        assert_same(memory.params, matching(initial, CLASSIFIER), "the first head")


def test_alone_it_is_local_training() -> None:
    alone = small_task({"ann": [0, 1, 2, 3, 0, 1, 2, 3, 3]})
    state = after(3, federation(METHOD, alone))
    local = after(3, federation(LocalOnly(), alone)).memories["ann"].params
    assert_same({**state.server.params, **state.memories["ann"].params}, local, "the only client's weights")
