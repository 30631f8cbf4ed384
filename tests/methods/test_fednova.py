"""FedNova: how many gradients a way is made of, normalised averaging on numbers, and FedAvg as a special case."""

import dataclasses
from collections.abc import Callable
from math import ceil

import pytest
import torch

from methods.conformance import (
    CHECKS,
    SIZES,
    TASK,
    TRAINING,
    after,
    assert_close,
    assert_same,
    federation,
    fingerprint,
    reply_of,
    usual,
)
from protofed import tree
from protofed.api.method import Method
from protofed.errors import BadInput
from protofed.methods._shared.control_variates import effective_steps
from protofed.methods.families import Weights
from protofed.methods.fedavg import FedAvg
from protofed.methods.fednova import FedNova, NormalisedUpload
from protofed.optim.optimizers import Adam, Asam, Optimizer, Sam, Sgd
from protofed.tree import Params

TRAINABLE = federation(FedNova()).networks_of("ann").trainable


@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: Callable[[Method], None]) -> None:
    check(FedNova())


# ---- the client


def gradients_of(sgd: Sgd, client: str = "eve", **settings: int) -> float:
    return effective_steps(federation(FedNova(), optimizer=sgd, **settings).client_context(client, 0), "FedNova")


def test_without_momentum_it_is_the_number_of_steps() -> None:
    # 11 examples in batches of 8 are 2 steps, in batches of 4 are 3, in one of 50 is 1; times the epochs.
    assert gradients_of(Sgd(), "ann", epochs=5, batch_size=8) == 10
    assert gradients_of(Sgd(), "ann", epochs=2, batch_size=4) == 6
    assert gradients_of(Sgd(), "ann", epochs=3, batch_size=50) == 3


def test_with_momentum_early_gradients_are_taken_more_than_once() -> None:
    # Three steps with momentum ½: the first gradient counts 1 + ½ + ¼, the second 1 + ½, the last 1.
    assert gradients_of(Sgd(momentum=0.5), epochs=3) == pytest.approx(1.75 + 1.5 + 1)
    # The paper's closed form (τ − ρ (1 − ρ^τ) / (1 − ρ)) / (1 − ρ), for 7 steps.
    expected = (7 - 0.9 * (1 - 0.9**7) / 0.1) / 0.1
    assert gradients_of(Sgd(momentum=0.9), epochs=7) == pytest.approx(expected)


@pytest.mark.parametrize("nesterov", [False, True])
def test_it_is_how_far_torch_goes_when_every_gradient_is_one(nesterov: bool) -> None:
    weight = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.8, nesterov=nesterov)
    for _ in range(5):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert gradients_of(Sgd(momentum=0.8, nesterov=nesterov), epochs=5) == pytest.approx(-weight.item())


def test_a_client_trains_as_in_fedavg_and_sends_its_number_of_gradients() -> None:
    found = reply_of(federation(FedNova()), usual(FedNova(), 0), "ann").upload
    plain = reply_of(federation(FedAvg()), usual(FedAvg(), 0), "ann").upload
    assert_same(found.params, plain.params, "what ann trained")
    # 4 steps (11 examples in batches of 8, two epochs) with momentum 0.9: 3.439 + 2.71 + 1.9 + 1.
    assert found.steps.item() == pytest.approx(9.049)


# ---- the server


def shifted(params: Params, amount: float) -> Params:
    return {name: leaf + amount for name, leaf in params.items()}


def test_normalised_averaging_on_numbers() -> None:
    central = federation(FedNova()).server_context(0, "round")
    start = tree.map(torch.zeros_like, central.initial_params())
    uploads = [
        ("ann", NormalisedUpload(shifted(start, 6.0), torch.tensor(3), torch.tensor(2.0, dtype=torch.float64))),
        ("bob", NormalisedUpload(shifted(start, 8.0), torch.tensor(1), torch.tensor(4.0, dtype=torch.float64))),
    ]
    found = FedNova().aggregate(Weights(start), uploads, central).params
    # Mean ways of one gradient are 6 / 2 = 3 and 8 / 4 = 2; weighted 3 : 1 they are 2.75. The mean number of gradients
    # is (3 · 2 + 1 · 4) / 4 = 2.5, so parameters go 6.875. Statistics are averaged: (3 · 6 + 8) / 4 = 6.5.
    for name, leaf in found.items():
        expected = 6.875 if name in TRAINABLE else 6.5
        torch.testing.assert_close(leaf, torch.full_like(leaf, expected))


def test_three_rounds_are_those_of_the_paper() -> None:
    server = usual(FedNova(), 0).server.params
    for rounds in range(3):
        of, state = federation(FedNova()), usual(FedNova(), rounds)
        replies = {client: reply_of(of, state, client).upload.params for client in TASK.clients}
        steps = {client: 2 * ceil(size / 8) for client, size in SIZES.items()}
        rho, lr = TRAINING.optimizer.momentum, TRAINING.optimizer.lr
        norms = {c: (n - rho * (1 - rho**n) / (1 - rho)) / (1 - rho) for c, n in steps.items()}
        shares = {client: size / 38 for client, size in SIZES.items()}
        effective = sum(shares[client] * norms[client] for client in SIZES)
        expected = {}
        for name in TRAINABLE:
            start = server[name].double()
            slopes = {c: (start - own[name].double()) / (lr * norms[c]) for c, own in replies.items()}
            expected[name] = start - effective * lr * sum(shares[c] * slope for c, slope in slopes.items())
        server = usual(FedNova(), rounds + 1).server.params
        assert_close(tree.select(server, TRAINABLE), expected, f"round {rounds + 1}", within=1e-6)


# ---- reductions


def test_with_equal_numbers_of_steps_it_is_fedavg_but_for_rounding() -> None:
    # In batches of 16 every client takes one step for each epoch.
    found, plain = (after(3, federation(m, batch_size=16)).server.params for m in (FedNova(), FedAvg()))
    assert_close(found, plain, "three rounds", within=1e-5)
    unequal = usual(FedNova(), 3).server.params
    assert max((unequal[name] - usual(FedAvg(), 3).server.params[name]).abs().max() for name in TRAINABLE) > 1e-3
    assert fingerprint(unequal) != fingerprint(usual(FedAvg(), 3).server.params)


@pytest.mark.parametrize("optimizer", [Adam(), Sam(), Asam()], ids=["adam", "sam", "asam"])
def test_an_optimiser_whose_way_is_not_a_sum_of_gradients_is_refused(optimizer: Optimizer) -> None:
    with pytest.raises(BadInput, match="FedNova is defined for clients that train with sgd"):
        federation(FedNova(), optimizer=optimizer).start()


def test_it_has_no_settings() -> None:
    assert dataclasses.asdict(FedNova()) == {"weighting": "training"}
