"""FedPCL: what trains, what is sent, both terms, the prediction, and three rounds by a reference."""

from math import exp, inf, log
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from methods.conformance import CLASSES, TASK, assert_same, batch_of, federation, reply_of, scripted, usual
from methods.few_numbers import EPOCHS, FEATURES, LR, MOMENTUM, ROUNDS, after_all_rounds, clients
from methods.few_numbers import federation as of_few_numbers
from protofed import wire
from protofed.methods.fedpcl import FedPCL, Own, Shared, prototype_contrast
from protofed.nn.networks import Model, Networks
from protofed.prototypes.class_means import Prototypes
from references import fedpcl as reference
from references.plain import largest_difference

SMALL = FedPCL(width=16)
FROZEN = FedPCL(width=16, encoder="frozen")


def prototypes(means: Any, counts: Any) -> Prototypes:
    return Prototypes(torch.tensor(means), torch.tensor(counts))


def identity() -> Model:
    """A model whose encoder and fusion give what they get."""
    networks = Networks(lambda: {"features": nn.Identity(), "fusion": nn.Identity(), "classifier": nn.Linear(2, 2)})
    return networks.model(networks.init(0), training=True)


# ---- networks


def test_a_frozen_encoder_does_not_train_and_stays_in_evaluation_mode() -> None:
    of = federation(FROZEN)
    networks = of.networks_of("ann")
    assert networks.trainable == ("fusion.0.weight", "fusion.0.bias")
    x = TASK.transform.clean(TASK.clients["ann"].x)
    params = networks.init(0)
    before = {name: leaf.clone() for name, leaf in params.items()}
    training, evaluation = (networks.model(params, training=mode).features(x) for mode in (True, False))
    assert torch.equal(training, evaluation)
    assert_same(params, before, "statistics of the encoder")
    trained = federation(SMALL).networks_of("ann").trainable
    assert {name.split(".")[0] for name in trained} == {"features", "fusion"}


def test_fused_features_have_length_1_and_only_their_class_means_leave_a_client() -> None:
    reply = reply_of(federation(SMALL), usual(SMALL, 1), "ann")
    assert {p: tuple(v.shape) for p, v in wire.to_arrays(reply.upload).items()} == {
        "mean": (CLASSES, 16),
        "count": (CLASSES,),
    }
    data, model = TASK.clients["ann"], federation(SMALL).networks_of("ann").model(reply.memory.params)
    with torch.no_grad():
        unit = F.normalize(model.fusion(model.features(TASK.transform.clean(data.x))), dim=-1)
    for c in data.y.unique().tolist():
        torch.testing.assert_close(reply.upload.mean[c], unit[data.y == c].mean(0), rtol=1e-4, atol=1e-5)
    assert reply.upload.count.tolist() == (data.y.bincount(minlength=CLASSES) > 0).float().tolist()
    assert_same(reply.memory.prototypes, reply.upload, "what the client keeps")


# ---- the server


def test_the_server_pads_with_the_global_prototypes_and_keeps_those_of_clients_that_pause() -> None:
    everyone, some = tuple(sorted(TASK.clients)), ("ann", "bob")
    of = scripted(SMALL, lambda t: everyone if t == 0 else some)
    first = of.advance(of.start())
    second = of.advance(first)
    before, after = first.server, second.server
    eve = everyone.index("eve")
    has = after.owned[eve] > 0
    assert torch.equal(before.owned, after.owned)
    assert torch.equal(before.clients[eve][has], after.clients[eve][has])
    for c in range(CLASSES):
        owners = after.owned[:, c] > 0
        torch.testing.assert_close(after.average.mean[c], after.clients[owners, c].mean(0))
        for padded in after.clients[~owners, c]:
            assert torch.equal(padded, after.average.mean[c])


def test_clients_that_never_sent_count_with_the_global_prototypes() -> None:
    of = scripted(SMALL, lambda t: ("ann", "bob"))
    server = of.advance(of.start()).server
    places = sorted(TASK.clients)
    assert not server.owned[places.index("eve")].any()
    assert torch.equal(server.clients[places.index("eve")], server.average.mean)


# ---- the client


def test_nothing_trains_in_the_first_round() -> None:
    initial = federation(SMALL).client_context("ann", 0).initial_params()
    assert_same(usual(SMALL, 1).memories["ann"].params, initial, "ann after the first round")
    with pytest.raises(AssertionError):
        assert_same(usual(SMALL, 2).memories["ann"].params, initial, "ann after the second round")


