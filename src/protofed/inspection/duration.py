"""How long a comparison will take on this machine, from a few steps of each method."""

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import ceil
from pathlib import Path

import torch

from protofed.api.task import ClientId, Task
from protofed.data.batches import Data
from protofed.engine.federation import Federation
from protofed.engine.training import Training
from protofed.one_run import only_run
from protofed.runs import compare
from protofed.runs.config.config import Config
from protofed.runs.runtime_choice import pinned_threads
from protofed.runtimes.sequential import Sequential

STEPS = 2
"""Steps of each of two sites that are timed."""
TEST_COST = 0.4
"""Testing an example costs so much of training on it: one of the three passes, and what surrounds it."""


def seconds_of(path: Path) -> float:
    """The seconds that the comparison in a file takes, if nothing else uses the machine and no run ends early."""
    comparison = compare.load(path)
    first = comparison.configs[0]
    with _no_warnings(), only_run(), pinned_threads(1):
        task = first.task if isinstance(first.task, Task) else first.task.build()
        one_step = {
            label: _step(seeds[0], task) for methods in comparison.runs.values() for label, seeds in methods.items()
        }
    runs = [(label, one) for methods in comparison.runs.values() for label, seeds in methods.items() for one in seeds]
    total = sum(one_step[label] * _steps(task, one.training, one) for label, one in runs)
    return total / min(len(runs), len(os.sched_getaffinity(0)))


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    """The inspection has said already what a task warns of."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _step(config: Config, task: Task) -> float:
    """Seconds of one training step of a method."""
    batch = config.training.batch_size
    largest = sorted(task.clients, key=lambda client: len(task.clients[client]), reverse=True)[:2]
    small = _cut(task, {client: _first(task.clients[client], batch * STEPS) for client in largest})
    training = replace(config.training, rounds=3, epochs=1)
    federation = Federation(config.method, small, training, Sequential())
    state = federation.advance(federation.start())  # the first round also allocates and imports
    begin = time.perf_counter()
    federation.advance(state)
    steps = sum(ceil(len(data) / batch) for data in small.clients.values())
    return (time.perf_counter() - begin) / steps


def _cut(task: Task, clients: Mapping[ClientId, Data]) -> Task:
    """The task with these clients' data and nothing else."""
    return replace(task, clients=dict(clients), tests={}, domain_of={}, local_tests={}, validation={}, held_out=())


def _first(data: Data, count: int) -> Data:
    return data.rows(torch.arange(min(count, len(data))))


def _steps(task: Task, training: Training, config: Config) -> float:
    """Training steps of a run, with its evaluations in the same unit."""
    trained = [data for client, data in task.clients.items() if client not in task.held_out]
    steps = training.epochs * sum(ceil(len(data) / training.batch_size) for data in trained)
    models = len(trained) if config.method.clients_use == "own models" else 1
    tested = models * sum(map(len, task.tests.values())) + sum(map(len, task.validation.values()))
    return training.rounds * (steps + TEST_COST * tested / training.batch_size / config.evaluation.every)
