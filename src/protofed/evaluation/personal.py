"""Every client's own model, on the test set of all and on one that looks like the client's own data.

A client's own model is the one that it has just trained in this round, before the server answers: for a method with a
global model, that model after the client's fine-tuning. Judged are the clients that took part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from protofed import tree
from protofed.api.contexts import Reply
from protofed.api.task import ClientId
from protofed.data.batches import Data
from protofed.engine.federation import Federation
from protofed.errors import RunFailed
from protofed.evaluation.evaluate import Looking, confusions
from protofed.evaluation.local_tests import label_counts, local_test
from protofed.evaluation.metrics import local_index, macro_f1, owned_accuracy, proportional_accuracy, top1
from protofed.runtimes.device import unplaced
from protofed.tree import Params, Tree

HELD = 2**29
"""Bytes that may wait to be judged together, once for each test set, as a runtime may have them."""


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
    """Judges the clients of a round: a federation's `on_trained`. What they trained waits, so that many can be judged
    at once, which a runtime does faster."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._homes: dict[ClientId, _Home] = {}
        self._waiting: dict[ClientId, _Waiting] = {}
        self._places: set[int] = set()
        """Where what waits lies in memory: much of it is common to all clients, and counts once."""
        self._num_bytes = 0
        self._judged: dict[ClientId, Judged] = {}

    def __call__(self, client: ClientId, message: Tree, reply: Reply[Any, Any]) -> None:
        params = self._federation.method.trained_weights(reply.upload, reply.memory)
        self._waiting[client] = _Waiting(params, message, reply.memory)
        for leaf in self._waiting[client].leaves:
            if leaf.data_ptr() not in self._places:
                self._places.add(leaf.data_ptr())
                self._num_bytes += leaf.nbytes
        if self._num_bytes * len(self._federation.task.tests) > HELD:
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
        for client, one in self._waiting.items():
            one.refuse_change(client)
            networks, home = federation.networks_of(client), self._home(client)
            known = (one.message, one.memory)
            marks = [self._mark(home.parts.get(name)) for name in tests]
            models += [(networks, one.params, (*known, m), d) for m, d in zip(marks, tests.values(), strict=True)]
            models += [(networks, one.params, known, data) for data in home.apart]
        found = iter(confusions(federation, models))
        for client in self._waiting:
            home = self._homes[client]
            tested, apart = [next(found) for _ in tests], [next(found) for _ in home.apart]
            everywhere, at_home = torch.stack(tested).sum(0)
            self._judged[client] = Judged(everywhere, at_home + sum(matrix for (matrix,) in apart), home.counts)
        self._waiting.clear()
        self._places.clear()
        self._num_bytes = 0

    def _home(self, client: ClientId) -> "_Home":
        """Where a client is at home; found out once."""
        if client not in self._homes:
            federation, task = self._federation, self._federation.task
            parts, apart = dict[str, Tensor](), list[Data]()
            with unplaced():
                for part in local_test(task, client, federation.training.seed):
                    free = (name for name in self._members if name not in parts and self._is_among(part, name))
                    name = next(free, None)
                    if name is None:
                        apart.append(part)
                    else:
                        parts[name] = part.index
                counts = label_counts(task.clients[client], task.num_classes)
            self._homes[client] = _Home(parts, apart, counts)
        return self._homes[client]

    @cached_property
    def _members(self) -> dict[str, Tensor]:
        """Which rows of its store a test set has, for those that have none twice."""
        tests = self._federation.task.tests
        found = {name: _marked(len(data.x), data.index) for name, data in tests.items()}
        return {name: rows for name, rows in found.items() if int(rows.sum()) == len(tests[name])}

    def _is_among(self, part: Data, name: str) -> bool:
        """Whether the examples of a set, none of them twice, are among those of a test set."""
        whole = self._federation.task.tests[name]
        is_once = len(torch.unique(part.index)) == len(part)
        return part.x is whole.x and part.y is whole.y and is_once and bool(self._members[name][part.index].all())

    def _mark(self, rows: Tensor | None) -> Tensor:
        """Which rows of a store are a client's. All marks have one length, so that all sets are alike to a runtime."""
        return self._no_rows if rows is None else self._no_rows.index_fill(0, rows, True)

    @cached_property
    def _no_rows(self) -> Tensor:
        tests = self._federation.task.tests.values()
        longest = max(tests, key=lambda data: len(data.x))
        return _marked(len(longest.x), longest.index[:0])


def _marked(length: int, rows: Tensor) -> Tensor:
    return torch.zeros(length, dtype=torch.bool, device=rows.device).index_fill_(0, rows, True)


class _Waiting:
    """What a client trained, until it is judged."""

    def __init__(self, params: Params, message: Tree, memory: Tree) -> None:
        self.params, self.message, self.memory = params, message, memory
        self._versions = [leaf._version for leaf in self.leaves]

    @property
    def leaves(self) -> list[Tensor]:
        found = tree.leaves((self.params, self.message, self.memory))
        return [leaf for leaf in found if isinstance(leaf, Tensor)]

    def refuse_change(self, client: ClientId) -> None:
        """What was changed since is not what the client trained."""
        if [leaf._version for leaf in self.leaves] != self._versions:
            raise RunFailed(
                f"what client {client} received, sent or keeps was changed in place before the client was judged: "
                "records are not to be changed; let the method make new tensors"
            )


@dataclass(frozen=True)
class _Home:
    parts: Mapping[str, Tensor]
    """The rows of its local test set that each test set has."""
    apart: Sequence[Data]
    """The examples of its local test set that are in no other."""
    counts: Tensor
    """The client's training examples of each class."""


def means(scores: Mapping[ClientId, Mapping[str, float]]) -> dict[str, float]:
    """Each metric's plain mean over the clients; nothing for no clients."""
    names = next(iter(scores.values()), {})
    return {name: fmean(own[name] for own in scores.values()) for name in names}
