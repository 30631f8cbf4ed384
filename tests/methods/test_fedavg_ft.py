"""FedAvg-FT: the global model is FedAvg's, and clients fine-tune it for themselves."""

from collections.abc import Callable

import pytest

from methods.conformance import (
    CHECKS,
    TASK,
    TRAINING,
    after,
    assert_close,
    assert_same,
    federation,
    fingerprint,
    mean_cross_entropy,
    reply_of,
    trained_by_hand,
    usual,
)
from protofed.api.method import Method
from protofed.methods._shared.models import CLASSIFIER
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedavg_ft import FedAvgFT
from protofed.nn.networks import matching, without
from protofed.optim.optimizers import Sgd
from protofed.runtimes.sequential import Sequential

METHOD = FedAvgFT(fine_tuning_epochs=3)
HEAD_ONLY = FedAvgFT(fine_tuning_epochs=3, fine_tuned="classifier")


@pytest.mark.parametrize("method", [FedAvgFT(), HEAD_ONLY], ids=repr)
@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: Callable[[Method], None], method: FedAvgFT) -> None:
    check(method)


@pytest.mark.parametrize("method", [METHOD, HEAD_ONLY], ids=repr)
def test_the_global_model_is_that_of_fedavg_to_the_end(method: FedAvgFT) -> None:
    of = federation(method)
    state, fedavg = of.finish(after(3, of)), after(3, federation(FedAvg()))
    assert_same(state.server, fedavg.server, "the global weights")
    assert method.public(state.server)[0] is state.server.params


@pytest.mark.parametrize(("method", "trains"), [(METHOD, "*"), (HEAD_ONLY, "classifier.*")], ids=["all", "head"])
def test_a_client_fine_tunes_what_it_received(method: FedAvgFT, trains: str) -> None:
    state = usual(method, 1)
    received = state.server.params
    reply = reply_of(federation(method), state, "ann")
    expected, _ = trained_by_hand(received, "ann", mean_cross_entropy, round=1, fit=1, epochs=3, trains=trains)
    assert_close(reply.memory.params, expected, "the fine-tuned model", within=1e-5)
    sent, _ = trained_by_hand(received, "ann", mean_cross_entropy, round=1)
    assert_close(reply.upload.params, sent, "what is sent", within=1e-5)


def test_a_client_may_fine_tune_with_a_rate_and_an_optimiser_of_its_own() -> None:
    method = FedAvgFT(fine_tuning_epochs=3, fine_tuning_lr=0.2, fine_tuning_optimizer="sgd")
    state = usual(METHOD, 1)
    reply = reply_of(federation(method), state, "ann")
    expected, _ = trained_by_hand(
        state.server.params, "ann", mean_cross_entropy, round=1, fit=1, epochs=3, sgd=Sgd(lr=0.2)
    )
    assert_close(reply.memory.params, expected, "the fine-tuned model", within=1e-5)
    assert_same(reply.upload, reply_of(federation(METHOD), state, "ann").upload, "what is sent")


def test_only_the_head_is_fine_tuned_if_so_set() -> None:
    state = usual(HEAD_ONLY, 1)
    own, received = reply_of(federation(HEAD_ONLY), state, "ann").memory.params, state.server.params
    weights = ("*.running_*",)
    assert_same(without(without(own, CLASSIFIER), weights), without(without(received, CLASSIFIER), weights), "the body")
    assert fingerprint(matching(own, CLASSIFIER)) != fingerprint(matching(received, CLASSIFIER))


def test_the_client_is_the_fine_tuned_model_before_and_after_training() -> None:
    state = usual(METHOD, 1)
    message, memory = METHOD.message_for(state.server, "ann"), state.memories["ann"]
    assert METHOD.local_weights(message, memory) is memory.params
    reply = reply_of(federation(METHOD), state, "ann")
    assert METHOD.trained_weights(reply.upload, reply.memory) is reply.memory.params


def test_a_client_that_never_took_part_has_the_global_model() -> None:
    state = usual(METHOD, 2)
    of, message = federation(METHOD), METHOD.message_for(state.server, "ann")
    memory = METHOD.init_memory(of.client_context("ann", 2), message)
    assert_same(METHOD.local_weights(message, memory), state.server.params, "the weights of a newcomer")


def test_after_the_last_round_every_client_fine_tunes_the_final_model() -> None:
    of = federation(METHOD, fraction=0.2, rounds=1)
    last = after(1, of)
    assert len(last.memories) == 1
    state = of.finish(last)
    assert state.memories.keys() == TASK.clients.keys()
    request = METHOD.fine_tune(
        of.client_context("bob", 1, "finish"), METHOD.message_for(last.server, "bob"), None
    ).send(None)
    assert_same(request.params, last.server.params, "where the fine-tuning starts")
    assert request.epochs == 3
    assert_same(state.memories["bob"].params, Sequential().answer(request).params, "bob's model at the end")
    assert TRAINING.epochs != 3
