"""FedPer++ (reconstruction): the three terms on numbers, and FedPer without them."""

from collections.abc import Callable
from math import exp, log

import pytest
import torch
from torch import Tensor, nn

from methods.conformance import (
    CHECKS,
    TASK,
    after,
    assert_close,
    assert_same,
    batch_of,
    federation,
    fingerprint,
    loaded,
    reply_of,
    trained_by_hand,
    usual,
)
from protofed.api.method import Method
from protofed.data.batches import Batch
from protofed.engine.state import State
from protofed.methods._shared.models import CLASSIFIER
from protofed.methods.families import Weights
from protofed.methods.fedper import FedPer
from protofed.methods.fedper_plus import FedPerPlus, HeadAndCounts, balanced
from protofed.nn.networks import Model, Networks, Parts, matching, without

METHOD = FedPerPlus()
OFF = FedPerPlus(feature_weight=0.0, balanced=False, head_decay=0.0)
ONLY_FEATURES = FedPerPlus(balanced=False, head_decay=0.0)
ONLY_BALANCED = FedPerPlus(feature_weight=0.0, head_decay=0.0)
ONLY_DECAY = FedPerPlus(feature_weight=0.0, balanced=False)


@pytest.mark.parametrize("method", [METHOD, ONLY_FEATURES, ONLY_BALANCED], ids=repr)
@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: Callable[[Method], None], method: FedPerPlus) -> None:
    check(method)


def scaling_model(scale: list[float], matrix: list[list[float]]) -> Model:
    """A model whose features are the inputs, each dimension times its scale, and whose classifier is this matrix."""
    networks = Networks(lambda: {"features": Scale(), "classifier": nn.Linear(2, 2, bias=False)})
    return networks.model(
        {"features.scale": torch.tensor(scale), "classifier.weight": torch.tensor(matrix)}, training=True
    )


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def loss_of(method: FedPerPlus, model: Model, batch: Batch, count: list[int]) -> Tensor:
    received = Weights({"features.scale": torch.ones(2)})
    return method.loss(model, batch, received, HeadAndCounts({}, torch.tensor(count)))


ZERO = [[0.0, 0.0], [0.0, 0.0]]


def test_features_are_held_to_the_received_ones() -> None:
    # x = (3, 4) becomes (6, 4) and was (3, 4): squared error 9 + 0, half of it 4.5. The third row only fills the batch.
    # x = (1, 2) becomes (2, 2) and was (1, 2): 1 + 0, half of it 0.5. Mean 2.5, times 0.1.
    batch = batch_of([[3.0, 4.0], [1.0, 2.0], [50.0, 0.0]], [0, 1, 1], [1, 1, 0])
    found = loss_of(ONLY_FEATURES, scaling_model([2.0, 1.0], ZERO), batch, [1, 1])
    assert found.item() == pytest.approx(log(2) + 0.25, abs=1e-6)


def test_scores_are_balanced_by_the_counts() -> None:
    # All scores are 0; with 3 and 1 examples the shares are 3/4 and 1/4.
    batch = batch_of([[3.0, 4.0], [1.0, 2.0]], [0, 1])
    found = loss_of(ONLY_BALANCED, scaling_model([1.0, 1.0], ZERO), batch, [3, 1])
    assert found.item() == pytest.approx((-log(3 / 4) - log(1 / 4)) / 2, abs=1e-6)


def test_a_class_without_examples_counts_as_one_example() -> None:
    found = balanced(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([4, 0, 1]))
    # exp(1) · 4, exp(2) · 1, exp(3) · 1
    torch.testing.assert_close(found.exp(), torch.tensor([[4 * exp(1), exp(2), exp(3)]]), rtol=1e-5, atol=1e-5)


def test_the_head_decays() -> None:
    # Squares of the head: 1 + 4 + 9 + 0 = 14, times half of 5e-4; the body is left alone.
    method = FedPerPlus(feature_weight=0.0, balanced=False, head_decay=5e-4)
    model, batch = scaling_model([7.0, 7.0], [[1.0, 2.0], [3.0, 0.0]]), batch_of([[0.0, 0.0]], [0])
    assert loss_of(method, model, batch, [1, 1]).item() == pytest.approx(log(2) + 14 * 2.5e-4, abs=1e-6)


def test_a_client_counts_its_own_examples_and_keeps_them() -> None:
    state = usual(METHOD, 1)
    labels = TASK.clients["ann"].labels.tolist()
    assert state.memories["ann"].count.tolist() == [labels.count(c) for c in range(4)]
    assert matching(state.memories["ann"].params, CLASSIFIER).keys() == state.memories["ann"].params.keys()


def test_training_is_plain_torch_with_the_three_terms() -> None:
    state = usual(METHOD, 1)
    start = {**state.server.params, **state.memories["bob"].params}
    teacher = loaded(start, training=False)["features"]
    count = torch.bincount(TASK.clients["bob"].labels, minlength=4).clamp(min=1)

    def loss(parts: Parts, z: Tensor, batch: Batch) -> Tensor:
        rows = batch.weight > 0
        scores = parts["classifier"](z)[rows] + count.log()
        with torch.no_grad():
            wanted = teacher(batch.x)[rows]
        head = sum(p.square().sum() for p in parts["classifier"].parameters())
        held = nn.functional.mse_loss(z[rows], wanted)
        return nn.functional.cross_entropy(scores, batch.y[rows]) + 0.1 * held + 2.5e-4 * head

    expected, _ = trained_by_hand(start, "bob", loss, round=1)
    reply = reply_of(federation(METHOD), state, "bob")
    assert_close(reply.upload.params, without(expected, CLASSIFIER), "the body", within=1e-5)
    assert_close(reply.memory.params, matching(expected, CLASSIFIER), "the head", within=1e-5)


def end(method: Method) -> State:
    return after(3, federation(method))


def test_without_its_terms_it_is_fedper() -> None:
    plus, plain = end(OFF), end(FedPer())
    assert_same(plus.server, plain.server, "the server")
    for client in TASK.clients:
        assert_same(plus.memories[client].params, plain.memories[client].params, f"the head of {client}")


@pytest.mark.parametrize("method", [ONLY_FEATURES, ONLY_BALANCED, ONLY_DECAY], ids=repr)
def test_each_term_changes_the_result(method: FedPerPlus) -> None:
    assert fingerprint(end(method).server) != fingerprint(end(OFF).server)


def test_prediction_is_not_balanced() -> None:
    state, networks = usual(METHOD, 1), federation(METHOD).networks_of("ann")
    message, memory = METHOD.message_for(state.server, "ann"), state.memories["ann"]
    model = networks.model(METHOD.local_weights(message, memory))
    x = TASK.transform.clean(TASK.tests["domain 0"].x)
    assert_same(METHOD.predict(model, x, message, memory), model.logits(x), "scores")
