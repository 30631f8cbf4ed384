"""FedOPT: ten rounds of each server optimiser against hand-written updates, and what the settings reduce to."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from doubles import Watching
from methods.conformance import (
    CHECKS,
    SIZES,
    TASK,
    TRAINING,
    assert_close,
    assert_same,
    federation,
    fingerprint,
    usual,
)
from protofed import tree
from protofed.api.method import Method
from protofed.engine.federation import Federation
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedopt import FedOPT
from protofed.tree import Params

TRAINABLE = federation(FedOPT()).networks_of("ann").trainable
SETTINGS = {
    "adam": FedOPT(),
    "yogi": FedOPT(server_optimizer="yogi", weighting="uniform"),
    "adagrad": FedOPT(server_optimizer="adagrad", momentum=0.0),
    "momentum": FedOPT(server_optimizer="momentum", server_lr=0.5, weighting="uniform"),
}


@pytest.mark.parametrize("method", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: Callable[[Method], None], method: FedOPT) -> None:
    check(method)


# ---- one step on numbers

MOMENTS = {
    # m = 0.9 · 1 + 0.1 · 2 = 1.1, with momentum 0.9 · 1 + 2 = 2.9, with Adagrad the update. That is 2, its square 4.
    "adam": (1.1, 8.95),  # v = 0.99 · 9 + 0.01 · 4
    "yogi": (1.1, 8.96),  # v = 9 − 0.01 · 4, since 9 > 4
    "adagrad": (2.0, 13.0),  # v = 9 + 4
    "momentum": (2.9, 9.0),  # v is not used
}


@pytest.mark.parametrize("kind", MOMENTS)
def test_the_moments_on_numbers(kind: str) -> None:
    m, v = FedOPT(server_optimizer=kind).moments(torch.tensor(1.0), torch.tensor(9.0), torch.tensor(2.0))
    assert (m.item(), v.item()) == pytest.approx(MOMENTS[kind])


def test_the_second_moment_of_yogi_grows_when_the_way_is_longer_and_never_falls_below_zero() -> None:
    method = FedOPT(server_optimizer="yogi")
    # 1 + 0.01 · 4 = 1.04, since 1 < 4.
    assert method.moments(torch.tensor(0.0), torch.tensor(1.0), torch.tensor(2.0))[1].item() == pytest.approx(1.04)
    draws = torch.Generator().manual_seed(0)
    way = torch.rand(10_000, generator=draws)
    v = way.square() * (1 + 1e-7 * torch.rand(10_000, generator=draws))  # at the edge, in single precision
    for forgetful in (method, FedOPT(server_optimizer="yogi", second_momentum=0.0)):
        assert forgetful.moments(way, v, way)[1].min() >= 0


# ---- ten rounds


def by_hand(method: FedOPT, w: np.ndarray, ways: list[np.ndarray]) -> list[np.ndarray]:
    """Algorithm 2 of the paper, and FedAvgM, on one parameter, in float64: its values after each round."""
    m, v, values = np.zeros_like(w), np.full_like(w, method.adaptivity**2), []
    b1, b2 = method.momentum, method.second_momentum
    for way in ways:
        if method.server_optimizer == "momentum":
            m = b1 * m + way
            w = w + method.server_lr * m
        else:
            m = b1 * m + (1 - b1) * way
            if method.server_optimizer == "adagrad":
                v = v + way**2
            if method.server_optimizer == "yogi":
                v = v - (1 - b2) * way**2 * np.sign(v - way**2)
            if method.server_optimizer == "adam":
                v = b2 * v + (1 - b2) * way**2
            w = w + method.server_lr * m / (np.sqrt(v) + method.adaptivity)
        values.append(w)
    return values


def ten_rounds(method: FedOPT) -> tuple[list[Params], list[Params]]:
    """The server's weights before and after each of ten rounds, and the mean of what clients sent in each."""
    sent: list[tuple[str, Params]] = []
    of = Federation(method, TASK, TRAINING, Watching(lambda c, _, upload: sent.append((c, upload.params))))
    state = of.start()
    servers, means = [state.server.params], []
    weights = SIZES if method.weighting != "uniform" else dict.fromkeys(SIZES, 1)
    for _ in range(10):
        sent.clear()
        state = of.advance(state)
        servers.append(state.server.params)
        total = sum(weights.values())
        means.append({n: sum(weights[c] * p[n].double() for c, p in sent) / total for n in state.server.params})
    return servers, means


