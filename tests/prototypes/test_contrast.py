"""Losses between features and prototypes against their formulas, and where the formulas would break."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.prototypes.contrast import cluster_contrast, nearest, pull

B, C, J, D = 16, 5, 3, 8


def features(seed: int = 0) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(B, D, generator=draws), torch.randint(0, C, (B,), generator=draws)


def ragged(seed: int = 0, absent: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    """One to J prototypes for each class, none for those that are absent."""
    draws = torch.Generator().manual_seed(100 + seed)
    counts = torch.randint(1, J + 1, (C,), generator=draws)
    counts[list(absent)] = 0
    is_cluster = torch.arange(J) < counts[:, None]
    return torch.randn(C, J, D, generator=draws) * is_cluster[..., None], is_cluster


def fast_contrast(z: Tensor, y: Tensor, clusters: Tensor, is_cluster: Tensor, tau: float) -> Tensor:
    label = torch.where(is_cluster, torch.arange(C)[:, None], -1)
    return cluster_contrast(z, y, clusters.flatten(0, 1), label.flatten(), tau)


def slow_contrast(z: Tensor, y: Tensor, clusters: Tensor, is_cluster: Tensor, tau: float) -> list[float]:
    """Eq. (8) of the FPL paper as it is printed, in float64."""
    losses = []
    for feature, own in zip(z.double().numpy(), y.tolist(), strict=True):
        shares = np.zeros(C)
        for c in range(C):
            for prototype in clusters[c][is_cluster[c]].double().numpy():
                cosine = feature @ prototype / np.linalg.norm(feature) / np.linalg.norm(prototype)
                shares[c] += np.exp(cosine / tau)
        losses.append(-np.log(shares[own] / shares.sum()) if shares[own] else 0.0)
    return losses


@pytest.mark.parametrize("absent", [(), (1, 4)])
@pytest.mark.parametrize("tau", [0.02, 0.5])
@pytest.mark.parametrize("seed", range(5))
def test_the_contrast_is_the_printed_formula(tau: float, seed: int, absent: tuple[int, ...]) -> None:
    arguments = (*features(seed), *ragged(seed, absent), tau)
    found, expected = fast_contrast(*arguments), slow_contrast(*arguments)
    # float32 cosines carry an error of 1e-7, which the formula divides by the temperature
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5, rtol=1e-5)


def test_with_one_prototype_per_class_it_is_cross_entropy() -> None:
    z, y = features()
    clusters = ragged()[0][:, :1]
    cosines = F.cosine_similarity(z[:, None], clusters[:, 0], dim=-1)
    found = fast_contrast(z, y, clusters, torch.ones(C, 1, dtype=torch.bool), 0.1)
    torch.testing.assert_close(found, F.cross_entropy(cosines / 0.1, y, reduction="none"), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("absent", [(), (0,), (0, 2, 3), tuple(range(C))])
@pytest.mark.parametrize("scale", [0.0, 1e-12, 1.0, 1e12])
def test_a_small_temperature_keeps_loss_and_gradient_finite(scale: float, absent: tuple[int, ...]) -> None:
    z, y = features()
    z = (scale * z).requires_grad_()
    loss = fast_contrast(z, y, *ragged(absent=absent), 0.01)
    (slope,) = torch.autograd.grad(loss.sum(), z)
    assert torch.isfinite(loss).all()
    assert torch.isfinite(slope).all()
    assert (loss >= 0).all()


def test_a_class_without_prototype_costs_nothing_and_pulls_nowhere() -> None:
    z, y = features()
    z.requires_grad_()
    clusters, is_cluster = ragged(absent=(1, 3))
    for loss in (fast_contrast(z, y, clusters, is_cluster, 0.1), pull(z, y, clusters[:, 0] + 7, is_cluster[:, 0])):
        (slope,) = torch.autograd.grad(loss.sum(), z)
        lacks = (y == 1) | (y == 3)
        assert lacks.any()
        assert (loss[lacks] == 0).all()
        assert (slope[lacks] == 0).all()
        assert (loss[~lacks] > 0).all()
        assert (slope[~lacks] != 0).any(-1).all()


def test_prototypes_get_no_gradient() -> None:
    z, y = features()
    clusters, is_cluster = ragged()
    z.requires_grad_()
    clusters.requires_grad_()
    loss = fast_contrast(z, y, clusters, is_cluster, 0.1) + pull(z, y, clusters[:, 0], is_cluster[:, 0])
    slope, none = torch.autograd.grad(loss.sum(), [z, clusters], allow_unused=True)
    assert slope is not None
    assert none is None


@pytest.mark.parametrize(("reduction", "expected"), [("mean", [2.5, 0.0]), ("sum", [5.0, 0.0])])
def test_pull_by_hand(reduction: str, expected: list[float]) -> None:
    z, y = torch.tensor([[1.0, 2.0], [5.0, 5.0]]), torch.tensor([1, 0])
    means, is_known = torch.tensor([[0.0, 0.0], [2.0, 4.0]]), torch.tensor([False, True])
    assert pull(z, y, means, is_known, reduction).tolist() == expected  # type: ignore[arg-type]


def test_pull_averages_by_default() -> None:
    z, y = features()
    means, is_known = torch.zeros(C, D), torch.ones(C, dtype=torch.bool)
    assert torch.equal(pull(z, y, means, is_known), pull(z, y, means, is_known, "mean"))


def test_the_nearest_prototype_wins_and_an_absent_one_never_does() -> None:
    means = torch.tensor([[0.0, 0.0], [1.0, 0.0], [9.0, 9.0]])
    z = torch.tensor([[0.9, 0.0], [0.1, 0.1], [8.0, 8.0]])
    assert nearest(z, means, torch.tensor([True, True, True])).argmax(-1).tolist() == [1, 0, 2]
    assert nearest(z, means, torch.tensor([False, True, True])).argmax(-1).tolist() == [1, 1, 2]
    assert nearest(z, means, torch.tensor([False, True, False])).argmax(-1).tolist() == [1, 1, 1]
    torch.testing.assert_close(nearest(z, means, torch.tensor([True] * 3))[0, 0], torch.tensor(-0.405))


def test_gradients_may_be_taken_for_many_clients_at_once() -> None:
    """As a runtime does that trains clients together: each has its own features and labels."""
    prototypes = ragged(absent=(2,))

    def loss(z: Tensor, y: Tensor) -> Tensor:
        clusters, is_cluster = prototypes
        own = fast_contrast(z, y, clusters, is_cluster, 0.05) + pull(z, y, clusters[:, 0], is_cluster[:, 0])
        return own.mean()

    z, y = (torch.stack(pair) for pair in zip(*(features(seed) for seed in range(4)), strict=True))
    together = torch.func.vmap(torch.func.grad(loss))(z, y)
    for client in range(4):
        alone = z[client].clone().requires_grad_()
        (slope,) = torch.autograd.grad(loss(alone, y[client]), alone)
        torch.testing.assert_close(together[client], slope, atol=1e-6, rtol=1e-5)
