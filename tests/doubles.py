"""Runtimes that misbehave on purpose, and a federation small enough to train in milliseconds."""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from protofed.api.task import ClientId, Task
from protofed.data.batches import Data
from protofed.engine.federation import Federation
from protofed.engine.state import State
from protofed.nn.networks import Parts
from protofed.runs.store.client_state import SavedStore
from protofed.runtimes.client_store import Receipt
from protofed.runtimes.jobs import Answer, Failure, Job, Reason
from protofed.runtimes.sequential import Sequential
from protofed.tree import Mean, Tree, named_leaves

Outcomes = Iterator[tuple[ClientId, Answer | Failure]]

INPUTS, FEATURES, CLASSES = 12, 8, 5


class Faulty(Sequential):
    """These clients fail instead of working."""

    def __init__(self, clients: set[ClientId]) -> None:
        super().__init__()
        self.clients = clients

    def run(self, jobs: Iterable[Job]) -> Outcomes:
        for job in jobs:
            if job.client in self.clients:
                yield job.client, Failure(job.client, Reason.CLIENT_ERROR, "told to fail")
            else:
                yield from super().run([job])


class Shuffled(Sequential):
    """Every job is done before the first outcome is given out, and they come in a random order."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)

    def run(self, jobs: Iterable[Job]) -> Outcomes:
        outcomes = list(super().run(jobs))
        self.random.shuffle(outcomes)
        yield from outcomes


class Tampering(Sequential):
    """One client's upload is changed on its way."""

    def __init__(self, client: ClientId, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.client = client
        self.change = change

    def run(self, jobs: Iterable[Job]) -> Outcomes:
        for client, outcome in super().run(jobs):
            if client == self.client and isinstance(outcome, Answer):
                outcome = replace(outcome, upload=self.change(outcome.upload))
            yield client, outcome


class Watching(Sequential):
    """Tells of every client whose step ended well: its message and its upload."""

    def __init__(self, tell: Callable[[ClientId, Any, Any], None]) -> None:
        super().__init__()
        self.tell = tell

    def run(self, jobs: Iterable[Job]) -> Outcomes:
        for job in jobs:
            [(client, outcome)] = super().run([job])
            if isinstance(outcome, Answer):
                self.tell(client, job.message, outcome.upload)
            yield client, outcome


def memories(state: State) -> dict[ClientId, Tree]:
    """What the clients of a simulation keep."""
    store = SavedStore(Path(), lambda client: None, torch.device("cpu"))
    return {client: store.load(client, receipt) for client, receipt in state.receipts.items()}


def job_of(
    federation: Federation, client: ClientId, message: Any, receipt: Receipt | None = None, round: int = 0
) -> Job:
    """One client's training."""
    context = federation.client_context(client, round)
    return Job(client, federation.method.train, context, message, receipt, federation.method)


def tiny(num_clients: int = 4) -> Task:
    """Vectors around one centre per class. Clients c00, c01, ... differ in size, and each lacks a class."""
    draws = torch.Generator().manual_seed(7)
    centres = torch.randn(CLASSES, INPUTS, generator=draws)

    def examples(labels: list[int], shift: float) -> Data:
        y = torch.tensor(labels)
        return Data.of(centres[y] + shift + 0.5 * torch.randn(len(y), INPUTS, generator=draws), y)

    def held_by(k: int) -> list[int]:
        return [c for c in range(CLASSES) if c != k % CLASSES] * (1 + k % 3) + [(k + 1) % CLASSES]

    domains = {"near": 0.0, "far": 0.3}
    domain_of = {f"c{k:02d}": list(domains)[k % 2] for k in range(num_clients)}
    clients = {name: examples(held_by(k), domains[domain_of[name]]) for k, name in enumerate(domain_of)}
    tests = {domain: examples(list(range(CLASSES)) * 4, shift) for domain, shift in domains.items()}
    public = examples(list(range(CLASSES)) * 3, 0.6)
    return Task(clients, tests, CLASSES, tiny_parts, domain_of, public=public, name="tiny")


def tiny_parts(client: ClientId = "any") -> Parts:
    features = nn.Sequential(nn.Linear(INPUTS, FEATURES), nn.BatchNorm1d(FEATURES), nn.ReLU())
    return {"features": features, "classifier": nn.Linear(FEATURES, CLASSES)}


def bits(tree: Tree) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    """What two trees must agree on to be the same bit for bit."""
    leaves = named_leaves(tree).items()
    return {path: (leaf.dtype, tuple(leaf.shape), leaf.detach().numpy().tobytes()) for path, leaf in leaves}


def sum_of(trees: Iterable[Any]) -> Any:
    """The sum of trees, in float64."""
    mean = Mean()
    for one in trees:
        mean.add(one)
    return mean.total
