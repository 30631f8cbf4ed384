"""FedDyn: client and server against the paper's algorithm, the sum of the states, and what is left without α."""

import dataclasses
from collections.abc import Callable
from math import log

import pytest
import torch
from torch import Tensor

from methods.conformance import (
    CHECKS,
    SIZES,
    TASK,
    after,
    assert_close,
    assert_same,
    batch_of,
    federation,
    fingerprint,
    identity_model,
    mean_cross_entropy,
    reply_of,
    scripted,
    trained_by_hand,
    usual,
)
from protofed import tree
from protofed.api.method import Method, Weighting
from protofed.data.batches import Batch
from protofed.methods._shared.control_variates import corrected, drift_penalty, updated_drift
from protofed.methods.families import Weights, WeightUpload
from protofed.methods.fedavg import FedAvg
from protofed.methods.feddyn import Drift, FedDyn
from protofed.nn.networks import Parts
from protofed.tree import Mean, Params

TRAINABLE = federation(FedDyn()).networks_of("ann").trainable
PRESENT = [("ann", "bob", "cyd", "dan", "eve"), ("bob", "eve"), ("ann", "bob", "dan")]
"""Who takes part in three rounds."""


@pytest.mark.parametrize(
    "method", [FedDyn(), FedDyn(weighting="examples"), FedDyn(penalty_weight=0.0)], ids=["default", "examples", "zero"]
)
@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: Callable[[Method], None], method: FedDyn) -> None:
    check(method)


# ---- the client


def test_the_loss_is_cross_entropy_and_half_alpha_times_the_squared_way_from_the_received_weights_less_the_drift() -> (
    None
):
    model = identity_model([[0.0, 0.0], [0.0, 0.0]])
    received, drift = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[0.0, 3.0], [0.0, 1.0]])
    penalty = drift_penalty(model, {"classifier.weight": received}, {"classifier.weight": drift})
    # w + drift − received = 0 + (0, 3, 0, 1) − (1, 0, 0, 2) = (−1, 3, 0, −1); half of 1 + 9 + 1 is 5.5.
    assert penalty.item() == pytest.approx(5.5)
    message, memory = Weights({"classifier.weight": received}), Drift({"classifier.weight": drift})
    batch = batch_of([[3.0, 4.0], [0.0, 2.0]], [0, 1])
    # All logits are 0, so cross-entropy is log 2; 0.2 · 5.5 = 1.1.
    assert FedDyn(penalty_weight=0.2).loss(model, batch, message, memory).item() == pytest.approx(log(2) + 1.1)


def test_a_client_adds_the_way_it_went_to_its_drift() -> None:
    drift, end, start = ({"w": torch.tensor(values)} for values in ([1.0, 2.0], [5.0, 1.0], [4.0, 3.0]))
    assert updated_drift(drift, end, start)["w"].tolist() == [2.0, 0.0]  # 1 + 5 − 4 and 2 + 1 − 3
    assert updated_drift(drift, end, start, 0.5)["w"].tolist() == [1.5, 1.0]
    state = usual(FedDyn(), 1)
    reply = reply_of(federation(FedDyn()), state, "bob")
    before, received = state.memories["bob"].drift, state.server.params
    way = {name: reply.upload.params[name] - received[name] for name in TRAINABLE}
    expected = {name: before[name] + way[name] for name in TRAINABLE}
    assert_close(reply.memory.drift, expected, "the drift of bob", within=1e-7)
    assert max(leaf.abs().max() for leaf in before.values()) > 1e-2
    assert max(leaf.abs().max() for leaf in way.values()) > 1e-2


# ---- the server


def test_the_mean_over_clients_and_the_share_that_is_behind_it() -> None:
    central = federation(FedDyn()).server_context(0, "round")
    params = {"ann": 3.0, "bob": 6.0}
    uploads = [(c, WeightUpload({"w": torch.tensor([w])}, torch.tensor(SIZES[c]))) for c, w in params.items()]
    # ann has 11 examples, bob 6, all five clients have 38: (11 · 3 + 6 · 6) / 17 = 69 / 17.
    expected = {"uniform": (4.5, 2 / 5), "examples": (69 / 17, 17 / 38)}
    for weighting, (mean, share) in expected.items():
        method, total = FedDyn(weighting=weighting), Mean()
        for _, upload in uploads:
            [(value, weight)] = method.summand(upload, Weights({})).values()
            total.add(value, weight)
        assert total.value().params["w"].item() == pytest.approx(mean)
        assert method.share({"upload": total}, central) == pytest.approx(share)


