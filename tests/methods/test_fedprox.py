"""FedProx: Eq. (2), cross-entropy and half μ times the squared distance to the received weights."""

import pytest
import torch
from torch import Tensor

from methods.conformance import (
    TASK,
    assert_close,
    batch_of,
    federation,
    mean_cross_entropy,
    reply_of,
    trained_by_hand,
    usual,
)
from protofed.data.batches import Batch
from protofed.methods.families import Weights
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedprox import FedProx
from protofed.nn.networks import Networks, Parts
from protofed.tree import Nothing, Params


def networks() -> Networks:
    return federation(FedProx()).networks_of("ann")


def batch() -> Batch:
    data = TASK.clients["ann"]
    return batch_of(TASK.transform.clean(data.x), data.y)


def loss_at(method: FedAvg | FedProx, params: Params, received: Params) -> Tensor:
    own = {name: leaf.clone() if name not in networks().trainable else leaf for name, leaf in params.items()}
    return method.loss(networks().model(own, training=True), batch(), Weights(received), Nothing())


@pytest.mark.parametrize("mu", [0.01, 0.5])
def test_the_gradient_is_that_of_cross_entropy_plus_mu_times_the_way_from_the_received_weights(mu: float) -> None:
    received = networks().init(0)
    leaves = {n: leaf.detach().requires_grad_(n in networks().trainable) for n, leaf in networks().init(1).items()}
    wanted = [leaves[name] for name in networks().trainable]
    plain = torch.autograd.grad(loss_at(FedAvg(), leaves, received), wanted)
    found = torch.autograd.grad(loss_at(FedProx(proximal_weight=mu), leaves, received), wanted)
    for name, grad, base in zip(networks().trainable, found, plain, strict=True):
        torch.testing.assert_close(grad, base + mu * (leaves[name].detach() - received[name]), rtol=1e-5, atol=1e-6)


def test_the_penalty_is_half_mu_times_the_squared_distance() -> None:
    params = networks().init(0)
    received = {name: leaf + 0.1 for name, leaf in params.items()}
    count = sum(params[name].numel() for name in networks().trainable)
    # Convolution 3 · 8 · 9 + 8, BatchNorm 8 + 8, classifier 8 · 4 + 4: 276 parameters, each 0.1 away.
    assert count == 276
    penalty = loss_at(FedProx(proximal_weight=2.0), params, received) - loss_at(FedAvg(), params, received)
    # 2 / 2 · 276 · 0.01 = 2.76
    assert penalty.item() == pytest.approx(2.76, abs=1e-4)


def test_statistics_of_batchnorm_are_not_penalised() -> None:
    params = networks().init(0)
    buffers = [name for name in params if name not in networks().trainable]
    assert buffers == ["features.1.running_mean", "features.1.running_var"]
    received = {name: leaf + 5 if name in buffers else leaf for name, leaf in params.items()}
    method = FedProx(proximal_weight=1.0)
    assert torch.equal(loss_at(method, params, received), loss_at(method, params, params))


def test_a_client_is_held_to_the_weights_of_this_round() -> None:
    method = FedProx(proximal_weight=0.3)
    state = usual(method, 1)
    received = state.server.params

    def loss(parts: Parts, z: Tensor, batch: Batch) -> Tensor:
        named = {f"{part}.{name}": p for part, module in parts.items() for name, p in module.named_parameters()}
        squares = sum((p - received[name]).square().sum() for name, p in named.items())
        return mean_cross_entropy(parts, z, batch) + 0.15 * squares

    expected, _ = trained_by_hand(received, "ann", loss, round=1)
    assert_close(reply_of(federation(method), state, "ann").upload.params, expected, "after training", within=1e-5)
