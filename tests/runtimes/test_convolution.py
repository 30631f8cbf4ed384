"""Convolutions of many clients as one batched product: the same values and gradients as torch's own."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.runtimes.cohort import convolution
from protofed.runtimes.cohort.convolution import BatchedConvolutions

CLIENTS = 3
CALLS: list[dict[str, Any]] = [
    {},
    {"padding": 2},
    {"stride": 2},
    {"stride": (2, 1), "padding": (0, 3)},
    {"padding": "same"},
    {"dilation": 2, "padding": 2},
]


def draws(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(call: dict[str, Any], batched: bool, width: int = CLIENTS) -> tuple[Tensor, ...]:
    """Of a loss behind two convolutions, at the weights, biases and images of each client."""

    def loss(first: Tensor, bias: Tensor, second: Tensor, x: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(x, first, bias, **call).tanh(), second, **call).square().sum()

    weights = draws(0, CLIENTS, 4, 3, 5, 3), draws(1, CLIENTS, 4), draws(2, CLIENTS, 2, 4, 3, 3)
    of_client = torch.func.grad(loss, argnums=(0, 1, 2, 3))
    images = draws(3, CLIENTS, 4, 3, 12, 11)
    if not batched:
        return torch.vmap(of_client)(*weights, images)
    with BatchedConvolutions(width):
        return torch.vmap(of_client)(*weights, images)


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_gradients_are_those_of_torch(call: dict[str, Any]) -> None:
    for found, expected in zip(gradients(call, True), gradients(call, False), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("clients", [1, 10_000])
def test_gradients_do_not_depend_on_how_a_product_is_cut(clients: int) -> None:
    for found, expected in zip(gradients({}, True, clients), gradients({}, False), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_windows_that_need_too_much_memory_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(convolution._Call, "convolved", lambda call, clients: calls.append(clients))
    x, weight = torch.zeros(2, 3, 8, 8), torch.zeros(4, 3, 5, 5)
    monkeypatch.setattr(convolution, "MOST_BYTES", 7 * 2 * 4 * 4 * 75 * 4)  # 4 × 4 windows of 75 numbers an image
    with BatchedConvolutions(7):
        F.conv2d(x, weight)
    assert calls == [7]
    with BatchedConvolutions(8):
        F.conv2d(x, weight)
    assert calls == [7]


def test_moved_parts_are_added() -> None:
    parts = torch.tensor([[1.0, 2, 3], [10, 20, 30]])[..., None]  # (2, 3, 1)
    assert convolution._skewed_sum(parts).flatten().tolist() == [1, 12, 23, 30]
