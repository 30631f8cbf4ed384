"""On a convex problem FedDyn, FedDC and SCAFFOLD come to rest at the optimum, and FedAvg does not.

Logistic regression of three classes with weight decay, clients with different classes, whole batches, ten plain steps
in each round. The measure is the largest distance of a weight from the optimum, which scipy finds in float64. FedNova
does not correct drift, but clients that take more steps count no more in it: it is held against unequal steps.
"""

from functools import lru_cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from torch import nn

from protofed.api.method import Method, Weighting
from protofed.api.task import Task
from protofed.data.batches import Data
from protofed.engine.federation import Federation
from protofed.engine.training import Training
from protofed.methods.fedavg import FedAvg
from protofed.methods.feddc import FedDC
from protofed.methods.feddyn import FedDyn
from protofed.methods.fednova import FedNova
from protofed.methods.scaffold import Scaffold
from protofed.nn.networks import Parts
from protofed.optim.optimizers import Sgd

CLASSES, INPUTS = 3, 4
LABELS = {
    "skewed": {"ann": [12, 2, 0], "bob": [1, 8, 1], "cyd": [0, 3, 15]},
    "even batches": {"ann": [10, 2, 0], "bob": [1, 4, 1], "cyd": [0, 3, 15]},
}
"""How many examples of each class a client has: 14, 10 and 18 in all, or 12, 6 and 18."""
DECAY = {"skewed": 0.1, "even batches": 0.5}


def network(client: str) -> Parts:
    return {"features": nn.Identity(), "classifier": nn.Linear(INPUTS, CLASSES)}


def task(labels: dict[str, list[int]]) -> Task:
    draws = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, INPUTS, generator=draws)

    def examples(counts: list[int]) -> Data:
        y = torch.repeat_interleave(torch.arange(CLASSES), torch.tensor(counts))
        return Data.of(centres[y] + torch.randn(len(y), INPUTS, generator=draws), y)

    clients = {client: examples(counts) for client, counts in labels.items()}
    return Task(clients, {"same": clients["ann"]}, CLASSES, network)


TASKS = {name: task(labels) for name, labels in LABELS.items()}


@lru_cache
def optimum(weighting: Weighting, name: str = "skewed") -> np.ndarray:
    """Of the mean of the clients' losses, or of the loss on all examples together."""
    clients = TASKS[name].clients
    sizes = {client: 1 if weighting == "uniform" else len(data) for client, data in clients.items()}

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weights = torch.tensor(flat, requires_grad=True)
        matrix, bias = weights[: CLASSES * INPUTS].view(CLASSES, INPUTS), weights[CLASSES * INPUTS :]
        losses = {c: F.cross_entropy(data.x.double() @ matrix.T + bias, data.y) for c, data in clients.items()}
        mean = sum(sizes[c] * own for c, own in losses.items()) / sum(sizes.values())
        value = mean + DECAY[name] / 2 * weights.square().sum()
        return value.item(), torch.autograd.grad(value, weights)[0].numpy()

    found = minimize(loss, np.zeros(CLASSES * (INPUTS + 1)), jac=True, method="BFGS", options={"gtol": 1e-9})
    assert np.linalg.norm(loss(found.x)[1]) < 1e-7
    return found.x


def distance(
    method: Method,
    weighting: Weighting,
    rounds: int = 45,
    *,
    name: str = "skewed",
    epochs: int = 10,
    batch_size: int = 18,
    lr: float = 0.2,
    momentum: float = 0.0,
) -> float:
    """How far the weight that is furthest from the optimum is from it after these rounds."""
    optimizer = Sgd(lr=lr, momentum=momentum, weight_decay=DECAY[name])
    training = Training(rounds=rounds, epochs=epochs, batch_size=batch_size, optimizer=optimizer)
    of = Federation(method, TASKS[name], training)
    state = of.start()
    for _ in range(rounds):
        state = of.advance(state)
    params = state.server.params
    flat = torch.cat([params["classifier.weight"].flatten(), params["classifier.bias"]]).double().numpy()
    return float(np.abs(flat - optimum(weighting, name)).max())


CORRECTED = [
    (FedDyn(penalty_weight=0.3, weighting="uniform"), "uniform"),
    (FedDyn(penalty_weight=0.3), "examples"),
    (Scaffold(weighting="uniform"), "uniform"),
    (Scaffold(), "examples"),
    (FedDC(penalty_weight=0.1), "examples"),
    (FedDC(penalty_weight=0.1, weighting="uniform"), "examples"),
    (FedDC(penalty_weight=0.0), "examples"),
]


@pytest.mark.parametrize(("method", "weighting"), CORRECTED, ids=lambda value: str(value))
def test_clients_that_correct_their_drift_come_to_rest_at_the_optimum(method: Method, weighting: Weighting) -> None:
    assert distance(method, weighting) < 1e-4


def test_control_variates_have_no_bias_with_momentum() -> None:
    assert distance(Scaffold(weighting="uniform"), "uniform", lr=0.05, momentum=0.9) < 1e-4


def test_fedavg_comes_to_rest_elsewhere() -> None:
    # Much more than ten times as far as the others, and more rounds do not help.
    after_30, after_40 = distance(FedAvg(), "examples", 30), distance(FedAvg(), "examples", 40)
    assert after_40 > 0.1
    assert after_40 == pytest.approx(after_30, rel=1e-2)


def test_fedavg_with_one_step_is_gradient_descent_and_finds_the_optimum() -> None:
    assert distance(FedAvg(), "examples", 200, epochs=1, lr=0.5) < 1e-4


def test_the_optima_of_both_weightings_are_far_apart() -> None:
    assert np.abs(optimum("uniform") - optimum("examples")).max() > 1e-2


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_fednova_is_not_drawn_to_the_clients_that_take_more_steps(momentum: float) -> None:
    # In batches of 6 ann takes 2 steps, bob 1 and cyd 3, so that FedAvg counts them 12 · 2, 6 · 1 and 18 · 3.
    fednova, fedavg = (
        distance(m, "examples", 90, name="even batches", epochs=1, batch_size=6, lr=0.05, momentum=momentum)
        for m in (FedNova(), FedAvg())
    )
    assert fednova < fedavg / 3
