"""FedDC: client and server against the algorithm, the sums of the states, FedDyn and FedAvg as special cases."""

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
    scripted,
    small_task,
    trained_by_hand,
    usual,
)
from protofed import tree
from protofed.api.method import Method, Weighting
from protofed.data.batches import Batch
from protofed.errors import BadInput
from protofed.methods.fedavg import FedAvg
from protofed.methods.feddc import Decoupling, FedDC, Guided, relative_sizes
from protofed.methods.feddyn import FedDyn
from protofed.nn.networks import Parts
from protofed.optim.optimizers import Adam, Asam, Optimizer
from protofed.tree import Params

TRAINABLE = federation(FedDC()).networks_of("ann").trainable
PRESENT = [("ann", "bob", "cyd", "dan", "eve"), ("bob", "eve"), ("ann", "bob", "dan")]
"""Who takes part in three rounds."""
MEAN_SIZE = 38 / 5
SETTINGS = {
    "default": FedDC(),
    "examples": FedDC(weighting="examples"),
    "no correction": FedDC(gradient_correction=False),
    "no penalty": FedDC(penalty_weight=0.0),
}


@pytest.mark.parametrize("method", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: Callable[[Method], None], method: FedDC) -> None:
    check(method)


# ---- the client


def test_the_loss_is_cross_entropy_the_penalty_and_the_correction_on_numbers() -> None:
    weight = torch.tensor([[1.0, 1.0], [1.0, 1.0]], requires_grad=True)
    model, name = identity_model(weight), "classifier.weight"
    received, mean = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[2.0, 4.0], [0.0, 6.0]])
    drift, own = torch.tensor([[0.0, 3.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [5.0, 0.0]])
    message, memory = Guided({name: received}, {name: mean}, torch.tensor(2.0)), Decoupling({name: drift}, {name: own})
    found = FedDC(penalty_weight=0.4).loss(model, batch_of([[2.0, 0.0]], [0]), message, memory)
    # Logits are equal: cross-entropy is log 2. w + drift − received = (0, 4, 1, 0): half of 17 is 8.5, and α / size is
    # 0.2: 1.7. Mean gradient / size − own = (1 − 1, 2 − 0, 0 − 5, 3 − 0) = (0, 2, −5, 3), times weights of 1: 0.
    assert found.item() == pytest.approx(log(2) + 1.7)
    # Gradients: cross-entropy (−½, ½) ⊗ (2, 0); penalty 0.2 · (0, 4, 1, 0); correction (0, 2, −5, 3).
    expected = torch.tensor([[-1.0, 0.8 + 2.0], [1.0 + 0.2 - 5.0, 3.0]])
    torch.testing.assert_close(torch.autograd.grad(found, weight)[0], expected)


def test_sizes_are_relative_to_the_mean_client() -> None:
    uniform, weighted = relative_sizes(TASK.spec, is_uniform=True), relative_sizes(TASK.spec, is_uniform=False)
    # 11 + 6 + 9 + 5 + 7 = 38 examples of five clients: 7.6 on average.
    assert uniform["ann"].item() == pytest.approx(11 / 7.6)
    assert sum(size.item() for size in uniform.values()) == pytest.approx(5)
    assert {size.item() for size in weighted.values()} == {1.0}
    assert usual(FedDC(), 0).server.sizes.keys() == TASK.clients.keys()
    equal = FedDC(weighting="uniform")
    assert equal.message_for(usual(equal, 0).server, "dan").size.item() == pytest.approx(5 / 7.6)


# ---- the algorithm


def gradients_in_a_way(client: str) -> float:
    """How far torch's own SGD goes at rate 1 when every gradient is 1, in the client's number of steps."""
    weight = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=TRAINING.optimizer.momentum)
    for _ in range(TRAINING.epochs * ceil(SIZES[client] / TRAINING.batch_size)):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    return -weight.item()


def feddc_by_hand(alpha: float, weights: dict[str, float], sizes: dict[str, float]) -> Params:
    """Drifts h and states s of every client, and the mean of all drifts, for three rounds of which two lack clients."""
    server = federation(FedAvg()).start().server.params
    zero = {name: torch.zeros_like(server[name], dtype=torch.float64) for name in TRAINABLE}
    mean_state = dict(zero)
    drifts, states = ({client: dict(zero) for client in TASK.clients} for _ in range(2))
    everyone = sum(weights.values())
    for t, present in enumerate(PRESENT):
        replies = {c: _client_by_hand(server, c, drifts[c], states[c], mean_state, alpha, sizes[c], t) for c in present}
        total, new_mean = sum(weights[client] for client in present), dict(mean_state)
        for client, params in replies.items():
            scale = TRAINING.optimizer.lr * gradients_in_a_way(client)
            for name in TRAINABLE:
                way = params[name].double() - server[name].double()
                drifts[client][name] = drifts[client][name] + way
                new = states[client][name] - mean_state[name] / sizes[client] - way / scale
                change = (new - states[client][name]) * sizes[client]
                new_mean[name] = new_mean[name] + weights[client] / everyone * change
                states[client][name] = new
        mean_state = new_mean
        mean = {name: sum(weights[c] * replies[c][name].double() for c in present) / total for name in server}
        for name in TRAINABLE:
            mean[name] = mean[name] + sum(weights[c] * drifts[c][name] for c in TASK.clients) / everyone
        server = {name: leaf.float() for name, leaf in mean.items()}
    return server


