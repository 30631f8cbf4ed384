"""FedSGD: the gradients that clients send, the server's step, and what it is equal to."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from methods.conformance import CHECKS, SIZES, TASK, assert_close, federation, loaded, reply_of, small_task, usual
from protofed.api.contexts import ServerContext
from protofed.api.method import Method
from protofed.methods import METHODS
from protofed.methods.families import Weights
from protofed.methods.fedavg import FedAvg
from protofed.methods.fednh import FedNH
from protofed.methods.fedsgd import FedSGD, GradientUpload, Moving
from protofed.methods.fpl import FPL
from protofed.optim.optimizers import Sgd
from protofed.optim.schedules import CosineRate
from protofed.tree import Mean, Nothing, Params

PLAIN = dataclasses.replace(TASK, transform=dataclasses.replace(TASK.transform, pad=0, flip=False))
"""Without augmentation, so that a batch is the data."""


def gradient_by_hand(params: Params, client: str) -> dict[str, Tensor]:
    """Of the mean loss over all of a client's examples, in training mode, by plain torch."""
    parts = loaded(params, client, training=True)
    data = PLAIN.clients[client]
    z = parts["features"](PLAIN.transform.clean(data.x))
    loss = torch.nn.functional.cross_entropy(parts["classifier"](z), data.labels)
    named = {f"{part}.{name}": p for part, module in parts.items() for name, p in module.named_parameters()}
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


@pytest.mark.parametrize("client", ["ann", "bob"])
@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_a_client_sends_the_gradient_over_all_its_examples(client: str, weighting: Any) -> None:
    of = federation(FedSGD(weighting=weighting), PLAIN)
    state = of.advance(of.start())
    upload: GradientUpload = reply_of(of, state, client).upload
    times = 1 if weighting == "uniform" else SIZES[client]
    expected = {name: times * leaf for name, leaf in gradient_by_hand(state.server.base.params, client).items()}
    assert_close(upload.gradient, expected, f"{client}'s gradient", within=1e-5 * times)
    assert any("running_mean" in name for name in upload.statistics)


W = Weights({"w": torch.tensor([3.0])})


def totals(gradient: float, count: float) -> dict[str, Mean]:
    found = {"gradient": Mean(), "examples": Mean()}
    found["gradient"].add({"w": torch.tensor([gradient])})
    found["examples"].add(Nothing(), count)
    return found


def context(**changes: Any) -> ServerContext:
    return dataclasses.replace(federation(FedSGD()).server_context(0, "round"), **changes)


def test_the_servers_step_by_hand() -> None:
    """Σ of the gradients 6 over 4 examples is 1.5; with momentum ½ and velocity 1 that is 2. Rate 0.1, half of it."""
    state = Moving(W, {"w": torch.tensor([1.0])})
    plain = FedSGD(server_lr=0.1).from_sum(state, totals(6.0, 4.0), context())
    assert plain.base.params["w"].item() == pytest.approx(3 - 0.15)
    moving = FedSGD(server_lr=0.1, momentum=0.5).from_sum(state, totals(6.0, 4.0), context())
    assert (moving.base.params["w"].item(), moving.velocity["w"].item()) == pytest.approx((3 - 0.2, 2.0))
    slow = FedSGD(server_lr=0.1).from_sum(state, totals(6.0, 4.0), context(rate_share=0.5))
    assert slow.base.params["w"].item() == pytest.approx(3 - 0.075)


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_it_is_fedavg_with_one_step_on_all_examples(weighting: Any) -> None:
    """As the paper says of B = ∞ and E = 1. Batches are full, since what fills one would change BatchNorm."""
    task = small_task({name: [0, 1, 2, 3, 0, 1, 2, k % 4] for k, name in enumerate(("ann", "bob", "cyd"))})
    settings: dict[str, Any] = {"rounds": 2, "epochs": 1, "weighting": weighting, "batch_size": 8}
    sgd = federation(FedSGD(server_lr=0.3), task, **settings)
    avg = federation(FedAvg(), task, optimizer=Sgd(lr=0.3), **settings)
    found, expected = sgd.start(), avg.start()
    for _ in range(2):
        found, expected = sgd.advance(found), avg.advance(expected)
    assert_close(found.server.base.params, expected.server.params, "the weights after two rounds", within=1e-5)


def test_the_schedule_of_the_training_is_the_servers() -> None:
    of = federation(FedSGD(server_lr=0.3), PLAIN, rounds=4, schedule=CosineRate())
    last = of.server_context(3, "round").rate_share
    assert 0 < last < 1
    state = usual(FedSGD(server_lr=0.3), 1)
    full = of.method.aggregate(state.server, uploads_of(of, state), of.server_context(0, "round"))
    slow = of.method.aggregate(state.server, uploads_of(of, state), of.server_context(3, "round"))
    for name in state.server.velocity:
        before = state.server.base.params[name]
        assert_close(slow.base.params[name] - before, last * (full.base.params[name] - before), name, within=1e-6)


def uploads_of(of: Any, state: Any) -> list[tuple[str, Any]]:
    return [(client, reply_of(of, state, client).upload) for client in TASK.clients]


def test_momentum_keeps_the_velocity_of_earlier_rounds() -> None:
    state = usual(FedSGD(momentum=0.5), 2)
    assert any(bool(leaf.any()) for leaf in state.server.velocity.values())
    still = usual(FedSGD(momentum=0.0), 2)
    name = "classifier.weight"
    assert (still.server.base.params[name] - state.server.base.params[name]).abs().max() > 1e-4


def test_nothing_goes_around_it() -> None:
    """It is a wrapper itself."""
    for wrapper in ("averaging", "ga", "feddecorr"):
        made: Method[Any, Any, Any, Any] = METHODS[wrapper](base=FedSGD())
        [(_, why)] = made.validate(Sgd(lr=0.1), 8, None)
        assert "is a wrapper itself" in why


@pytest.mark.parametrize("base", [FPL(contrast_with="global", consistent_with="global"), FedNH()], ids=["fpl", "fednh"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_around_methods_with_prototypes_it_conforms(check: Any, base: Any) -> None:
    check(FedSGD(base=base))


def test_the_prototypes_of_a_base_are_means_over_all_examples() -> None:
    """So the server's are those of all data at one place, at the weights that were sent, in evaluation mode."""
    of = federation(FedSGD(base=FPL(contrast_with="global", consistent_with="global")), PLAIN)
    state = of.advance(of.start())
    made = of.advance(state).server.base.prototypes.consistent
    params, rows, labels = state.server.base.params, [], []
    for client, data in PLAIN.clients.items():
        rows.append(loaded(params, client, training=False)["features"](PLAIN.transform.clean(data.x)).detach())
        labels.append(data.labels)
    z, y = torch.cat(rows), torch.cat(labels)
    for c in y.unique().tolist():
        torch.testing.assert_close(made.mean[c], z[y == c].mean(0), atol=1e-5, rtol=1e-4)
        assert made.count[c] == (y == c).sum()
