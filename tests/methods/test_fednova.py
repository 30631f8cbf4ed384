"""FedNova: how many gradients a way is made of, normalised averaging on numbers, and FedAvg as a special case."""

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
from protofed.methods.fednova import FedNova, NormalisedUpload, WithVelocity
from protofed.methods.fedprox import FedProx
from protofed.optim.optimizers import Adam, Asam, Optimizer, Sam, Sgd
from protofed.optim.schedules import StepRate
from protofed.tree import Params

TRAINABLE = federation(FedNova()).networks_of("ann").trainable


VARIANT = FedNova(proximal_weight=0.5, server_momentum=0.5)


@pytest.mark.parametrize("method", [FedNova(), VARIANT], ids=repr)
@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: Callable[[Method], None], method: FedNova) -> None:
    check(method)


# ---- the client


def gradients_of(sgd: Sgd, client: str = "eve", pull: float = 0.0, round: int = 0, **settings: int) -> float:
    context = federation(FedNova(), optimizer=sgd, **settings).client_context(client, round)
    return effective_steps(context, "FedNova", pull)


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


def test_a_proximal_term_takes_back_a_part_of_each_gradient_in_every_later_step() -> None:
    # The learning rate times μ is 0.1 · 2 = 0.2. Of three gradients 0.8², 0.8 and 1 are left: [1 − 0.8³] / 0.2.
    assert gradients_of(Sgd(lr=0.1), pull=2.0, epochs=3) == pytest.approx(0.64 + 0.8 + 1)
    assert gradients_of(Sgd(lr=0.1), pull=2.0, epochs=9) == pytest.approx((1 - 0.8**9) / 0.2)
    # The rate is that of the round: 0.1 · 0.5 in the second, so that the part is 0.1.
    assert gradients_of(Sgd(lr=0.1, lr_decay=0.5), pull=2.0, round=1, epochs=2) == pytest.approx(0.9 + 1)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.3, 0.9])  # with 0.9 gradients come to count against themselves
def test_with_momentum_and_a_proximal_term_it_is_the_sum_of_what_torch_leaves_of_each(
    momentum: float, nesterov: bool
) -> None:
    """Each of nine gradients has a coordinate of its own, so that the way along it is its coefficient in the update."""
    weight = torch.zeros(9, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=momentum, nesterov=nesterov)
    for gradient in torch.eye(9, dtype=torch.float64):
        weight.grad = gradient + 1.2 * weight.detach()  # the slope of 1.2 / 2 · w²
        optimizer.step()
    expected = (weight / -0.5).abs().sum().item()
    sgd = Sgd(lr=0.5, momentum=momentum, nesterov=nesterov)
    assert gradients_of(sgd, pull=1.2, epochs=9) == pytest.approx(expected)


def test_the_proximal_term_is_that_of_fedprox() -> None:
    found = reply_of(federation(VARIANT), usual(FedNova(), 0), "ann").upload
    prox = reply_of(federation(FedProx(proximal_weight=0.5)), usual(FedAvg(), 0), "ann").upload
    assert_same(found.params, prox.params, "what ann trained")
    assert found.taken.item() == 4
    assert 0 < found.steps.item() < 9.049  # less than without the term


def test_a_client_trains_as_in_fedavg_and_sends_its_number_of_gradients() -> None:
    found = reply_of(federation(FedNova()), usual(FedNova(), 0), "ann").upload
    plain = reply_of(federation(FedAvg()), usual(FedAvg(), 0), "ann").upload
    assert_same(found.params, plain.params, "what ann trained")
    # 4 steps (11 examples in batches of 8, two epochs) with momentum 0.9: 3.439 + 2.71 + 1.9 + 1.
    assert found.steps.item() == pytest.approx(9.049)


# ---- the server


def shifted(params: Params, amount: float) -> Params:
    return {name: leaf + amount for name, leaf in params.items()}


def upload_of(start: Params, amount: float, examples: int, steps: float, taken: int) -> NormalisedUpload:
    numbers = (torch.tensor(number, dtype=torch.float64) for number in (steps, taken))
    return NormalisedUpload(shifted(start, amount), torch.tensor(examples), *numbers)


