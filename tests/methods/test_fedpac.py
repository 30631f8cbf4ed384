"""FedPAC: statistics, quadratic program, combination of heads, the two trainings, and three rounds by a reference."""

from math import exp, log

import pytest
import torch
from torch import Tensor, nn

from methods.conformance import (
    TASK,
    assert_close,
    batch_of,
    federation,
    identity_model,
    loaded,
    mean_cross_entropy,
    reply_of,
    scripted,
    trained_by_hand,
    usual,
)
from methods.few_numbers import (
    EPOCHS,
    LR,
    MOMENTUM,
    ROUNDS,
    after_all_rounds,
    clients,
    network,
)
from methods.few_numbers import federation as of_few_numbers
from protofed.data.batches import Batch
from protofed.methods._shared.models import HEAD
from protofed.methods.fedpac import (
    Combined,
    FedPAC,
    Message,
    Upload,
    combination_weights,
    feature_variance,
    least_on_simplex,
    moments,
    targets,
)
from protofed.nn.networks import Parts, matching, without
from protofed.optim.optimizers import Sgd
from protofed.prototypes.class_means import Prototypes, no_prototypes
from references import fedpac as reference
from references.plain import largest_difference


def prototypes(means: list[list[float]], counts: list[float]) -> Prototypes:
    return Prototypes(torch.tensor(means), torch.tensor(counts))


def upload(head: float, means: list[list[float]], counts: list[float], variance: float, n: int) -> Upload:
    params = {"classifier.weight": torch.tensor([head]), "features.weight": torch.tensor([10 * head])}
    mean = torch.tensor(means)
    return Upload(params, torch.tensor(n), torch.tensor(counts), mean, mean, torch.tensor(variance))


# ---- what clients send


def test_the_variance_is_the_spread_of_features_by_the_number_of_examples() -> None:
    # Features (1, 0), (3, 0) of class 0 and (0, 2), (0, 4) of class 1. E‖z‖² = (1 + 9 + 4 + 16) / 4 = 7.5.
    # Means (2, 0) and (0, 3), shares ½: Σ p² ‖μ‖² = ¼ · 4 + ¼ · 9 = 3.25. V = (7.5 − 3.25) / 4 = 1.0625.
    batch = batch_of([[1.0, 0.0], [3.0, 0.0], [0.0, 2.0], [0.0, 4.0]], [0, 0, 1, 1])
    found = moments(identity_model(torch.zeros(3, 2)), batch, torch.zeros(3))
    assert found.squares.item() == 30
    received = found.sums.prototypes()
    assert received.mean.tolist() == [[2, 0], [0, 3], [0, 0]]
    assert feature_variance(found.squares, received).item() == pytest.approx(1.0625)


def test_a_client_sends_class_means_before_and_after_training_in_evaluation_mode() -> None:
    state = usual(FedPAC(), 1)
    message = FedPAC().message_for(state.server, "ann")
    reply = reply_of(federation(FedPAC()), state, "ann")
    data = TASK.clients["ann"]
    for params, means in ((message.params, reply.upload.received_mean), (reply.upload.params, reply.upload.mean)):
        with torch.no_grad():
            z = loaded(params, training=False)["features"](TASK.transform.clean(data.x))
        for c in data.y.unique().tolist():
            torch.testing.assert_close(means[c], z[data.y == c].mean(0), rtol=1e-5, atol=1e-6)
    assert torch.equal(reply.upload.count, data.y.bincount(minlength=4).float())


# ---- the server


def test_the_program_of_two_clients_by_hand() -> None:
    # Without bias, weights are as 1 / V: V = 1 and 3 give 3/4 and 1/4.
    same = torch.tensor([[[1.0, 2.0]], [[1.0, 2.0]]])
    torch.testing.assert_close(
        combination_weights(same, torch.tensor([1.0, 3.0])),
        torch.tensor([[0.75, 0.25], [0.75, 0.25]], dtype=torch.float64),
    )
    # Squared distance 4 between the clients. For the first: α₁² · 1 + α₂² · (1 + 4), so α₁ / α₂ = 5: 5/6 and 1/6.
    apart = torch.tensor([[[0.0, 0.0]], [[2.0, 0.0]]])
    torch.testing.assert_close(
        combination_weights(apart, torch.tensor([1.0, 1.0])),
        torch.tensor([[5 / 6, 1 / 6], [1 / 6, 5 / 6]], dtype=torch.float64),
    )


