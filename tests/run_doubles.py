"""Experiments small enough for tests of what surrounds training."""

import torch
from torch import nn

from protofed import METHODS, Data, Task
from protofed.engine.federation import Federation
from protofed.engine.training import Training
from protofed.nn.networks import Parts
from protofed.runs.runner import Experiment

CLASSES, SIZE = 3, 6


def parts(client: str) -> Parts:
    features = nn.Sequential(nn.Linear(SIZE, 8), nn.BatchNorm1d(8), nn.ReLU())
    return {"features": features, "classifier": nn.Linear(8, CLASSES)}


def small_task(clients: int = 3) -> Task:
    """Two domains that differ by a shift; classes that differ by a direction."""
    draw = torch.Generator().manual_seed(7)
    directions = torch.randn(CLASSES, SIZE, generator=draw)

    def examples(count: int, shift: float) -> Data:
        y = torch.arange(count) % CLASSES
        return Data.of(2 * directions[y] + shift + torch.randn(count, SIZE, generator=draw), y)

    own = {f"c{k}": examples(12 + 5 * k, shift=float(k % 2)) for k in range(clients)}
    tests = {"low": examples(30, 0.0), "high": examples(30, 1.0)}
    domain_of = {client: "high" if k % 2 else "low" for k, client in enumerate(own)}
    return Task(own, tests, CLASSES, parts, domain_of, public=examples(9, 2.0))


def small_experiment(method: str = "fedavg", rounds: int = 3, seed: int = 0) -> Experiment:
    training = Training(rounds=rounds, epochs=1, batch_size=8, seed=seed)
    return Experiment(Federation(METHODS[method](), small_task(), training), identity=f"{method}-{rounds}-{seed}")
