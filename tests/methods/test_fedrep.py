"""FedRep: the head first, then the body; heads stay, bodies are averaged."""

from typing import Any

import pytest
import torch

from methods.conformance import (
    SIZES,
    TASK,
    TRAINING,
    assert_close,
    assert_same,
    federation,
    mean_cross_entropy,
    reply_of,
    trained_by_hand,
    usual,
)
from protofed import tree
from protofed.api.requests import Fit
from protofed.methods._shared.models import CLASSIFIER
from protofed.methods.fedrep import FedRep
from protofed.nn.networks import matching, without
from protofed.optim.optimizers import Sgd
from protofed.runtimes.sequential import Sequential
from protofed.tree import Params

FEDREP = FedRep(head_epochs=3)
STATISTICS = ("*.running_*",)


def phases(method: FedRep, client: str = "ann") -> tuple[Params, list[tuple[Fit, Params]]]:
    """The weights that a client starts a round from, and each fit that it asks for with the answer."""
    of, state = federation(method), usual(method, 1)
    message, memory = method.message_for(state.server, client), state.memories[client]
    step = method.train(of.client_context(client, state.round), message, memory)
    asked: list[tuple[Fit, Params]] = []
    answer: Any = None
    while True:
        try:
            request = step.send(answer)
        except StopIteration:
            return method.local_weights(message, memory), asked
        answer = Sequential().answer(request)
        asked.append((request, answer.params))


def all_differ(a: Params, b: Params) -> bool:
    return bool(a) and all(not torch.equal(a[name], b[name]) for name in a)


def test_the_head_trains_first_and_the_body_after_it() -> None:
    start, [(_, first), (_, second)] = phases(FEDREP)
    head, body = matching(start, CLASSIFIER), without(without(start, CLASSIFIER), STATISTICS)
    assert_same(tree.select(first, body), body, "the body while the head trains")
    assert all_differ(tree.select(first, head), head)
    assert_same(tree.select(second, head), tree.select(first, head), "the head while the body trains")
    # A convolution's bias before BatchNorm has no gradient but rounding, and may stay.
    assert all_differ(tree.select(second, [n for n in body if n != "features.0.bias"]), first)


@pytest.mark.parametrize("head_epochs", [1, 3])
def test_the_head_trains_for_its_epochs_and_the_body_for_the_configured_ones(head_epochs: int) -> None:
    _, asked = phases(FedRep(head_epochs=head_epochs))
    assert [request.epochs for request, _ in asked] == [head_epochs, TRAINING.epochs]


def test_both_phases_are_plain_torch_with_one_part_frozen() -> None:
    """Statistics of BatchNorm move in both, as in training mode."""
    start, _ = phases(FEDREP)
    first, _ = trained_by_hand(start, "ann", mean_cross_entropy, round=1, fit=0, epochs=3, trains="classifier.*")
    second, _ = trained_by_hand(first, "ann", mean_cross_entropy, round=1, fit=1, trains="features.*")
    reply = reply_of(federation(FEDREP), usual(FEDREP, 1), "ann")
    assert_close(reply.upload.params, without(second, CLASSIFIER), "the body", within=1e-5)
    assert_close(reply.memory.params, matching(second, CLASSIFIER), "the head", within=1e-5)
    assert all_differ(matching(first, STATISTICS), start)


def test_the_head_may_train_with_a_rate_and_an_optimiser_of_its_own() -> None:
    method = FedRep(head_epochs=3, head_lr=0.2, head_optimizer="sgd")
    start, _ = phases(FEDREP)
    first, _ = trained_by_hand(
        start, "ann", mean_cross_entropy, round=1, fit=0, epochs=3, trains="classifier.*", sgd=Sgd(lr=0.2)
    )
    second, _ = trained_by_hand(first, "ann", mean_cross_entropy, round=1, fit=1, trains="features.*")
    reply = reply_of(federation(method), usual(FEDREP, 1), "ann")
    assert_close(reply.memory.params, matching(second, CLASSIFIER), "the head", within=1e-5)
    assert_close(reply.upload.params, without(second, CLASSIFIER), "the body, as configured", within=1e-5)


def test_the_head_is_in_no_message_and_no_upload() -> None:
    state = usual(FEDREP, 1)
    upload = reply_of(federation(FEDREP), state, "ann").upload
    message = FEDREP.message_for(state.server, "ann")
    assert not matching(upload.params, CLASSIFIER)
    assert not matching(message.params, CLASSIFIER)
    assert upload.params.keys() == message.params.keys()
    assert state.memories["ann"].params.keys() == {"classifier.weight", "classifier.bias"}


def test_clients_share_the_body_and_differ_in_the_head() -> None:
    state = usual(FEDREP, 2)
    own = {c: FEDREP.local_weights(FEDREP.message_for(state.server, c), state.memories[c]) for c in TASK.clients}
    for client in TASK.clients:
        assert_same(without(own[client], CLASSIFIER), state.server.params, f"the body of {client}")
    for other in TASK.clients.keys() - {"ann"}:
        assert all_differ(matching(own["ann"], CLASSIFIER), own[other])


def test_the_body_is_the_mean_by_numbers_of_examples() -> None:
    of, state = federation(FEDREP), usual(FEDREP, 1)
    bodies = {client: reply_of(of, state, client).upload.params for client in TASK.clients}
    total = sum(SIZES.values())
    expected = {
        name: sum(SIZES[c] / total * bodies[c][name].double() for c in SIZES).float() for name in state.server.params
    }
    assert_close(usual(FEDREP, 2).server.params, expected, "the body", within=1e-6)


def test_heads_start_from_the_common_initial_weights_and_nobody_has_a_public_model() -> None:
    of, state = federation(FEDREP), usual(FEDREP, 0)
    initial = of.server_context(0, "round").initial_params()
    for client in TASK.clients:
        memory = of.client_state(state, client, FEDREP.message_for(state.server, client))
        assert_same(FEDREP.local_weights(state.server, memory), initial, f"the start of {client}")
    assert FEDREP.public(state.server) is None