def test_a_weight_that_would_be_negative_is_0() -> None:
    # For the first client, P = diag(1, 1, 1) + gram of differences 0, (1, 0), (10, 0): [[1,0,0],[0,2,10],[0,10,101]].
    # With the third at 0: α = (2/3, 1/3), αᵀPα = 2/3; its gradient 2·10/3 is above 2·2/3, so it stays at 0.
    places = torch.tensor([[[0.0, 0.0]], [[-1.0, 0.0]], [[-10.0, 0.0]]])
    found = combination_weights(places, torch.ones(3))
    torch.testing.assert_close(found[0], torch.tensor([2 / 3, 1 / 3, 0], dtype=torch.float64))


def test_weights_up_to_a_thousandth_are_dropped() -> None:
    # α₂ = 1 / (1 + 2000) = 0.0005.
    same = torch.zeros(2, 1, 1)
    assert combination_weights(same, torch.tensor([1.0, 2000.0])).tolist() == [[1, 0], [1, 0]]


def test_no_point_of_a_fine_grid_is_better_than_the_solution() -> None:
    draws = torch.Generator().manual_seed(5)
    for _ in range(5):
        root = torch.randn(3, 3, generator=draws, dtype=torch.float64)
        program = root @ root.T
        best = least_on_simplex(program)
        steps = torch.arange(51, dtype=torch.float64) / 50
        grid = torch.stack([torch.stack([a, b, 1 - a - b]) for a in steps for b in steps if a + b <= 1 + 1e-9])
        values = (grid @ program * grid).sum(-1)
        assert best.min() >= 0
        assert best.sum().item() == pytest.approx(1)
        assert (best @ program @ best).item() <= values.min().item() + 1e-9


def test_a_negative_variance_from_a_client_counts_as_none() -> None:
    found = combination_weights(torch.zeros(2, 1, 1), torch.tensor([-5.0, 1.0]))
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found, torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64))


def test_the_server_averages_bodies_and_centroids_and_combines_heads() -> None:
    none = no_prototypes(2, 1)
    first = {"classifier.weight": torch.tensor([0.0]), "features.weight": torch.tensor([0.0])}
    state = Combined(first, dict.fromkeys(("a", "b", "c"), matching(first, HEAD)), none)
    sent = [
        ("a", upload(1.0, [[4.0], [0.0]], [2.0, 0.0], 1.0, 2)),
        ("b", upload(5.0, [[1.0], [6.0]], [1.0, 5.0], 1.0, 6)),
    ]
    found = FedPAC().aggregate(state, iter(sent), None)
    # Bodies 10 and 50 by 2 and 6 examples: 40. Centroids by the examples of the class: (2·4 + 1·1) / 3 = 3, and 6.
    assert found.params["features.weight"].item() == pytest.approx(40)
    assert found.centroids.mean.flatten().tolist() == [3, 6]
    # h of a is (1 · 4, 0), of b (1/6 · 1, 5/6 · 6) = (1/6, 5): squared distance (23/6)² + 25 = 39.694.
    # a: α_b / α_a = 1 / (1 + 39.694), so α_b = 1 / 41.694, and its head is 1 + 4 / 41.694; that of b 5 − 4 / 41.694.
    assert found.heads["a"]["classifier.weight"].item() == pytest.approx(1 + 4 / 41.69444, abs=1e-5)
    assert found.heads["b"]["classifier.weight"].item() == pytest.approx(5 - 4 / 41.69444, abs=1e-5)
    assert found.heads["c"]["classifier.weight"].item() == 0  # c did not reply
    own = FedPAC(combination=False).aggregate(state, iter(sent), None)
    assert own.heads["a"]["classifier.weight"].item() == 1


def test_heads_are_combined_on_the_cpu_wherever_new_tensors_appear() -> None:
    sent = [upload(1.0, [[4.0]], [2.0], 1.0, 2), upload(5.0, [[1.0]], [1.0], 1.0, 1)]
    expected = [head["classifier.weight"].item() for head in FedPAC().combined(sent)]
    with torch.device("meta"):  # as it is with a GPU: what is made there cannot meet what is on the CPU
        found = FedPAC().combined(sent)
    assert [head["classifier.weight"].item() for head in found] == expected


def test_a_client_receives_its_own_head_and_a_new_client_the_mean() -> None:
    body = {"features.weight": torch.tensor([7.0]), "classifier.weight": torch.tensor([2.0])}
    state = Combined(body, {"a": {"classifier.weight": torch.tensor([3.0])}}, no_prototypes(2, 1))
    assert FedPAC().message_for(state, "a").params["classifier.weight"].item() == 3
    assert FedPAC().message_for(state, "new").params["classifier.weight"].item() == 2