def test_normalised_averaging_on_numbers() -> None:
    central = federation(FedNova()).server_context(0, "round")
    start = tree.map(torch.zeros_like, central.initial_params())
    uploads = [("ann", upload_of(start, 6.0, 3, 2.0, 1)), ("bob", upload_of(start, 8.0, 1, 4.0, 9))]
    found = FedNova().aggregate(WithVelocity(start, {}), uploads, central).params
    # Mean ways of one gradient are 6 / 2 = 3 and 8 / 4 = 2; weighted 3 : 1 they are 2.75. The mean number of gradients
    # is (3 · 2 + 1 · 4) / 4 = 2.5, so parameters go 6.875. Statistics are averaged: (3 · 6 + 8) / 4 = 6.5.
    for name, leaf in found.items():
        expected = 6.875 if name in TRAINABLE else 6.5
        torch.testing.assert_close(leaf, torch.full_like(leaf, expected))
    # With a proximal term the server takes as many steps as clients took on average: (3 · 1 + 1 · 9) / 4 = 3.
    proximal = FedNova(proximal_weight=1.0).aggregate(WithVelocity(start, {}), uploads, central).params
    for name in TRAINABLE:
        torch.testing.assert_close(proximal[name], torch.full_like(proximal[name], 3 * 2.75))


def test_momentum_of_the_server_on_numbers() -> None:
    method, sgd = FedNova(server_momentum=0.5), Sgd(lr=0.1, lr_decay=0.5)
    of = federation(method, optimizer=sgd)
    state = method.init_server(of.server_context(0, "round"))
    state = WithVelocity(tree.map(torch.zeros_like, state.params), state.velocity)
    found = []
    for t in range(3):
        uploads = [("ann", upload_of(state.params, 6.0, 3, 2.0, 2))]
        state = method.aggregate(state, uploads, of.server_context(t, "round"))
        found.append(state.params["classifier.bias"][0].item())
    # Each round's update is 6. Rates are 0.1, 0.05 and 0.025, so as gradients they are 60, 120 and 240. Velocities are
    # 60, 30 + 120 = 150 and 75 + 240 = 315; the steps 6, 7.5 and 7.875.
    assert found == pytest.approx([6.0, 13.5, 21.375])
    # Statistics are averaged without momentum: 6 more in each round.
    assert state.params["features.1.running_mean"][0].item() == pytest.approx(18.0)


def test_momentum_of_the_server_knows_the_rate_that_the_schedule_gives_the_round() -> None:
    method = FedNova(server_momentum=0.5)
    of = federation(method, optimizer=Sgd(lr=0.1), schedule=StepRate(every=1, factor=0.5))
    state = method.init_server(of.server_context(0, "round"))
    state = WithVelocity(tree.map(torch.zeros_like, state.params), state.velocity)
    for t in range(3):
        uploads = [("ann", upload_of(state.params, 6.0, 3, 2.0, 2))]
        state = method.aggregate(state, uploads, of.server_context(t, "round"))
    # The rates are those of the test above, by the schedule: steps of 6, 7.5 and 7.875.
    assert state.params["classifier.bias"][0].item() == pytest.approx(21.375)
    assert of.server_context(3, "finish").rate_share == 1.0, "a schedule holds in rounds"


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


def test_without_momentum_the_server_keeps_weights_alone_and_with_it_one_velocity_for_each_parameter() -> None:
    assert usual(FedNova(), 2).server.velocity == {}
    assert usual(VARIANT, 2).server.velocity.keys() == set(TRAINABLE)
    assert VARIANT.message_for(usual(VARIANT, 2).server, "ann") == Weights(usual(VARIANT, 2).server.params)


@pytest.mark.parametrize("setting", [{"proximal_weight": 0.5}, {"server_momentum": 0.5}], ids=str)
def test_a_setting_makes_a_difference(setting: dict[str, float]) -> None:
    one, other = usual(FedNova(**setting), 2).server.params, usual(FedNova(), 2).server.params
    assert fingerprint(one) != fingerprint(other)
