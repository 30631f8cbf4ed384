"""Every client's own model, on the test set of all and on one that looks like the client's own data.

A client's own model is the one that it has just trained in this round, before the server answers: for a method with a
global model, that model after the client's fine-tuning. Judged are the clients that took part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from protofed.data import Data
from protofed.errors import BadInput
from protofed.evaluation.domains import Looking, confusions
from protofed.evaluation.metrics import local_index, macro_f1, owned_accuracy, proportional_accuracy, top1
from protofed.method import ClientId, Reply, Task
from protofed.runtimes.federation import Federation
from protofed.runtimes.placement import unplaced
from protofed.seeds import generator
from protofed.tree import Params, Tree

HELD = 2**29
"""Bytes of clients' weights that may wait to be judged together."""


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


class Judge:
    """Judges the clients of a round as they reply: a federation's `on_trained`. Many are judged at once, which a
    runtime does faster, but no more than so many as to keep few weights."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._homes: dict[ClientId, _Home] = {}
        self._waiting: dict[ClientId, tuple[Params, Tree, Tree]] = {}
        self._held = 0
        self._judged: dict[ClientId, Judged] = {}

    def __call__(self, client: ClientId, message: Tree, reply: Reply[Any, Any]) -> None:
        params = self._federation.method.trained_weights(reply.upload, reply.memory)
        self._waiting[client] = params, message, reply.memory
        self._held += sum(leaf.nbytes for leaf in params.values())
        if self._held > HELD:
            self._look()

    def judged(self) -> dict[ClientId, Judged]:
        """The clients that replied since this was last asked."""
        if self._waiting:
            with self._federation.runtime.open(self._federation):
                self._look()
        found, self._judged = self._judged, {}
        return found

    def _look(self) -> None:
        federation, tests = self._federation, self._federation.task.tests
        models: list[Looking] = []
        for client, (params, message, memory) in self._waiting.items():
            networks, home = federation.networks_of(client), self._home(client)
            sets = [(data, (home.marks[name],)) for name, data in tests.items()] + [(data, ()) for data in home.apart]
            models += [(networks, params, (message, memory, *marks), data) for data, marks in sets]
        found = iter(confusions(federation, models))
        for client in self._waiting:
            home = self._homes[client]
            tested, apart = [next(found) for _ in tests], [next(found) for _ in home.apart]
            everywhere, at_home = torch.stack(tested).sum(0)
            self._judged[client] = Judged(everywhere, at_home + sum(matrix for (matrix,) in apart), home.counts)
        self._waiting.clear()
        self._held = 0

    def _home(self, client: ClientId) -> "_Home":
        if client not in self._homes:
            federation = self._federation
            with unplaced():
                self._homes[client] = _home(federation.task, client, federation.training.seed)
        return self._homes[client]


@dataclass(frozen=True)
class _Home:
    """Where a client is at home, so that it need not be found out in every round."""

    marks: Mapping[str, Tensor]
    """Of each test set, by its rows of the store: which are in the client's local test set. All have one length, so
    that all sets are alike to a runtime."""
    apart: Sequence[Data]
    """The examples of its local test set that are in no other."""
    counts: Tensor
    """The client's training examples of each class."""


def _home(task: Task, client: ClientId, seed: int) -> _Home:
    tests = task.tests
    device = task.clients[client].index.device
    nothing = torch.zeros(max(len(data.x) for data in tests.values()), dtype=torch.bool, device=device)
    marks, apart = dict.fromkeys(tests, nothing), list[Data]()
    for part in local_test(task, client, seed):
        found = [name for name, data in tests.items() if _is_among(part, data)]
        if found:
            marks[found[0]] = marks[found[0]].index_fill(0, part.index, True)
        else:
            apart.append(part)
    return _Home(marks, apart, label_counts(task.clients[client], task.num_classes))


def _is_among(part: Data, whole: Data) -> bool:
    """Whether the examples of a set, none of them twice, are among those of another."""
    is_one_store = part.x is whole.x and part.y is whole.y
    is_once = all(len(torch.unique(data.index)) == len(data) for data in (part, whole))
    return is_one_store and is_once and bool(torch.isin(part.index, whole.index).all())


def means(scores: Mapping[ClientId, Mapping[str, float]]) -> dict[str, float]:
    """Each metric's plain mean over the clients; nothing for no clients."""
    names = next(iter(scores.values()), {})
    return {name: fmean(own[name] for own in scores.values()) for name in names}


def local_test(task: Task, client: ClientId, seed: int) -> list[Data]:
    """A test set with the client's own label proportions, drawn from the test set of its domain, or from all of them;
    in parts, one of each set that it was drawn from.

    It is the largest that the examples allow: class c has round(s p_c) examples, p_c the client's share of the class,
    with the largest whole s for which no class asks for more than there are. A class that cannot be tested at all is
    left out, since it would leave next to nothing of the others. A client whose test set the task names has that one.
    """
    if client in task.local_tests:
        return [task.local_tests[client]]
    if not is_testable(task, client):
        raise BadInput(f"task {task.name}: no test example is of a class that client {client!r} has")
    sets, sizes = _pool(task, client), _local_sizes(task, client)
    labels = torch.cat([data.labels for data in sets])
    order = torch.randperm(len(labels), generator=generator(seed, "local test", client)).to(labels.device)
    of_class = [order[labels[order] == c] for c in range(len(sizes))]
    chosen = torch.cat([rows[:size] for rows, size in zip(of_class, sizes, strict=True)]).sort().values
    ends = list(accumulate(len(data) for data in sets))
    parts = [data.rows(_between(chosen, end - len(data), end)) for data, end in zip(sets, ends, strict=True)]
    return [part for part in parts if len(part)]


def is_testable(task: Task, client: ClientId) -> bool:
    """Whether there is a local test set for a client."""
    return client in task.local_tests or any(_local_sizes(task, client))


def _local_sizes(task: Task, client: ClientId) -> list[int]:
    """How many examples of each class the local test set has that is drawn for a client."""
    wanted = label_counts(task.clients[client], task.num_classes)
    available = sum(label_counts(data, task.num_classes) for data in _pool(task, client))
    return _sizes(wanted.tolist(), torch.as_tensor(available).tolist())


def _pool(task: Task, client: ClientId) -> list[Data]:
    """The test sets that a client's own may be drawn from."""
    return [task.tests[name] for name in sorted(task.tests) if name == task.domain_of.get(client, name)]


def _between(rows: Tensor, begin: int, end: int) -> Tensor:
    """Those from one number to before another, counted from the first."""
    return rows[(rows >= begin) & (rows < end)] - begin


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
