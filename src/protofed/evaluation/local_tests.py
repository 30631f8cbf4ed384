"""Test sets that look like a client's own data."""

from itertools import accumulate

import torch
from torch import Tensor

from protofed.api.task import ClientId, Task
from protofed.data.batches import Data
from protofed.errors import BadInput
from protofed.seeds import generator


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
