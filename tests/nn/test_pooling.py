"""Adaptive means: torch's values and gradients, in any size."""

from typing import Any

import pytest
import torch
from torch import nn

from protofed.nn.fusion import is_torch_module
from protofed.nn.pooling import AdaptiveMean2d, windows
from protofed.tasks.models import cnn2, cnn3


def test_windows_that_do_not_divide_evenly_overlap() -> None:
    """Seven positions, four windows: window i has the positions from ⌊7i/4⌋ to ⌈7(i + 1)/4⌉ − 1."""
    assert windows(7, 4, torch.zeros(1)).tolist() == [
        [1, 1, 0, 0, 0, 0, 0],
        [0, 1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 1, 1],
    ]
    assert windows(2, 4, torch.zeros(1)).tolist() == [[1, 0], [1, 0], [0, 1], [0, 1]]


@pytest.mark.parametrize("shape", [(8, 8), (4, 4), (16, 12), (7, 7), (3, 3), (28, 9), (56, 1)])
def test_it_is_torch_s_adaptive_mean(shape: tuple[int, int]) -> None:
    x = torch.randn(2, 3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    found, expected = AdaptiveMean2d(4)(x), nn.AdaptiveAvgPool2d(4)(x)
    assert torch.allclose(found, expected, rtol=1e-12)
    slope = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (of_found,), (of_expected,) = (torch.autograd.grad(y, x, slope) for y in (found, expected))
    assert torch.allclose(of_found, of_expected, rtol=1e-12)


@pytest.mark.parametrize("side", [4, 8, 16])
def test_sizes_of_the_papers_give_torch_s_bits(side: int) -> None:
    x = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0)).requires_grad_()
    found, expected = AdaptiveMean2d(4)(x), nn.AdaptiveAvgPool2d(4)(x)
    assert torch.equal(found, expected)
    (of_found,), (of_expected,) = (torch.autograd.grad(y.square().sum(), x) for y in (found, expected))
    assert torch.equal(of_found, of_expected)


@pytest.mark.parametrize("network", [cnn2, cnn3])
def test_networks_with_it_are_made_fast_like_torch_s_own(network: Any) -> None:
    assert is_torch_module(network(3, 10)["features"])