def _client_by_hand(
    received: Params, client: str, h: Params, s: Params, mean: Params, alpha: float, size: float, round: int
) -> Params:
    def loss(parts: Parts, z: Tensor, batch: Batch) -> Tensor:
        named = {f"{part}.{name}": p for part, module in parts.items() for name, p in module.named_parameters()}
        squares = sum((p + h[name].float() - received[name]).square().sum() for name, p in named.items())
        linear = sum(((mean[name] / size - s[name]).float() * p).sum() for name, p in named.items())
        return mean_cross_entropy(parts, z, batch) + alpha / size / 2 * squares + linear

    return trained_by_hand(received, client, loss, round=round)[0]


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_three_rounds_with_absent_clients_are_those_of_the_algorithm(weighting: Weighting) -> None:
    found = after(3, scripted(FedDC(penalty_weight=0.2, weighting=weighting), PRESENT.__getitem__)).server.params
    equal = dict.fromkeys(SIZES, 1.0)
    relative = {client: size / MEAN_SIZE for client, size in SIZES.items()}
    expected = feddc_by_hand(0.2, equal, relative) if weighting == "uniform" else feddc_by_hand(0.2, SIZES, equal)
    assert_close(found, expected, "the weights after three rounds", within=2e-4)
    other = after(3, scripted(FedDyn(penalty_weight=0.2, weighting=weighting), PRESENT.__getitem__)).server.params
    assert max((found[name] - other[name]).abs().max() for name in TRAINABLE) > 0.01


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_the_states_of_the_server_are_the_means_of_all_clients(weighting: Weighting) -> None:
    state = after(2, scripted(FedDC(weighting=weighting), PRESENT[1:].__getitem__))
    assert sorted(state.memories) == ["ann", "bob", "dan", "eve"]  # cyd has not taken part; its states are 0
    equal = dict.fromkeys(SIZES, 1.0)
    weights = SIZES if weighting == "examples" else equal
    sizes = equal if weighting == "examples" else {client: size / MEAN_SIZE for client, size in SIZES.items()}
    total, kept = sum(weights.values()), state.memories.items()
    drift = {n: sum(weights[c] * m.drift[n].double() for c, m in kept) / total for n in TRAINABLE}
    gradient = {n: sum(weights[c] * sizes[c] * m.gradient[n].double() for c, m in kept) / total for n in TRAINABLE}
    assert_close(state.server.drift, drift, "the mean drift", within=1e-6)
    assert_close(state.server.gradient, gradient, "the mean gradient", within=1e-6)
    assert max(leaf.abs().max() for leaf in drift.values()) > 0.01
    assert max(leaf.abs().max() for leaf in gradient.values()) > 0.01


# ---- reductions


def test_without_correction_it_is_feddyn() -> None:
    method = FedDC(penalty_weight=0.2, gradient_correction=False, weighting="examples")
    feddyn = FedDyn(penalty_weight=0.2, weighting="examples")
    for rounds in (1, 2, 3):
        assert_same(usual(method, rounds).server.params, usual(feddyn, rounds).server.params, f"round {rounds}")
    assert max(leaf.abs().max() for leaf in tree.leaves(usual(method, 3).server.gradient)) == 0
    corrected = FedDC(penalty_weight=0.2, weighting="examples")
    assert fingerprint(usual(corrected, 3).server.params) != fingerprint(usual(feddyn, 3).server.params)


def test_without_correction_and_penalty_it_is_fedavg() -> None:
    method = FedDC(penalty_weight=0.0, gradient_correction=False, weighting="examples")
    for rounds in (1, 2, 3):
        assert_same(usual(method, rounds).server.params, usual(FedAvg(), rounds).server.params, f"round {rounds}")


def test_with_clients_of_equal_size_the_weighting_is_of_no_account() -> None:
    # Eight examples each: weights of 8 and of 1 scale every sum by a power of two, so the bits are the same.
    task = small_task({"ann": [0, 1, 2, 3] * 2, "bob": [0, 0, 1, 1] * 2, "cyd": [3, 2, 3, 3] * 2, "dan": [1] * 8})
    uniform, weighted = (after(3, federation(FedDC(weighting=w), task)) for w in ("uniform", "examples"))
    assert_same(uniform.server.params, weighted.server.params, "three rounds")
    off = FedDC(penalty_weight=0.0, gradient_correction=False)
    assert_same(
        after(3, federation(off, task)).server.params, after(3, federation(FedAvg(), task)).server.params, "off"
    )


def test_drift_and_gradient_are_those_of_parameters() -> None:
    server = usual(FedDC(), 1).server
    assert tuple(server.drift) == tuple(server.gradient) == TRAINABLE
    assert len(server.params) == len(TRAINABLE) + 2  # mean and variance of BatchNorm


@pytest.mark.parametrize("optimizer", [Adam(), Asam()], ids=["adam", "asam"])
def test_an_optimiser_whose_way_is_not_a_sum_of_gradients_is_refused(optimizer: Optimizer) -> None:
    with pytest.raises(BadInput, match="FedDC is defined for clients that train with sgd"):
        federation(FedDC(), optimizer=optimizer).start()


def test_a_method_is_its_settings() -> None:
    expected = {"penalty_weight": 0.01, "gradient_correction": True, "weighting": "training"}
    assert dataclasses.asdict(FedDC()) == expected
