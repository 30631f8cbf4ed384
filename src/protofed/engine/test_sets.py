"""What clients of a simulation are tested on: the test sets of all domains, and one that looks like the client's
data."""

from collections.abc import Callable, Mapping
from itertools import accumulate

import torch
from torch import Tensor

from protofed.api.evaluation import TestSets
from protofed.api.task import ClientId, Task
from protofed.data.batches import Data
from protofed.errors import BadInput
from protofed.seeds import generator


def pooled_tests(tests: Mapping[str, Data]) -> Data | None:
    """All test sets as one, in their order. They are copied only if they do not lie in one tensor already."""
    sets = list(tests.values())
    if not sets:
        return None
    stores = {(id(_store(data.x)), id(_store(data.y))) for data in sets}
    if len(stores) > 1:
        return Data.of(torch.cat([data.inputs(data.index) for data in sets]), torch.cat([data.labels for data in sets]))
    x, y = _store(sets[0].x), _store(sets[0].y)
    return Data(x[:], y[:], torch.cat([data.index + _offset(data.y) for data in sets]))


def _store(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


def _offset(labels: Tensor) -> int:
    """The row of the store that a set's first row is."""
    return 0 if labels._base is None else int(labels.storage_offset())


def client_tests(task: Task, client: ClientId, seed: int, pooled: Data | None) -> TestSets:
    """All that a client's model is tested on, its own test set included."""
    sizes = {name: len(data) for name, data in task.tests.items()}
    site = task.site(client)
    if site.test is None and not task.tests:
        return TestSets()
    rows = local_rows(task, client, seed) if site.test is None else None
    counts = label_counts(site.train, task.num_classes).cpu()
    return TestSets(pooled, sizes, own_rows=rows, own=site.test, train_counts=counts)


def home_tests(task: Task, client: ClientId) -> TestSets:
    """The client's own test set, as that of a domain."""
    own = task.local_tests[client]
    return TestSets(own, {client: len(own)})


def validation_tests(task: Task, client: ClientId) -> TestSets:
    """The examples by which a client's rounds are compared."""
    counts = label_counts(task.clients[client], task.num_classes).cpu()
    return TestSets(own=task.validation[client], train_counts=counts)


APART: dict[str, Callable[[Task, ClientId], TestSets]] = {"validation": validation_tests, "home": home_tests}
"""Kinds of test sets that are no part of `client_tests`."""


def local_rows(task: Task, client: ClientId, seed: int) -> Tensor:
    """Rows of the pooled test sets that make a test set with the client's own label proportions, drawn from the test
    set of its domain, or from all of them.

    It is the largest that the examples allow: class c has round(s p_c) examples, p_c the client's share of the class,
    with the largest whole s for which no class asks for more than there are. A class that cannot be tested at all is
    left out, since it would leave next to nothing of the others.
    """
    if not is_testable(task, client):
        raise BadInput(f"task {task.name}: no test example is of a class that client {client!r} has")
    names, sizes = _pool(task, client), _local_sizes(task, client)
    labels = torch.cat([task.tests[name].labels for name in names])
    order = torch.randperm(len(labels), generator=generator(seed, "local test", client)).to(labels.device)
    of_class = [order[labels[order] == c] for c in range(len(sizes))]
    chosen = torch.cat([rows[:size] for rows, size in zip(of_class, sizes, strict=True)])
    begin = dict(zip(task.tests, accumulate(map(len, task.tests.values()), initial=0), strict=False))
    place = torch.cat([torch.arange(len(task.tests[name])) + begin[name] for name in names]).to(labels.device)
    return place[chosen].sort().values


def is_testable(task: Task, client: ClientId) -> bool:
    """Whether there is a test set of its own for a client."""
    return client in task.local_tests or (bool(task.tests) and any(_local_sizes(task, client)))


def label_counts(data: Data, num_classes: int) -> Tensor:
    """How many examples there are of each class, (C,)."""
    return torch.bincount(data.labels, minlength=num_classes)


def _local_sizes(task: Task, client: ClientId) -> list[int]:
    """How many examples of each class the test set has that is drawn for a client."""
    wanted = label_counts(task.clients[client], task.num_classes)
    available = sum(label_counts(task.tests[name], task.num_classes) for name in _pool(task, client))
    return _sizes(wanted.tolist(), torch.as_tensor(available).tolist())


def _pool(task: Task, client: ClientId) -> list[str]:
    """The test sets that a client's own may be drawn from."""
    return [name for name in sorted(task.tests) if name == task.domain_of.get(client, name)]


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
