"""The pieces that several methods are made of."""

from dataclasses import dataclass, replace
from typing import Self

import pytest
import torch

from methods.conformance import assert_close, federation, reply_of, usual
from protofed.api.method import Method
from protofed.errors import BadInput, RoundAbandoned
from protofed.methods import METHODS
from protofed.methods._shared.mixing import entry, stacked, weighted_mean
from protofed.methods._shared.own_training import own_optimizer
from protofed.methods.ditto import Ditto
from protofed.methods.families import SumMethod, Weights
from protofed.methods.fedavg import FedAvg
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


def test_these_methods_need_more_than_sums() -> None:
    """A server that needs only sums could be given them encrypted. A method joins or leaves this list on purpose."""
    families = [cls for cls in METHODS.values() if issubclass(cls, SumMethod)]
    assert {"FedAvg", "Scaffold", "FedNova", "FedDC", "FedSoup", "FedRep", "FedBN"} <= {
        cls.__name__ for cls in families
    }
    others = {cls.__name__ for cls in families if cls.aggregate is not SumMethod.aggregate}
    assert others == {"GRACE", "FedNH"}


def test_what_a_server_makes_of_sums_does_not_depend_on_whose_they_are() -> None:
    """Two clients that exchange a part of what they add leave every sum as it was."""
    of, state = federation(FedAvg()), usual(FedAvg(), 1)
    uploads = {client: reply_of(of, state, client).upload for client in ("ann", "bob")}
    moved = {name: torch.full_like(leaf, 0.5) for name, leaf in uploads["ann"].params.items()}
    n, m = (uploads[client].num_examples.item() for client in ("ann", "bob"))
    ann = replace(uploads["ann"], params={k: leaf + moved[k] / n for k, leaf in uploads["ann"].params.items()})
    bob = replace(uploads["bob"], params={k: leaf - moved[k] / m for k, leaf in uploads["bob"].params.items()})
    server = of.server_context(1, "round")
    plain = FedAvg().aggregate(state.server, uploads.items(), server)
    exchanged = FedAvg().aggregate(state.server, {"ann": ann, "bob": bob}.items(), server)
    assert_close(exchanged, plain, "the mean", within=1e-6)


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
