"""FedASAM: what its clients descend, which models its server averages, and what is left without both."""

import dataclasses

import pytest
import torch
from torch import Tensor

from methods.conformance import (
    CHECKS,
    TASK,
    TRAINING,
    after,
    assert_close,
    assert_same,
    federation,
    fingerprint,
    loaded,
    mean_cross_entropy,
    reply_of,
    usual,
)
from protofed.data.batches import batch_at, training_plan
from protofed.errors import BadInput
from protofed.methods.fedasam import AveragedWeights, FedASAM, sharpness_aware
from protofed.methods.fedavg import FedAvg
from protofed.optim.optimizers import Asam, Sam, Sgd
from protofed.tree import Nothing, Params

PLAIN = FedASAM()


@pytest.mark.parametrize("method", [FedASAM(averaging=True, averaging_start=0.0), PLAIN], ids=repr)
@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check, method: FedASAM) -> None:
    check(method)


def trained_sharpness_aware(params: Params, client: str, seed: int) -> Params:
    """SGD with momentum at w + ρ T² g / ‖T g‖, T = |w| + η for weights and 1 for biases, by a plain torch loop."""
    parts = loaded(params, training=True)
    named = {f"{part}.{name}": p for part, module in parts.items() for name, p in module.named_parameters()}
    sgd = TRAINING.optimizer
    optimizer = torch.optim.SGD(named.values(), lr=sgd.lr, momentum=sgd.momentum, weight_decay=sgd.weight_decay)
    draws = torch.Generator().manual_seed(seed)
    plan = training_plan(TASK.clients[client], TRAINING.batch_size, TRAINING.epochs, TASK.transform, draws)
    for i in range(len(plan.index)):
        batch = batch_at(TASK.clients[client], plan, i, TASK.transform)
        mean_cross_entropy(parts, parts["features"](batch.x), batch).backward()
        statistics = {name: leaf.clone() for name, leaf in parts["features"].named_buffers()}
        with torch.no_grad():
            start = {name: p.clone() for name, p in named.items()}
            scales = {n: p.abs() + 0.2 if "weight" in n else torch.ones_like(p) for n, p in named.items()}
            norm = sum((scales[name] * p.grad).square().sum() for name, p in named.items()).sqrt()
            for name, p in named.items():
                p.add_(0.05 * scales[name].square() * p.grad / norm)
        optimizer.zero_grad()
        mean_cross_entropy(parts, parts["features"](batch.x), batch).backward()
        with torch.no_grad():
            for name, p in named.items():
                p.copy_(start[name])
            for name, leaf in parts["features"].named_buffers():
                leaf.copy_(statistics[name])
        optimizer.step()
        optimizer.zero_grad()
    state: dict[str, Tensor] = {f"{part}.{n}": leaf for part, m in parts.items() for n, leaf in m.state_dict().items()}
    return {name: state[name].detach() for name in params}


def test_a_client_descends_the_adaptive_sharpness() -> None:
    state = usual(PLAIN, 0)
    of, message = federation(PLAIN), PLAIN.message_for(state.server, "ann")
    request = PLAIN.train(of.client_context("ann", 0), message, Nothing()).send(None)
    expected = trained_sharpness_aware(state.server.params, "ann", request.seed)
    assert_close(reply_of(of, state, "ann").upload.params, expected, "ann's weights", within=1e-5)


def test_without_a_neighbourhood_and_an_average_it_is_fedavg() -> None:
    method = FedASAM(rho=0.0, averaging=False)
    for rounds in (1, 2, 3):
        assert_same(usual(method, rounds).server.params, usual(FedAvg(), rounds).server.params, f"round {rounds}")
        public = method.public(usual(method, rounds).server)
        assert_same(public[0], usual(FedAvg(), rounds).server.params, f"the public model of round {rounds}")
    assert fingerprint(usual(PLAIN, 3).server.params) != fingerprint(usual(FedAvg(), 3).server.params)


def test_the_average_starts_after_three_quarters_of_the_rounds() -> None:
    # Of 8 rounds the first 6 are three quarters: the models of rounds 7 and 8 are averaged.
    of = federation(FedASAM(averaging=True), rounds=8)
    states = [of.start()]
    for _ in range(8):
        states.append(of.advance(states[-1]))
    assert [int(state.server.count) for state in states] == [0, 0, 0, 0, 0, 0, 0, 1, 2]
    for state in states[:8]:
        assert_same(state.server.average, state.server.params, "the average of at most one model")
    last, server = states[7].server.params, states[8].server
    assert isinstance(server, AveragedWeights)
    expected = {name: ((last[name].double() + server.params[name].double()) / 2).float() for name in last}
    assert_close(server.average, expected, "the average of two models", within=1e-6)
    assert_same(of.method.public(server)[0], server.average, "the public model")


def test_three_models_count_the_same_in_the_average() -> None:
    method = FedASAM(averaging=True, averaging_start=0.0)
    models = [usual(method, rounds).server.params for rounds in (1, 2, 3)]
    expected = {name: (sum(m[name].double() for m in models) / 3).float() for name in models[0]}
    assert_close(usual(method, 3).server.average, expected, "the average of three models", within=1e-6)


def test_training_goes_on_from_the_weights_and_not_from_the_average() -> None:
    averaged = after(3, federation(FedASAM(averaging=True, averaging_start=0.0)))
    assert_same(averaged.server.params, usual(PLAIN, 3).server.params, "the weights under an average")
    assert_same(FedASAM().message_for(averaged.server, "ann").params, averaged.server.params, "the message")
    assert fingerprint(averaged.server.average) != fingerprint(averaged.server.params)


def test_the_configured_optimiser_is_kept_inside() -> None:
    sgd = Sgd(lr=0.3, momentum=0.5)
    assert sharpness_aware(sgd, 0.1, 0.4) == Asam(base=sgd, rho=0.1, eta=0.4)


@pytest.mark.parametrize("optimizer", [Sam(), Asam()], ids=repr)
def test_an_optimiser_that_is_sharpness_aware_already_is_refused(optimizer: Sam | Asam) -> None:
    with pytest.raises(BadInput, match=r"take one of sgd, adam, adamw, rmsprop, not a?sam"):
        federation(FedASAM(), optimizer=optimizer).start()


def test_a_method_is_its_settings() -> None:
    expected = {"rho": 0.05, "eta": 0.2, "averaging": False, "averaging_start": 0.75, "weighting": "training"}
    assert dataclasses.asdict(FedASAM()) == expected
