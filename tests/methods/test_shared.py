"""The pieces that several methods are made of."""

from dataclasses import dataclass, replace
from typing import Self

import pytest
import torch

from methods.conformance import federation
from protofed.api.method import Method
from protofed.errors import BadInput, RoundAbandoned
from protofed.methods._shared.mixing import entry, stacked, weighted_mean
from protofed.methods._shared.own_training import own_optimizer
from protofed.methods.ditto import Ditto
from protofed.methods.families import Weights
from protofed.methods.fedavg_ft import FedAvgFT
from protofed.methods.fedrep import FedRep
from protofed.optim.optimizers import Adam, Gradient, Optimizer, Sam, Sgd
from protofed.tree import Nothing, Params


def test_a_mean_of_models_by_hand() -> None:
    models = [{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([5.0, 10.0])}]
    # 3/4 · (1, 2) + 1/4 · (5, 10) = (2, 4)
    assert weighted_mean(zip(models, [0.75, 0.25], strict=True))["w"].tolist() == [2.0, 4.0]
    with pytest.raises(RoundAbandoned):
        weighted_mean((model, 0.0) for model in models)


def test_an_entry_of_stacked_records_is_the_record() -> None:
    records = [Weights({"w": torch.tensor([k, 2.0 * k])}) for k in range(3)]
    stack = stacked(records)
    assert stack.params["w"].shape == (3, 2)
    assert [entry(stack, k).params["w"].tolist() for k in range(3)] == [[0.0, 0.0], [1.0, 2.0], [2.0, 4.0]]


# ---- optimisers of a client's own


@dataclass(frozen=True)
class WithoutRate:
    """An optimiser that has no learning rate."""

    def for_round(self, round: int) -> Self:
        return self

    def init(self, params: Params) -> Nothing:
        return Nothing()

    def step(self, gradient: Gradient, params: Params, state: Nothing) -> tuple[Params, Nothing]:
        return params, state


FULL = Sgd(lr=0.3, momentum=0.9, weight_decay=0.1, nesterov=True, clip_norm=10.0, lr_decay=0.99)


def test_an_optimiser_of_its_own_is_the_configured_one_unless_something_is_set() -> None:
    assert own_optimizer(FULL, 0.0, "configured") is FULL
    assert own_optimizer(FULL, 0.05, "configured") == replace(FULL, lr=0.05)
    assert own_optimizer(FULL, 0.08, "configured", halvings=2) == replace(FULL, lr=0.02)
    assert own_optimizer(FULL, 0.0, "configured", halvings=2) is FULL, "its rate has been halved"
    assert own_optimizer(Sam(FULL, rho=0.2), 0.05, "configured") == Sam(replace(FULL, lr=0.05), rho=0.2)


@pytest.mark.parametrize(
    "configured", [FULL, Adam(lr=0.3, weight_decay=0.1, clip_norm=10.0, lr_decay=0.99), Sam(FULL)], ids=repr
)
def test_sgd_has_neither_momentum_nor_weight_decay_and_the_rest_as_configured(configured: Optimizer) -> None:
    plain = Sgd(lr=0.3, clip_norm=10.0, lr_decay=0.99)
    assert own_optimizer(configured, 0.0, "sgd") == plain
    assert own_optimizer(configured, 0.05, "sgd") == replace(plain, lr=0.05)


@pytest.mark.parametrize(
    ("method", "setting"),
    [
        (Ditto(personal_lr=0.1), "method.personal_lr"),
        (FedRep(head_lr=0.1), "method.head_lr"),
        (FedAvgFT(fine_tuning_lr=0.1), "method.fine_tuning_lr"),
        (Ditto(personal_optimizer="sgd"), "method.personal_lr"),
    ],
    ids=repr,
)
def test_a_rate_for_an_optimiser_without_one_is_refused_before_the_run(method: Method, setting: str) -> None:
    with pytest.raises(BadInput, match=rf"{setting}: WithoutRate\(\) has no learning rate"):
        federation(method, optimizer=WithoutRate())


def test_sgd_with_a_rate_of_its_own_needs_no_configured_one() -> None:
    assert own_optimizer(WithoutRate(), 0.1, "sgd") == Sgd(lr=0.1)
