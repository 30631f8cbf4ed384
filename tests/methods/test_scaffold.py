"""SCAFFOLD: client and server against the paper's algorithm, and the sum of the control variates."""

import dataclasses
from collections.abc import Callable
from math import ceil, log

import pytest
import torch
from torch import Tensor

from methods.conformance import (
    CHECKS,
    SIZES,
    TASK,
    TRAINING,
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
from protofed.errors import BadInput
from protofed.methods._shared.control_variates import inner_product, mean_gradient
from protofed.methods.fedavg import FedAvg
from protofed.methods.scaffold import Controlled, ControlVariate, Scaffold
from protofed.nn.networks import Parts
from protofed.optim.optimizers import Adam, Optimizer, Sam, Sgd
from protofed.tree import Params

TRAINABLE = federation(Scaffold()).networks_of("ann").trainable
PRESENT = [("ann", "bob", "cyd", "dan", "eve"), ("bob", "eve"), ("ann", "bob", "dan")]
"""Who takes part in three rounds."""


@pytest.mark.parametrize(
    "method", [Scaffold(), Scaffold(weighting="examples"), Scaffold(server_lr=0.5)], ids=["default", "examples", "half"]
)
@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: Callable[[Method], None], method: Scaffold) -> None:
    check(method)


# ---- the client


def test_the_correction_is_the_gradient_of_a_linear_term() -> None:
    a, b = {"w": torch.tensor([1.0, 2.0]), "v": torch.tensor([3.0])}, {"w": torch.tensor([4.0, 5.0])}
    assert inner_product(a, {**b, "v": torch.tensor([-2.0])}).item() == pytest.approx(4 + 10 - 6)
    weight = torch.zeros(2, 2, requires_grad=True)
    model = identity_model(weight)
    control, own = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.5, 0.0], [0.0, 6.0]])
    message = Controlled({"classifier.weight": torch.zeros(2, 2)}, {"classifier.weight": control})
    memory = ControlVariate({"classifier.weight": own})
    found = Scaffold().loss(model, batch_of([[2.0, 0.0]], [0]), message, memory)
    assert found.item() == pytest.approx(log(2))
    # The gradient of cross-entropy is (p − 1, p) ⊗ x = ((−½, ½) ⊗ (2, 0)); of the linear term c − cᵢ.
    expected = torch.tensor([[-1.0, 0.0], [1.0, 0.0]]) + torch.tensor([[0.5, 2.0], [3.0, -2.0]])
    torch.testing.assert_close(torch.autograd.grad(found, weight)[0], expected)


def test_the_mean_gradient_is_the_way_over_the_learning_rate_of_the_round_and_the_number_of_steps() -> None:
    # 11 examples in batches of 8, two epochs: 4 steps. In round 2 the rate is 0.4 · 0.5² = 0.1.
    local = federation(Scaffold(), optimizer=Sgd(lr=0.4, lr_decay=0.5)).client_context("ann", 2)
    start = local.initial_params()
    end = {name: leaf - 0.8 if name in TRAINABLE else leaf for name, leaf in start.items()}
    found = mean_gradient(local, start, end, "SCAFFOLD")
    assert tuple(found) == TRAINABLE
    for leaf in found.values():
        torch.testing.assert_close(leaf, torch.full_like(leaf, 0.8 / (4 * 0.1)))


# ---- the paper's algorithm


def gradients_in_a_way(client: str) -> float:
    """How far torch's own SGD goes at rate 1 when every gradient is 1, in the client's number of steps."""
    weight = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=TRAINING.optimizer.momentum)
    for _ in range(TRAINING.epochs * ceil(SIZES[client] / TRAINING.batch_size)):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    return -weight.item()


def scaffold_by_hand(server_lr: float, weights: dict[str, float]) -> Params:
    """Option II, for three rounds of which two lack clients."""
    server = federation(FedAvg()).start().server.params
    c = {name: torch.zeros_like(server[name], dtype=torch.float64) for name in TRAINABLE}
    own = {client: dict(c) for client in TASK.clients}
    for t, present in enumerate(PRESENT):
        replies = {client: _client_by_hand(server, client, c, own[client], t) for client in present}
        total, change = sum(weights[client] for client in present), dict.fromkeys(TRAINABLE, 0.0)
        for client, params in replies.items():
            scale = TRAINING.optimizer.lr * gradients_in_a_way(client)
            for name in TRAINABLE:
                new = own[client][name] - c[name] + (server[name].double() - params[name].double()) / scale
                change[name] = change[name] + weights[client] / sum(weights.values()) * (new - own[client][name])
                own[client][name] = new
        c = {name: c[name] + change[name] for name in TRAINABLE}
        mean = {name: sum(weights[k] * replies[k][name].double() for k in present) / total for name in server}
        rates = {name: server_lr if name in TRAINABLE else 1.0 for name in server}
        server = {n: (leaf + rates[n] * (mean[n] - leaf)).float() for n, leaf in server.items()}
    return server


