"""Ditto: the global model is FedAvg's, and beside it every client trains its own near it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from methods.conformance import (
    CHECKS,
    TASK,
    TRAINING,
    after,
    assert_close,
    assert_same,
    batch_of,
    federation,
    fingerprint,
    mean_cross_entropy,
    reply_of,
    trained_by_hand,
    usual,
)
from protofed.api.method import Method
from protofed.data.batches import Batch
from protofed.methods.ditto import Ditto
from protofed.methods.families import OwnWeights
from protofed.methods.fedavg import FedAvg
from protofed.nn.networks import Parts
from protofed.optim.optimizers import Sgd
from protofed.tree import Params

METHOD = Ditto(proximal_weight=0.6)
TO_TRAINED = Ditto(proximal_weight=0.6, reference="trained")


@pytest.mark.parametrize("method", [Ditto(), Ditto(reference="trained")], ids=repr)
@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: Callable[[Method], None], method: Ditto) -> None:
    check(method)


@pytest.mark.parametrize("method", [METHOD, TO_TRAINED], ids=repr)
def test_the_global_model_is_that_of_fedavg(method: Ditto) -> None:
    ditto, fedavg = after(3, federation(method)), after(3, federation(FedAvg()))
    assert_same(ditto.server, fedavg.server, "the global weights after three rounds")
    assert method.public(ditto.server)[0] is ditto.server.params


def held_to(anchor: Params) -> Callable[[Parts, Tensor, Batch], Tensor]:
    """Cross-entropy and 0.6 / 2 times the squared distance to these weights, by plain torch."""

    def loss(parts: Parts, z: Tensor, batch: Batch) -> Tensor:
        named = {f"{part}.{name}": p for part, module in parts.items() for name, p in module.named_parameters()}
        squares = sum((p - anchor[name]).square().sum() for name, p in named.items())
        return mean_cross_entropy(parts, z, batch) + 0.3 * squares

    return loss


@pytest.mark.parametrize("method", [METHOD, TO_TRAINED], ids=repr)
def test_the_own_model_goes_on_from_itself_held_to_the_reference(method: Ditto) -> None:
    state = usual(method, 1)
    own, received = state.memories["ann"].params, state.server.params
    reply = reply_of(federation(method), state, "ann")
    anchor = received if method is METHOD else reply.upload.params
    expected, _ = trained_by_hand(own, "ann", held_to(anchor), round=1, fit=1)
    assert_close(reply.memory.params, expected, "the own model", within=1e-5)
    globally, _ = trained_by_hand(received, "ann", mean_cross_entropy, round=1)
    assert_close(reply.upload.params, globally, "what is sent", within=1e-5)


OWN_TRAINING = Ditto(proximal_weight=0.6, personal_epochs=3, personal_lr=0.2, personal_optimizer="sgd")


def test_the_own_model_may_train_with_epochs_rate_and_optimiser_of_its_own() -> None:
    state = usual(METHOD, 1)
    own, received = state.memories["ann"].params, state.server.params
    reply = reply_of(federation(OWN_TRAINING), state, "ann")
    expected, _ = trained_by_hand(own, "ann", held_to(received), round=1, fit=1, epochs=3, sgd=Sgd(lr=0.2))
    assert_close(reply.memory.params, expected, "the own model", within=1e-5)
    assert_same(reply.upload, reply_of(federation(METHOD), state, "ann").upload, "what is sent")


def test_what_the_configuration_says_may_be_said_again() -> None:
    again = Ditto(proximal_weight=0.6, personal_epochs=TRAINING.epochs, personal_lr=TRAINING.optimizer.lr)
    assert_same(usual(again, 2).memories["ann"], usual(METHOD, 2).memories["ann"], "the own model")


def test_the_penalty_on_numbers_and_not_on_statistics() -> None:
    networks = federation(METHOD).networks_of("ann")
    params = networks.init(0)
    anchor = {name: leaf + 0.1 for name, leaf in params.items()}
    batch = batch_of(TASK.transform.clean(TASK.clients["ann"].x), TASK.clients["ann"].y)

    def loss(method: Ditto) -> float:
        own = {name: leaf.clone() for name, leaf in params.items()}
        return method.personal_loss(networks.model(own, training=True), batch, anchor).item()

    # 276 parameters are 0.1 away: 0.6 / 2 · 276 · 0.01 = 0.828. The 16 statistics do not count.
    assert loss(METHOD) - loss(Ditto(proximal_weight=0.0)) == pytest.approx(0.828, abs=1e-4)


def test_the_client_is_its_own_model_before_and_after_training() -> None:
    state = usual(METHOD, 1)
    message = METHOD.message_for(state.server, "ann")
    assert METHOD.local_weights(message, state.memories["ann"]) is state.memories["ann"].params
    reply = reply_of(federation(METHOD), state, "ann")
    assert METHOD.trained_weights(reply.upload, reply.memory) is reply.memory.params
    assert fingerprint(reply.memory.params) != fingerprint(reply.upload.params)


def test_own_models_start_from_the_weights_that_are_received_first() -> None:
    of, late = federation(METHOD), usual(METHOD, 2)
    memory = METHOD.init_memory(of.client_context("ann", 2), METHOD.message_for(late.server, "ann"))
    assert isinstance(memory, OwnWeights)
    assert_same(memory.params, late.server.params, "the first own model")


def test_a_strong_penalty_keeps_the_own_model_nearer() -> None:
    """λ times the learning rate, 0.05, stays below 1."""

    def distance(method: Ditto) -> float:
        state = usual(method, 1)
        reply = reply_of(federation(method), state, "bob")
        gaps = [(reply.memory.params[n] - state.server.params[n]).norm() for n in ("features.0.weight",)]
        return torch.stack(gaps).sum().item()

    assert distance(Ditto(proximal_weight=8.0)) < distance(Ditto(proximal_weight=0.0))
