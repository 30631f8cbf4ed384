"""FedTGP: the margin, the server's loss and training, what clients learn against, and three rounds by a reference."""

from math import exp, inf, log

import pytest
import torch
from torch import nn

from methods.conformance import (
    CLASSES,
    FEATURES,
    ODD_TASK,
    TASK,
    after,
    assert_close,
    assert_same,
    batch_of,
    federation,
    identity_model,
    loaded,
    reply_of,
    usual,
)
from methods.few_numbers import CLASSES as FEW_CLASSES
from methods.few_numbers import EPOCHS, LR, MOMENTUM, ROUNDS, after_all_rounds, clients, network
from methods.few_numbers import FEATURES as FEW_FEATURES
from methods.few_numbers import federation as of_few_numbers
from protofed import wire
from protofed.methods.fedtgp import FedTGP, generated, initial_generator, largest_gap, margin_contrast
from protofed.methods.local import LocalOnly
from protofed.prototypes.class_means import Prototypes
from references import fedtgp as reference
from references.plain import largest_difference

NAMES = {"embedding": "embedding.weight"}
"""What the reference calls some of the server's weights."""


def prototypes(means: list[list[float]], counts: list[float]) -> Prototypes:
    return Prototypes(torch.tensor(means), torch.tensor(counts))


# ---- the server


def test_the_largest_gap_is_that_of_the_class_farthest_from_its_nearest() -> None:
    ann = prototypes([[0.0, 0.0], [4.0, 0.0], [0.0, 0.0]], [1.0, 1.0, 0.0])
    bob = prototypes([[0.0, 0.0], [2.0, 0.0], [3.0, 4.0]], [1.0, 1.0, 1.0])
    # Means over owners: (0, 0), (3, 0), (3, 4). Nearest others: 3, 3 and 4.
    assert largest_gap([ann, bob]) == pytest.approx(4.0)


def test_one_class_alone_has_no_limit_of_its_own() -> None:
    assert largest_gap([prototypes([[1.0], [0.0]], [1.0, 0.0])]) == inf
    method = FedTGP(server_epochs=1)
    state = usual(method, 0).server
    only = Prototypes(torch.zeros(CLASSES, FEATURES), torch.zeros(CLASSES))
    only.mean[1], only.count[1] = 1.0, 1.0
    found = method.aggregate(state, iter([("ann", only)]), federation(method).server_context(0, "round"))
    assert found.prototypes.count.tolist() == [0, 1, 0, 0]
    assert torch.isfinite(found.prototypes.mean).all()
    assert not found.prototypes.mean[[0, 2, 3]].any()


def test_the_contrast_by_hand() -> None:
    # From (0, 0) the prototypes are 5 and 1 away. Own class 0, margin 2: softmax of −7 and −1, so log(1 + e⁶).
    # From (3, 4), the first prototype itself, they are 0 and √(9 + 9) away. Own class 1: log(1 + e^(√18 + 2)).
    z, y = torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.tensor([0, 1])
    made = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    expected = (log(1 + exp(6)) + log(1 + exp(18**0.5 + 2))) / 2
    assert margin_contrast(z, y, made, 2.0).item() == pytest.approx(expected, abs=1e-5)


def test_the_contrast_has_a_finite_slope_on_a_prototype() -> None:
    made = torch.tensor([[1.0, 1.0], [2.0, 3.0]], requires_grad=True)
    margin_contrast(torch.tensor([[1.0, 1.0]]), torch.tensor([0]), made, 1.0).backward()
    assert torch.isfinite(made.grad).all()


def test_the_generator_begins_as_torchs_layers_do() -> None:
    weights = initial_generator(500, 100, torch.Generator().manual_seed(0))
    assert weights["embedding"].std().item() == pytest.approx(1, abs=0.02)
    for name in ("middle.weight", "middle.bias", "last.weight", "last.bias"):
        assert weights[name].abs().max() <= 0.1  # 1 / √100
    assert weights["middle.weight"].std().item() == pytest.approx(0.1 / 3**0.5, abs=0.002)
    hidden = (weights["embedding"] @ weights["middle.weight"].T + weights["middle.bias"]).clamp(min=0)
    expected = hidden @ weights["last.weight"].T + weights["last.bias"]
    torch.testing.assert_close(generated(weights), expected, rtol=1e-4, atol=1e-5)