def _client_by_hand(received: Params, client: str, c: Params, own: Params, round: int) -> Params:
    def loss(parts: Parts, z: Tensor, batch: Batch) -> Tensor:
        named = {f"{part}.{name}": p for part, module in parts.items() for name, p in module.named_parameters()}
        linear = sum(((c[name] - own[name]).float() * p).sum() for name, p in named.items())
        return mean_cross_entropy(parts, z, batch) + linear

    return trained_by_hand(received, client, loss, round=round)[0]


@pytest.mark.parametrize(("weighting", "server_lr"), [("uniform", 1.0), ("examples", 1.0), ("uniform", 0.6)])
def test_three_rounds_with_absent_clients_are_those_of_the_paper(weighting: Weighting, server_lr: float) -> None:
    method = Scaffold(server_lr=server_lr, weighting=weighting)
    found = after(3, scripted(method, PRESENT.__getitem__)).server.params
    weights = SIZES if weighting == "examples" else dict.fromkeys(SIZES, 1)
    assert_close(found, scaffold_by_hand(server_lr, weights), "the weights after three rounds", within=1e-4)
    other = after(3, scripted(FedAvg(), PRESENT.__getitem__)).server.params
    assert max((found[name] - other[name]).abs().max() for name in TRAINABLE) > 0.01


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_the_control_variate_of_the_server_is_the_mean_of_all_clients(weighting: Weighting) -> None:
    state = after(2, scripted(Scaffold(weighting=weighting), PRESENT[1:].__getitem__))
    assert sorted(state.memories) == ["ann", "bob", "dan", "eve"]  # that of cyd, who has not taken part, is 0
    weights = SIZES if weighting == "examples" else dict.fromkeys(SIZES, 1)
    total = sum(weights.values())
    own = {client: memory.control for client, memory in state.memories.items()}
    mean = {n: sum(weights[c] * v[n].double() for c, v in own.items()) / total for n in TRAINABLE}
    assert_close(state.server.control, mean, "the control variate of the server", within=1e-6)
    assert max(leaf.abs().max() for leaf in mean.values()) > 0.01


def test_the_upload_holds_the_change_of_the_control_variate() -> None:
    state = usual(Scaffold(), 1)
    reply = reply_of(federation(Scaffold()), state, "bob")
    before, now = state.memories["bob"].control, reply.memory.control
    expected = {name: now[name] - before[name] for name in TRAINABLE}
    assert_close(reply.upload.change, expected, "the change", within=1e-6)


# ---- reductions


def test_the_first_round_is_that_of_fedavg() -> None:
    method = Scaffold(weighting="examples")
    assert_same(usual(method, 1).server.params, usual(FedAvg(), 1).server.params, "round 1")
    assert fingerprint(usual(method, 2).server.params) != fingerprint(usual(FedAvg(), 2).server.params)


def test_the_server_goes_part_of_the_way_but_takes_the_statistics_as_they_are() -> None:
    start = usual(FedAvg(), 0).server.params
    whole_way = usual(FedAvg(), 1).server.params
    half = after(1, federation(Scaffold(server_lr=0.5, weighting="examples"))).server.params
    expected = {name: (start[name] + whole_way[name]) / 2 for name in TRAINABLE}
    assert_close(tree.select(half, TRAINABLE), expected, "parameters", within=1e-6)
    statistics = [name for name in half if name not in TRAINABLE]
    assert_same(tree.select(half, statistics), tree.select(whole_way, statistics), "statistics")


@pytest.mark.parametrize("optimizer", [Adam(), Sam()], ids=["adam", "sam"])
def test_an_optimiser_whose_way_is_not_a_sum_of_gradients_is_refused(optimizer: Optimizer) -> None:
    with pytest.raises(BadInput, match="SCAFFOLD is defined for clients that train with sgd"):
        federation(Scaffold(), optimizer=optimizer).start()


def test_a_method_is_its_settings() -> None:
    assert dataclasses.asdict(Scaffold()) == {"server_lr": 1.0, "weighting": "training"}
