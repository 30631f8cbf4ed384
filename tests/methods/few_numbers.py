"""A task of a few numbers, for comparing a method with a reference in plain torch.

A client's batch holds all its examples and nothing is varied, so a reference needs none of the engine's draws: the
order of the rows in a batch changes the last bits only.
"""

from typing import Any

import torch
from torch import Tensor, nn

from protofed.api.method import Method
from protofed.api.task import Task
from protofed.data.batches import Data
from protofed.engine.federation import Federation
from protofed.engine.state import State
from protofed.engine.training import Training
from protofed.nn.networks import Parts
from protofed.optim.optimizers import Sgd
from protofed.runtimes.sequential import Sequential

CLASSES, INPUTS, FEATURES = 3, 4, 6
ROUNDS, EPOCHS, LR, MOMENTUM = 3, 2, 0.05, 0.5
LABELS = {"ann": [0] * 6 + [1] * 5 + [2] * 5, "bob": [0] * 6 + [1] * 5, "cyd": [1] * 5 + [2] * 8}
"""Bob has no example of class 2, and cyd none of class 0."""


def clients() -> dict[str, tuple[Tensor, Tensor]]:
    """Inputs and labels of each client, every client in a place of its own."""
    draws = torch.Generator().manual_seed(11)
    centres = 2 * torch.randn(CLASSES, INPUTS, generator=draws)
    data = {}
    for name, labels in LABELS.items():
        y = torch.tensor(labels)
        place = torch.randn(INPUTS, generator=draws)
        data[name] = centres[y] + place + 0.5 * torch.randn(len(y), INPUTS, generator=draws), y
    return data


def network(client: str = "") -> Parts:
    features = nn.Sequential(nn.Linear(INPUTS, FEATURES), nn.ReLU())
    return {"features": features, "classifier": nn.Linear(FEATURES, CLASSES)}


def federation(method: Method[Any, Any, Any, Any], model: Any = network) -> Federation:
    data = {name: Data.of(x, y) for name, (x, y) in clients().items()}
    task = Task(data, {"all": data["ann"]}, CLASSES, model, name="few numbers")
    training = Training(rounds=ROUNDS, epochs=EPOCHS, batch_size=16, optimizer=Sgd(lr=LR, momentum=MOMENTUM))
    return Federation(method, task, training, Sequential())


def after_all_rounds(of: Federation) -> State:
    state = of.start()
    for _ in range(ROUNDS):
        state = of.advance(state)
    assert not state.failures
    return state
