"""Every client's own model, on the test set of all and on one that looks like the client's own data.

A client's own model is the one that it has just trained in this round, before the server answers: for a method with a
global model, that model after the client's fine-tuning. Judged are the clients that took part.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from protofed.data import Data
from protofed.errors import BadInput
from protofed.evaluation.domains import confusion
from protofed.evaluation.metrics import local_index, macro_f1, owned_accuracy, proportional_accuracy, top1
from protofed.method import ClientId, Reply, Task
from protofed.runtimes.federation import Federation
from protofed.seeds import generator
from protofed.tree import Tree


@dataclass(frozen=True)
class Judged:
    """How one client's own model did."""

    everywhere: Tensor  # (C, C), confusion on the union of all test sets
    at_home: Tensor  # (C, C), confusion on the client's local test set
    counts: Tensor  # (C,), the client's training examples of each class

    def scores(self) -> dict[str, float]:
        """The papers' personal metrics by name."""
        return {
            "owned": owned_accuracy(self.everywhere, self.counts),  # PM(V) of FedPC
            "proportional": proportional_accuracy(self.everywhere, self.counts),  # PM(L) of FedPC
            "accuracy": top1(self.at_home),
            "macro_f1": macro_f1(self.at_home),
            "local_index": local_index(self.at_home),  # I_local of pFedCSPC
        }


@dataclass(frozen=True)
class Judge:
    """Judges the clients of one round as they reply, so that nobody's weights need to be kept: a federation's
    `on_trained`."""

    federation: Federation
    clients: dict[ClientId, Judged] = field(default_factory=dict)

    def __call__(self, client: ClientId, message: Tree, reply: Reply[Any, Any]) -> None:
        federation, task = self.federation, self.federation.task
        params = federation.method.trained_weights(reply.upload, reply.memory)
        known = (federation, federation.networks_of(client), params, (message, reply.memory))
        self.clients[client] = Judged(
            everywhere=confusion(*known, *task.tests.values()),
            at_home=confusion(*known, local_test(task, client, federation.training.seed)),
            counts=label_counts(task.clients[client], task.num_classes),
        )


def means(scores: Mapping[ClientId, Mapping[str, float]]) -> dict[str, float]:
    """Each metric's plain mean over the clients; nothing for no clients."""
    names = next(iter(scores.values()), {})
    return {name: fmean(own[name] for own in scores.values()) for name in names}


def local_test(task: Task, client: ClientId, seed: int) -> Data:
    """A test set with the client's own label proportions, drawn from the test set of its domain, or from all of them.

    It is the largest that the examples allow: class c has round(s p_c) examples, p_c the client's share of the class,
    with the largest whole s for which no class asks for more than there are. A class that cannot be tested at all is
    left out, since it would leave next to nothing of the others. A client whose test set the task names has that one.
    """
    if client in task.local_tests:
        return task.local_tests[client]
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
