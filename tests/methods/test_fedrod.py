"""FedROD: the balanced softmax by hand, whose gradients go where, and three rounds against a plain torch loop."""

from math import log

import pytest
import torch

from methods.conformance import TASK, assert_same, federation, reply_of, small_network, usual
from protofed import tree
from protofed.data.batches import batch_at, training_plan
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedrod import FedROD, balanced
from protofed.prototypes.contrast import ABSENT
from references import fedrod
from references.plain import SGD, counted_batches, largest_difference, network

LABELS = {client: data.labels for client, data in TASK.clients.items()}
METHOD = FedROD()


@pytest.mark.parametrize("method", [METHOD, FedROD(balance=0.5)], ids=repr)
def test_three_rounds_are_those_of_the_reference(method: FedROD) -> None:
    """The largest difference of a weight is 6.0e-8."""
    expected, heads = fedrod.rounds(network(), LABELS, counted_batches, 3, SGD, method.balance)
    found = usual(method, 3)
    assert largest_difference(found.server.params, expected) < 5e-6
    for client, head in heads.items():
        named = {f"personal.{name}": leaf for name, leaf in head.items()}
        assert largest_difference(found.memories[client].params, named) < 5e-6
        assert named["personal.weight"].abs().max() > 0.01


def test_scores_are_raised_by_the_logarithm_of_the_count_and_absent_classes_are_out() -> None:
    found = balanced(torch.tensor([[1.0, 1.0, 1.0]]), torch.tensor([9, 1, 0]), 0.5)
    assert found[0].tolist() == pytest.approx([1 + log(3), 1.0, ABSENT])


def test_the_gradient_of_the_personal_loss_stops_at_the_generic_model() -> None:
    of = federation(METHOD)
    networks, params = of.networks_of("ann"), usual(METHOD, 1).memories["ann"].params
    params = {**usual(METHOD, 1).server.params, **params}
    data = TASK.clients["ann"]
    plan = training_plan(data, 8, 1, TASK.transform, torch.Generator().manual_seed(0))
    batch, count = batch_at(data, plan, 0, TASK.transform), data.labels.bincount(minlength=4)

    def gradients(loss_of: object) -> dict[str, torch.Tensor]:
        leaves = {name: params[name].clone().requires_grad_() for name in networks.trainable}
        buffers = {name: leaf.clone() for name, leaf in params.items() if name not in leaves}
        loss = loss_of(networks.model({**leaves, **buffers}, training=True))  # type: ignore[operator]
        return dict(zip(leaves, torch.autograd.grad(loss, [*leaves.values()], materialize_grads=True), strict=True))

    both = gradients(lambda model: METHOD.both_losses(model, batch, count))
    generic = gradients(lambda model: batch.cross_entropy(balanced(model.logits(batch.x), count, 1.0)))
    names = [name for name in both if not name.startswith("personal")]
    assert_same(tree.select(both, names), tree.select(generic, names), "the gradient of the generic model")
    assert both["personal.weight"].abs().max() > 0


def test_the_public_model_is_generic_and_a_client_adds_its_head() -> None:
    state = usual(METHOD, 2)
    message, memory = METHOD.message_for(state.server, "ann"), state.memories["ann"]
    model = federation(METHOD).networks_of("ann").model(METHOD.local_weights(message, memory))
    x = TASK.transform.clean(TASK.clients["ann"].x)
    generic = METHOD.predict(model, x, message, None)
    assert torch.equal(generic, model.logits(x))
    personal = METHOD.predict(model, x, message, memory)
    torch.testing.assert_close(personal - generic, model.personal(model.features(x)))


def test_a_client_that_never_took_part_predicts_as_all_do() -> None:
    of, state = federation(METHOD), usual(METHOD, 1)
    message = METHOD.message_for(state.server, "ann")
    memory = METHOD.init_memory(of.client_context("ann", 1), message)
    assert set(memory.params) == {"personal.weight", "personal.bias"}
    assert not any(leaf.any() for leaf in memory.params.values())


def test_the_personal_head_is_not_sent() -> None:
    reply = reply_of(federation(METHOD), usual(METHOD, 1), "bob")
    assert set(reply.upload.params) == set(usual(FedAvg(), 1).server.params)
    assert set(small_network()) == {name.split(".")[0] for name in reply.upload.params}


def test_without_balance_the_generic_model_is_that_of_fedavg() -> None:
    assert_same(usual(FedROD(balance=0.0), 3).server, usual(FedAvg(), 3).server, "the generic model")
    assert not torch.equal(
        usual(METHOD, 1).server.params["classifier.weight"], usual(FedAvg(), 1).server.params["classifier.weight"]
    )
