"""Every client's own model, on the test set of all and on one that looks like the client's own data.

A client's own model is what `Method.local_weights` gives between rounds: for a method whose clients keep no weights it
is the model that the server would send, not the one that the client had trained before the server averaged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from protofed.data import Data
from protofed.errors import BadInput
from protofed.evaluation.domains import confusion
from protofed.evaluation.metrics import local_index, owned_accuracy, proportional_accuracy
from protofed.method import ClientId, Task
from protofed.runtimes.federation import Federation, State
from protofed.seeds import generator


@dataclass(frozen=True)
class Judged:
    """How one client's own model did."""

    everywhere: Tensor  # (C, C), confusion on the union of all test sets
    at_home: Tensor  # (C, C), confusion on the client's local test set
    counts: Tensor  # (C,), the client's training examples of each class


@dataclass(frozen=True)
class PersonalScores:
    """Plain means over clients."""

    owned: float
    """PM(V) of FedPC."""
    proportional: float
    """PM(L) of FedPC."""
    local: float
    """I_local of pFedCSPC, computed for each client and then averaged."""


def evaluate_clients(
    federation: Federation, state: State, clients: Sequence[ClientId] | None = None, seed: int | None = None
) -> dict[ClientId, Judged]:
    """How the own models of these clients do, all clients by default; `seed` draws the local test sets, by default the
    run's."""
    seed = federation.training.seed if seed is None else seed
    return {c: _judged(federation, state, c, seed) for c in (federation.ids if clients is None else clients)}


def personal_scores(judged: Mapping[ClientId, Judged]) -> PersonalScores:
    """The papers' personal metrics, over all clients that were judged."""
    return PersonalScores(
        owned=fmean(owned_accuracy(j.everywhere, j.counts) for j in judged.values()),
        proportional=fmean(proportional_accuracy(j.everywhere, j.counts) for j in judged.values()),
        local=fmean(local_index(j.at_home) for j in judged.values()),
    )


def public_confusion(federation: Federation, state: State) -> Tensor | None:
    """The public model's confusion (C, C) on the union of all test sets; None where there is no such model."""
    public = federation.method.public(state.server)
    if public is None:
        return None
    params, message = public
    networks = federation.networks_of(federation.ids[0])
    return confusion(federation, networks, params, (message, None), *federation.task.tests.values())


def local_test(task: Task, client: ClientId, seed: int) -> Data:
    """A test set with the client's own label proportions, drawn from the test set of its domain, or from all of them.

    It is the largest that the examples allow: class c has round(s p_c) examples, p_c the client's share of the class,
    with the largest whole s for which no class asks for more than there are. A class that cannot be tested at all is
    left out, since it would leave next to nothing of the others.
    """
    pool = task.tests[task.domain_of[client]] if client in task.domain_of else union(task)
    wanted = label_counts(task.clients[client], task.num_classes).tolist()
    sizes = _sizes(wanted, label_counts(pool, task.num_classes).tolist())
    if not any(sizes):
        raise BadInput(f"task {task.name}: no test example is of a class that client {client!r} has")
    draws = generator(seed, "local test", client)
    order = torch.randperm(len(pool), generator=draws)
    labels = pool.labels[order]
    chosen = [order[labels == c][:size] for c, size in enumerate(sizes)]
    return pool.rows(torch.cat(chosen).sort().values)


def union(task: Task) -> Data:
    """All test sets as one, in the order of their names."""
    sets = [task.tests[name] for name in sorted(task.tests)]
    if len(sets) == 1:
        return sets[0]
    inputs = [data.x[data.index] for data in sets]
    if len({x.dtype for x in inputs}) > 1:
        inputs = [task.transform.scale(x) for x in inputs]
    return Data.of(torch.cat(inputs), torch.cat([data.labels for data in sets]))


def label_counts(data: Data, num_classes: int) -> Tensor:
    """How many examples there are of each class, (C,)."""
    return torch.bincount(data.labels, minlength=num_classes)


def _sizes(wanted: list[int], available: list[int]) -> list[int]:
    """round(s p_c), halves up, for the largest whole s that `available` allows; in whole numbers, which do not round.

    With p_c = w_c / n, round(s p_c) is ⌊(2 s w_c + n) / 2n⌋. It is at most a_c if 2 s w_c + n < 2n (a_c + 1), that is
    if s ≤ ⌊(n (2 a_c + 1) − 1) / 2 w_c⌋.
    """
    wanted = [w if a else 0 for w, a in zip(wanted, available, strict=True)]
    n = sum(wanted)
    if n == 0:
        return wanted
    s = min((n * (2 * a + 1) - 1) // (2 * w) for w, a in zip(wanted, available, strict=True) if w)
    return [(2 * s * w + n) // (2 * n) if w else 0 for w in wanted]


def _judged(federation: Federation, state: State, client: ClientId, seed: int) -> Judged:
    task, method = federation.task, federation.method
    message = method.message_for(state.server, client)
    memory = federation.memory_of(state, client, message)
    params, networks = method.local_weights(message, memory), federation.networks_of(client)
    return Judged(
        everywhere=confusion(federation, networks, params, (message, memory), *task.tests.values()),
        at_home=confusion(federation, networks, params, (message, memory), local_test(task, client, seed)),
        counts=label_counts(task.clients[client], task.num_classes),
    )
