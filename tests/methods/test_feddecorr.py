"""FedDecorr: the penalty in both scales, any base underneath, and the base itself when its weight is 0."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from methods.conformance import (
    CHECKS,
    CLASSES,
    FEATURES,
    TASK,
    assert_close,
    assert_same,
    batch_of,
    federation,
    fingerprint,
    mean_cross_entropy,
    reply_of,
    small_task,
    trained_by_hand,
    usual,
)
from protofed.api.task import ClientId, TaskSpec
from protofed.data.batches import Batch
from protofed.methods.families import GlobalModel
from protofed.methods.fedasam import FedASAM
from protofed.methods.fedavg import FedAvg
from protofed.methods.feddecorr import FedDecorr, correlation
from protofed.methods.fedprox import FedProx
from protofed.methods.moon import Moon
from protofed.nn.networks import Parts

BASES = [FedAvg(), FedProx(proximal_weight=0.1), Moon(), FedASAM(averaging=True, averaging_start=0.0)]
SETTINGS = {
    "default": FedDecorr(),
    "paper": FedDecorr(scale="paper"),
    "off": FedDecorr(decorrelation_weight=0.0),
    "on MOON": FedDecorr(base=Moon()),
}
each_base = pytest.mark.parametrize("base", BASES, ids=lambda base: type(base).__name__)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Any, setting: str) -> None:
    check(SETTINGS[setting])


# ---- the penalty

# Three rows that count, and one that fills the batch. Dimension 0: −1, 0, 1 (mean 0, unbiased variance 1). Dimension 1
# is 10 times that plus 5. Dimension 2: 1, −2, 1 (mean 0, unbiased variance 3), orthogonal to both.
Z = torch.tensor([[-1.0, -5.0, 1.0], [0.0, 5.0, -2.0], [1.0, 15.0, 1.0], [100.0, 7.0, -3.0]])
WEIGHT = torch.tensor([1.0, 1.0, 1.0, 0.0])


def test_the_penalty_of_the_code_is_over_pairs_of_dimensions_and_times_the_batch() -> None:
    # Standardised, dimensions 0 and 1 are both (−1, 0, 1): their product is 2, K = 2/3. Pairs with dimension 2 are 0.
    # Of six ordered pairs two have (2/3)² = 4/9: mean 4/27, times 3 rows 4/9.
    assert correlation(Z, WEIGHT, "code").item() == pytest.approx(4 / 9, abs=1e-6)


def test_the_penalty_of_the_paper_counts_all_entries() -> None:
    # The diagonal of K is 2/3 three times: (2 + 3) · 4/9 / 9 = 20/81.
    assert correlation(Z, WEIGHT, "paper").item() == pytest.approx(20 / 81, abs=1e-6)


@pytest.mark.parametrize("scale", ["code", "paper"])
def test_it_equals_a_slow_reference(scale: Any) -> None:
    draws = torch.Generator().manual_seed(0)
    z = torch.randn(7, 5, generator=draws) @ torch.rand(5, 5, generator=draws)
    own = z.double()
    unit = (own - own.mean(0)) / (own.var(0) + 1e-8).sqrt()
    product = unit.T @ unit
    pairs = [product[i, j].square() for i in range(5) for j in range(5) if i != j]
    expected = torch.stack(pairs).mean() / 7 if scale == "code" else (product / 7).square().sum() / 25
    assert correlation(z, torch.ones(7), scale).item() == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("scale", ["code", "paper"])
def test_one_row_a_dead_dimension_and_one_dimension_are_fine(scale: Any) -> None:
    z = torch.tensor([[1.0, 2.0, 0.0], [3.0, 1.0, 0.0]], requires_grad=True)
    alone = correlation(z, torch.tensor([1.0, 0.0]), scale)
    assert alone.item() == 0.0
    (gradient,) = torch.autograd.grad(alone + correlation(z, torch.ones(2), scale), z)
    assert torch.isfinite(gradient).all()
    assert torch.isfinite(correlation(z[:, :1], torch.ones(2), scale))


# ---- around a base


def hand_penalty(z: Tensor, batch: Batch) -> Tensor:
    """The penalty of the code by plain torch, on the rows that count."""
    own = z[batch.weight > 0]
    unit = (own - own.mean(0)) / (own.var(0) + 1e-8).sqrt()
    product = unit.T @ unit
    off = product[~torch.eye(len(product), dtype=torch.bool)]
    return off.square().mean() / len(own)


def test_a_client_descends_the_bases_loss_and_the_penalty() -> None:
    method = FedDecorr(decorrelation_weight=0.3)
    state = usual(method, 1)

    def loss(parts: Parts, z: Tensor, batch: Batch) -> Tensor:
        return mean_cross_entropy(parts, z, batch) + 0.3 * hand_penalty(z, batch)

    expected, _ = trained_by_hand(state.server.params, "ann", loss, round=1)
    assert_close(reply_of(federation(method), state, "ann").upload.params, expected, "ann", within=1e-5)


def test_the_bases_own_term_stays() -> None:
    method = FedDecorr(base=FedProx(proximal_weight=0.4), decorrelation_weight=0.3)
    state = usual(method, 1)
    received = state.server.params

    def loss(parts: Parts, z: Tensor, batch: Batch) -> Tensor:
        named = {f"{part}.{name}": p for part, module in parts.items() for name, p in module.named_parameters()}
        squares = sum((p - received[name]).square().sum() for name, p in named.items())
        return mean_cross_entropy(parts, z, batch) + 0.2 * squares + 0.3 * hand_penalty(z, batch)

    expected, _ = trained_by_hand(received, "ann", loss, round=1)
    assert_close(reply_of(federation(method), state, "ann").upload.params, expected, "ann", within=1e-5)


@each_base
def test_without_its_penalty_it_is_its_base(base: GlobalModel[Any]) -> None:
    method = FedDecorr(base=base, decorrelation_weight=0.0)
    found, expected = usual(method, 3), usual(base, 3)
    assert_same(found.server, expected.server, "the server")
    assert_same(found.memories, expected.memories, "the memories")
    assert_same(method.public(found.server), base.public(expected.server), "the public model")


@each_base
def test_the_penalty_changes_what_the_base_does(base: GlobalModel[Any]) -> None:
    found, expected = usual(FedDecorr(base=base), 2), usual(base, 2)
    assert fingerprint(found.server) != fingerprint(expected.server)
    assert fingerprint(found.server).keys() == fingerprint(expected.server).keys()
    assert found.memories.keys() == expected.memories.keys()


def test_the_penalty_lowers_the_correlation_of_the_features() -> None:
    """All examples in one batch: the correlations of a few rows are mostly chance."""
    task = small_task({"ann": [0, 1, 2, 3] * 8})

    def correlated(method: Any) -> float:
        of = federation(method, task, epochs=60, batch_size=32)
        model = of.networks_of("ann").model(reply_of(of, of.start(), "ann").upload.params)
        with torch.no_grad():
            z = model.features(task.transform.clean(task.clients["ann"].x))
        return correlation(z, torch.ones(len(z)), "code").item()

    assert correlated(FedDecorr(decorrelation_weight=1.0)) < 0.8 * correlated(FedAvg())


@dataclass(frozen=True)
class Projected(FedAvg):
    def networks(self, spec: TaskSpec, client: ClientId) -> Parts:
        parts = spec.model(client)
        return {
            "features": parts["features"],
            "projection": nn.Linear(FEATURES, 5),
            "classifier": nn.Linear(5, CLASSES),
        }


def test_behind_a_projection_the_penalty_is_on_what_the_classifier_reads() -> None:
    method = FedDecorr(base=Projected(), decorrelation_weight=0.5)
    of = federation(method)
    model = of.networks_of("ann").model(of.start().server.params)
    data = TASK.clients["ann"]
    batch = batch_of(TASK.transform.clean(data.x), data.y)
    with torch.no_grad():
        z = model.projection(model.features(batch.x))
        found = method.penalty(model, batch)
    assert z.shape[-1] == 5
    assert found.item() == pytest.approx(0.5 * hand_penalty(z, batch).item(), rel=1e-4)
    assert not of.advance(of.start()).failures