@pytest.mark.parametrize("others", [False, True])
def test_a_term_by_hand(others: bool) -> None:
    # (0.6, 0.8) against two sets of prototypes of classes 0 and 1; class 2 has none. Similarities 0.6, 0.8 and 1, 0.
    unit, y = torch.tensor([[0.6, 0.8], [0.6, 0.8]]), torch.tensor([1, 2])
    means = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [5.0, 5.0]], [[0.6, 0.8], [0.0, 0.0], [5.0, 5.0]]])
    found = prototype_contrast(unit, y, means, torch.tensor([True, True, False]), 0.5, others)
    first = log(exp(1.2) + (0 if others else exp(1.6))) - 1.6
    second = log(exp(2.0) + (0 if others else exp(0.0))) - 0.0
    assert found.tolist() == pytest.approx([(first + second) / 2, 0], abs=1e-5)


def test_a_class_without_rivals_has_no_term() -> None:
    unit, means = torch.tensor([[1.0, 0.0]]), torch.tensor([[[0.0, 1.0], [0.0, 0.0]]])
    for others in (True, False):
        found = prototype_contrast(unit, torch.tensor([0]), means, torch.tensor([True, False]), 0.07, others)
        assert found.tolist() == [0]


def test_the_loss_is_the_global_term_and_the_mean_of_the_clients_terms() -> None:
    average = prototypes([[1.0, 0.0], [0.0, 1.0]], [1.0, 1.0])
    two = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]]])
    batch = batch_of([[3.0, 4.0]], [1])  # of direction (0.6, 0.8)
    found = FedPCL(temperature=1.0).loss(identity(), batch, Shared(two, torch.ones(2, 2), average))
    near, far = log(1 + exp(0.6 - 0.8)), log(1 + exp(0.8 - 0.6))
    assert found.item() == pytest.approx(near + (near + far) / 2, abs=1e-6)


def test_the_nearest_own_prototype_predicts_and_the_global_one_for_classes_that_the_client_has_not() -> None:
    average = prototypes([[0.0, 1.0], [0.0, 1.0], [0.0, 0.0]], [2.0, 1.0, 0.0])
    own = prototypes([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]], [1.0, 0.0, 0.0])
    message, memory = Shared(torch.zeros(1, 3, 2), torch.zeros(1, 3), average), Own({}, own)
    x = torch.tensor([[2.0, 0.0]])
    # To (1, 0) from (1, 0): 0; to (0, 1): (1 + 1) / 2 = 1.
    assert FedPCL().predict(identity(), x, message, memory).tolist() == [[0, -1, -inf]]
    assert FedPCL(inference="global").predict(identity(), x, message, memory).tolist() == [[-1, -1, -inf]]
    none = prototypes([[0.0, 0.0]] * 3, [0.0] * 3)
    empty = Shared(torch.zeros(1, 3, 2), torch.zeros(1, 3), none)
    assert FedPCL().predict(identity(), x, empty, Own({}, none)).tolist() == [[0, 0, 0]]


@pytest.mark.parametrize(("encoder", "rivals"), [("frozen", "all"), ("trained", "all"), ("trained", "others")])
def test_three_rounds_end_where_the_reference_ends(encoder: Any, rivals: Any) -> None:
    of = of_few_numbers(FedPCL(temperature=0.5, width=5, encoder=encoder, rivals=rivals))
    networks, start = of.networks_of("ann"), of.client_context("ann", 0).initial_params()
    linear, fusion = nn.Linear(4, FEATURES), nn.Linear(FEATURES, 5)
    prefix = "features.encoder.0." if encoder == "frozen" else "features.0."
    known: dict[str, Tensor] = {**networks.constants, **start}
    linear.load_state_dict({name: known[prefix + name] for name in ("weight", "bias")})
    fusion.load_state_dict({name: known[f"fusion.0.{name}"] for name in ("weight", "bias")})
    models = reference.final_weights(
        clients(),
        nn.Sequential(linear, nn.ReLU()),
        nn.Sequential(fusion, nn.ReLU()),
        ROUNDS,
        epochs=EPOCHS,
        lr=LR,
        momentum=MOMENTUM,
        temperature=0.5,
        others=rivals == "others",
        trains_encoder=encoder == "trained",
    )
    memories, difference = after_all_rounds(of).memories, 0.0
    for client, model in models.items():
        expected = {name: leaf for name, leaf in model.state_dict().items() if name in networks.trainable}
        assert expected
        difference = max(difference, largest_difference(memories[client].params, expected))
    assert difference < 1e-5, f"largest difference {difference:.1e}"