@pytest.mark.parametrize("method", SETTINGS.values(), ids=SETTINGS)
def test_ten_rounds_equal_hand_written_updates(method: FedOPT) -> None:
    servers, means = ten_rounds(method)
    for name in servers[0]:
        if name not in TRAINABLE:
            for server, mean in zip(servers[1:], means, strict=True):
                torch.testing.assert_close(server[name].double(), mean[name], rtol=1e-6, atol=1e-7)
            continue
        ways = [(mean[name] - before[name].double()).numpy() for before, mean in zip(servers, means, strict=False)]
        expected = by_hand(method, servers[0][name].double().numpy(), ways)
        for t, (server, value) in enumerate(zip(servers[1:], expected, strict=True)):
            np.testing.assert_allclose(server[name].numpy(), value, rtol=1e-4, atol=2e-6, err_msg=f"{name}, round {t}")
    assert max((servers[10][name] - servers[0][name]).abs().max() for name in TRAINABLE) > 0.02


# ---- reductions


def test_adam_without_memory_and_adaptivity_steps_by_the_sign_of_the_way() -> None:
    method = FedOPT(server_lr=0.05, momentum=0.0, second_momentum=0.0, adaptivity=1e-12)
    servers, means = ten_rounds(method)
    for before, mean, after_round in zip(servers, means, servers[1:], strict=False):
        for name in TRAINABLE:
            way = mean[name] - before[name].double()
            has_moved = way.abs() > 1e-7  # a shorter way is rounding
            step = after_round[name].double() - before[name].double()
            torch.testing.assert_close(step[has_moved], 0.05 * way.sign()[has_moved], rtol=0, atol=1e-6)
            assert name == "features.0.bias" or has_moved.all()  # BatchNorm takes away what a bias before it adds


def test_momentum_without_memory_at_rate_one_is_fedavg() -> None:
    method = FedOPT(server_optimizer="momentum", server_lr=1.0, momentum=0.0)
    for rounds in (1, 2, 3):
        assert_same(usual(method, rounds).server.params, usual(FedAvg(), rounds).server.params, f"round {rounds}")
    for other in SETTINGS.values():
        assert fingerprint(usual(other, 3).server.params) != fingerprint(usual(FedAvg(), 3).server.params)


def test_statistics_of_batchnorm_are_averaged_and_have_no_moments() -> None:
    server = usual(FedOPT(), 1).server
    assert tuple(server.first) == tuple(server.second) == TRAINABLE
    statistics = [name for name in server.params if name not in TRAINABLE]
    plain = usual(FedAvg(), 1).server.params
    assert_same(tree.select(server.params, statistics), tree.select(plain, statistics), "statistics after one round")


def test_the_second_moment_starts_at_the_square_of_the_adaptivity() -> None:
    server = usual(FedOPT(adaptivity=0.02), 0).server
    expected = {name: torch.full_like(leaf, 4e-4) for name, leaf in server.second.items()}
    assert_close(server.second, expected, "the second moment", within=1e-9)


def test_clients_receive_the_weights_and_not_the_moments() -> None:
    assert list(tree.named_leaves(FedOPT().message_for(usual(FedOPT(), 1).server, "ann"))) == [
        f"params/{name}" for name in usual(FedAvg(), 0).server.params
    ]


def test_a_method_is_its_settings() -> None:
    assert dataclasses.asdict(FedOPT()) == {
        "server_optimizer": "adam",
        "server_lr": 0.03,
        "momentum": 0.9,
        "second_momentum": 0.99,
        "adaptivity": 1e-3,
        "weighting": "training",
    }