def test_training_keeps_global_prototypes_apart() -> None:
    state = usual(FedTGP(), 2).server
    assert state.prototypes.is_known.all()
    torch.testing.assert_close(generated(state.generator), state.prototypes.mean)
    sent = [reply_of(federation(FedTGP()), usual(FedTGP(), 2), client).upload for client in TASK.clients]
    made = [Prototypes(state.prototypes.mean, torch.ones(CLASSES))]
    assert largest_gap(made) > largest_gap(sent)


def test_a_class_that_nobody_has_is_no_prototype() -> None:
    state = after(2, federation(FedTGP(), ODD_TASK)).server
    assert state.prototypes.is_known.tolist() == [True, True, True, False]
    assert not state.prototypes.mean[3].any()


# ---- the client


def test_the_loss_is_cross_entropy_and_the_mean_squared_error() -> None:
    known = prototypes([[1.0, 1.0], [0.0, 0.0]], [4.0, 0.0])
    batch = batch_of([[2.0, 4.0], [5.0, 5.0]], [0, 1])
    found = FedTGP(pull_weight=3.0).loss(identity_model([[1.0, 0.0], [0.0, 1.0]]), batch, known)
    # The first is pulled by (1 + 9) / 2 = 5; the second's class has no prototype.
    assert found.item() == pytest.approx((log(1 + exp(2)) + log(2)) / 2 + 3 * 2.5, abs=1e-6)


def test_the_nearest_prototype_predicts_once_there_are_some() -> None:
    model, x = identity_model([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 5.0]])
    known = prototypes([[1.0, 4.0], [9.0, 9.0]], [1.0, 1.0])
    assert FedTGP().predict(model, x, known, None).tolist() == [[-0.5, -40.0]]
    assert FedTGP(inference="classifier").predict(model, x, known, None).tolist() == [[2.0, 5.0]]
    none = prototypes([[0.0, 0.0], [0.0, 0.0]], [0.0, 0.0])
    assert FedTGP().predict(model, x, none, None).tolist() == [[2.0, 5.0]]


def test_only_prototypes_leave_a_client_and_they_are_in_evaluation_mode() -> None:
    reply = reply_of(federation(FedTGP()), usual(FedTGP(), 1), "ann")
    sizes = {path: tuple(leaf.shape) for path, leaf in wire.to_arrays(reply.upload).items()}
    assert sizes == {"mean": (CLASSES, FEATURES), "count": (CLASSES,)}
    data = TASK.clients["ann"]
    with torch.no_grad():
        z = loaded(reply.memory.params, training=False)["features"](TASK.transform.clean(data.x))
    expected = torch.zeros(CLASSES, FEATURES)
    for c in data.y.unique().tolist():
        expected[c] = z[data.y == c].mean(0)
    assert_close(reply.upload.mean, expected, "prototypes", within=1e-5)
    assert reply.upload.count.max() == 1


def test_without_its_pull_it_is_local_training() -> None:
    found, alone = usual(FedTGP(pull_weight=0.0), 3), usual(LocalOnly(), 3)
    for client in TASK.clients:
        assert_same(found.memories[client].params, alone.memories[client].params, client)
    assert usual(FedTGP(), 2).memories["ann"].params.keys()
    with pytest.raises(AssertionError):
        assert_same(usual(FedTGP(), 2).memories["ann"].params, usual(LocalOnly(), 2).memories["ann"].params, "ann")


@pytest.mark.parametrize("threshold", [100.0, 0.5])
def test_three_rounds_end_where_the_reference_ends(threshold: float) -> None:
    method = FedTGP(pull_weight=2.0, server_epochs=20, server_batch=64, server_rate=0.1, margin_threshold=threshold)
    of = of_few_numbers(method)
    start = of.start()
    parts = nn.ModuleDict(network())
    parts.load_state_dict(of.client_context("ann", 0).initial_params())
    server = reference.GlobalPrototypes(FEW_CLASSES, FEW_FEATURES)
    server.load_state_dict({NAMES.get(name, name): leaf for name, leaf in start.server.generator.items()})
    made, models = reference.final_weights(
        clients(),
        parts,
        server,
        ROUNDS,
        epochs=EPOCHS,
        lr=LR,
        momentum=MOMENTUM,
        pull=2.0,
        server_epochs=20,
        server_lr=0.1,
        threshold=threshold,
    )
    state = after_all_rounds(of)
    found = {NAMES.get(name, name): leaf for name, leaf in state.server.generator.items()}
    difference = largest_difference(found, made)
    for client, expected in models.items():
        difference = max(difference, largest_difference(state.memories[client].params, expected))
    assert difference < 1e-5, f"largest difference {difference:.1e}"