def test_the_server_adds_the_mean_drift_to_parameters_only() -> None:
    mean = {"weight": torch.tensor([1.0]), "running_mean": torch.tensor([5.0])}
    found = corrected(mean, {"weight": torch.tensor([0.5])})
    assert_same(found, {"weight": torch.tensor([1.5]), "running_mean": torch.tensor([5.0])}, "the corrected mean")
    method = FedDyn(weighting="uniform")
    state = usual(method, 1)
    assert tuple(state.server.drift) == TRAINABLE
    replies = [reply_of(federation(method), state, client).upload.params for client in sorted(TASK.clients)]
    after_round = usual(method, 2).server.params
    statistics = [name for name in after_round if name not in TRAINABLE]
    expected = {name: sum(r[name].double() for r in replies) / 5 for name in statistics}
    assert statistics
    assert_close(tree.select(after_round, statistics), expected, "statistics of BatchNorm", within=1e-7)


# ---- the paper's algorithm


def feddyn_by_hand(alpha: float, weights: dict[str, float]) -> Params:
    """The paper's form: gradients g of clients and h of the server, for three rounds of which two lack clients."""
    server = federation(FedAvg()).start().server.params
    h = {name: torch.zeros_like(server[name], dtype=torch.float64) for name in TRAINABLE}
    gradients = {client: dict(h) for client in TASK.clients}
    for t, present in enumerate(PRESENT):
        replies = {c: _client_by_hand(server, c, gradients[c], alpha, t) for c in present}
        for client, params in replies.items():
            for name in TRAINABLE:
                way = params[name].double() - server[name].double()
                gradients[client][name] = gradients[client][name] - alpha * way
                h[name] = h[name] - alpha * weights[client] / sum(weights.values()) * way
        total = sum(weights[client] for client in present)
        mean = {name: sum(weights[c] * replies[c][name].double() for c in present) / total for name in server}
        new = {name: mean[name] - h[name] / alpha if name in h else mean[name] for name in server}
        server = {name: leaf.float() for name, leaf in new.items()}
    return server


def _client_by_hand(received: Params, client: str, gradient: Params, alpha: float, round: int) -> Params:
    def loss(parts: Parts, z: Tensor, batch: Batch) -> Tensor:
        named = {f"{part}.{name}": p for part, module in parts.items() for name, p in module.named_parameters()}
        linear = sum((gradient[name].float() * p).sum() for name, p in named.items())
        squares = sum((p - received[name]).square().sum() for name, p in named.items())
        return mean_cross_entropy(parts, z, batch) - linear + alpha / 2 * squares

    return trained_by_hand(received, client, loss, round=round)[0]


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_three_rounds_with_absent_clients_are_those_of_the_paper(weighting: Weighting) -> None:
    method = FedDyn(penalty_weight=0.2, weighting=weighting)
    found = after(3, scripted(method, PRESENT.__getitem__)).server.params
    weights = SIZES if weighting == "examples" else dict.fromkeys(SIZES, 1)
    assert_close(found, feddyn_by_hand(0.2, weights), "the weights after three rounds", within=1e-4)
    other = after(3, scripted(FedAvg(), PRESENT.__getitem__)).server.params
    assert max((found[name] - other[name]).abs().max() for name in TRAINABLE) > 0.01


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_the_drift_of_the_server_is_the_mean_of_all_clients(weighting: Weighting) -> None:
    method = FedDyn(weighting=weighting)
    state = after(2, scripted(method, PRESENT[1:].__getitem__))
    assert sorted(state.memories) == ["ann", "bob", "dan", "eve"]  # cyd has not taken part and has not drifted
    weights = SIZES if weighting == "examples" else dict.fromkeys(SIZES, 1)
    total = sum(weights.values())
    drifts = {client: memory.drift for client, memory in state.memories.items()}
    mean = {n: sum(weights[c] * d[n].double() for c, d in drifts.items()) / total for n in TRAINABLE}
    assert_close(state.server.drift, mean, "the drift of the server", within=1e-6)
    assert max(leaf.abs().max() for leaf in mean.values()) > 0.01


# ---- reductions


def test_without_a_penalty_it_is_fedavg() -> None:
    method = FedDyn(penalty_weight=0.0, weighting="examples")
    for rounds in (1, 2, 3):
        assert_same(usual(method, rounds).server.params, usual(FedAvg(), rounds).server.params, f"round {rounds}")
    with_penalty = FedDyn(weighting="examples")
    assert fingerprint(usual(with_penalty, 3).server.params) != fingerprint(usual(FedAvg(), 3).server.params)


def test_a_method_is_its_settings() -> None:
    assert dataclasses.asdict(FedDyn()) == {"penalty_weight": 0.01, "weighting": "training"}