def test_a_client_that_pauses_keeps_its_head() -> None:
    of = scripted(FedPAC(), lambda t: tuple(sorted(TASK.clients)) if t == 0 else ("ann", "bob"))
    first = of.advance(of.start())
    second = of.advance(first)
    assert_close(second.server.heads["eve"], first.server.heads["eve"], "eve's head", within=0)
    assert not torch.equal(
        second.server.heads["ann"]["classifier.weight"], first.server.heads["ann"]["classifier.weight"]
    )


# ---- the client


def test_features_are_pulled_to_centroids_or_to_the_own_mean_where_there_is_none() -> None:
    own = prototypes([[1.0, 1.0], [2.0, 2.0], [0.0, 0.0]], [3.0, 1.0, 0.0])
    known = prototypes([[5.0, 5.0], [0.0, 0.0], [6.0, 6.0]], [2.0, 0.0, 1.0])
    found = targets(known, own)
    assert found.mean.tolist() == [[5, 5], [2, 2], [6, 6]]
    assert found.is_known.tolist() == [True, True, False]  # the client has no example of the third class
    assert not targets(no_prototypes(3, 2), own).is_known.any()


def test_the_loss_of_the_body_is_cross_entropy_and_the_mean_squared_error() -> None:
    batch = batch_of([[2.0, 4.0], [5.0, 5.0]], [0, 1])
    aim = prototypes([[1.0, 1.0], [5.0, 6.0]], [1.0, 1.0])
    found = FedPAC(alignment_weight=0.5).loss(identity_model([[1.0, 0.0], [0.0, 1.0]]), batch, aim)
    # Cross-entropies log(1 + e²) and log 2; errors (1 + 9) / 2 = 5 and (0 + 1) / 2 = 0.5, of mean 2.75.
    assert found.item() == pytest.approx((log(1 + exp(2)) + log(2)) / 2 + 0.5 * 2.75, abs=1e-6)


def test_the_head_trains_first_and_then_the_body() -> None:
    method = FedPAC(head_epochs=2, head_lr=0.1, head_optimizer="sgd")
    state = usual(method, 1)
    message = method.message_for(state.server, "ann")
    reply = reply_of(federation(method), state, "ann")
    head, _ = trained_by_hand(
        message.params, "ann", mean_cross_entropy, round=1, fit=1, epochs=2, trains="classifier.*", sgd=Sgd(lr=0.1)
    )
    assert_close(matching(reply.upload.params, HEAD), matching(head, HEAD), "the head", within=1e-5)
    own = Prototypes(reply.upload.received_mean, reply.upload.count)
    aim = targets(message.centroids, own)

    def loss(parts: Parts, z: Tensor, batch: Batch) -> Tensor:
        rows = batch.weight > 0
        return mean_cross_entropy(parts, z, batch) + nn.functional.mse_loss(z[rows], aim.mean[batch.y[rows]])

    body, _ = trained_by_hand(head, "ann", loss, round=1, fit=2, trains="features.*")
    assert_close(without(reply.upload.params, HEAD), without(body, HEAD), "the body", within=1e-5)


@pytest.mark.parametrize("alignment", [1.0, 0.0])
def test_three_rounds_end_where_the_reference_ends(alignment: float) -> None:
    of = of_few_numbers(FedPAC(alignment_weight=alignment))
    parts = nn.ModuleDict(network())
    parts.load_state_dict(of.start().server.params)
    body, heads = reference.final_weights(
        clients(), parts, ROUNDS, epochs=EPOCHS, head_epochs=1, lr=LR, momentum=MOMENTUM, alignment=alignment
    )
    server = after_all_rounds(of).server
    found = {**without(server.params, HEAD)}
    expected = {f"features.{name}": leaf for name, leaf in body.items()}
    for client, head in heads.items():
        found |= {f"{client} {name}": leaf for name, leaf in server.heads[client].items()}
        expected |= {f"{client} classifier.{name}": leaf for name, leaf in head.items()}
    difference = largest_difference(found, expected)
    assert difference < 1e-6, f"largest difference {difference:.1e}"


def test_a_message_is_read_as_the_model_that_the_client_uses() -> None:
    message = Message({"classifier.weight": torch.tensor([1.0])}, no_prototypes(2, 1))
    assert FedPAC().local_weights(message, None) is message.params
