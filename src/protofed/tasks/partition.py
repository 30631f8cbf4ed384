"""Rules that divide labelled examples among clients, and a client's rows into training and test sets.

Every rule is a pure function of labels (N,), int64, and a seed. It returns rows, int64, in ascending order, and gives
no row twice. Draws depend on the seed only. So divide each domain, and each client's rows, with its own seed
(`derive_seed(seed, name)`); otherwise domains of equal size get the same rows. The numbers of the classes matter to
`shards` only, which sorts by them. Classes are those that occur in the labels.

The rules are those of FPL (Huang et al., CVPR 2023) for domains; of NIID-Bench (Li et al., ICDE 2022) for label skew;
of McMahan et al. (AISTATS 2017) for shards; and of pFedCSPC (TNNLS 2024) for test sets.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import accumulate
from math import floor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protofed.errors import BadInput
from protofed.seeds import derive_seed, generator

ATTEMPTS = 1000
"""Number of draws of `dirichlet` before it gives up."""
LEAST, MOST = 1e-3, 1e6
"""Concentrations that floats can represent. Below, each client has one class; above, all clients are the same."""
NOBODY = -1


@dataclass(frozen=True)
class Divided:
    """A client's rows for training, validation and testing."""

    train: Tensor
    validation: Tensor
    test: Tensor


def portion(fraction: float, count: int) -> int:
    """`fraction` of `count`, rounded down: FPL's size of a client.

    The fraction is taken as the decimal that was written: 0.29 of 100 is 29, although floats multiply to 28.999….
    """
    if not 0 < fraction <= 1:
        raise BadInput(f"a client cannot have {fraction} of a domain; give a fraction above 0 and at most 1")
    return floor(_exact(fraction) * count)


def allotted(labels: Tensor, sizes: Mapping[str, int], seed: int, every_class: bool = True) -> dict[str, Tensor]:
    """FPL's allocation within a domain: disjoint random rows, `sizes` of them for each client.

    With `every_class`, a client that lacks a class gets a random row of it. The row is unused, or comes from a client
    that has at least two. In exchange, the client gives up a random row of a class of which it has at least two.
    In the published code, this may give one image to two clients; here it never does. Clients are served in the order
    of their names.
    """
    classes, names = _classes(labels), sorted(sizes)
    _check_sizes(labels, sizes)
    order = torch.randperm(len(labels), generator=generator(seed, "allotted"))
    wanted = torch.tensor([sizes[name] for name in names])
    owner = torch.full_like(labels, NOBODY)
    owner[order[: int(wanted.sum())]] = torch.arange(len(names)).repeat_interleave(wanted)
    if every_class:
        _check_classes(labels, sizes)
        for k, name in enumerate(names):
            for c in sorted(set(classes.tolist()) - set(classes[owner == k].tolist())):
                owner = exchanged(owner, classes, k, c, generator(seed, "missing class", name, c))
    return {name: (owner == k).nonzero().flatten() for k, name in enumerate(names)}


def exchanged(owner: Tensor, classes: Tensor, client: int, missing: int, draws: torch.Generator) -> Tensor:
    """The owners (N,) after `client` has exchanged a spare row for a row of the class that it lacks.

    Such rows exist if the client has at least as many rows as there are classes, and the class at least as many rows as
    there are clients. Then the client has two rows of another class; and the class has an unused row, or some other
    client has two of it.
    """
    is_missing, is_clients = classes == missing, owner == client
    free = is_missing & (owner == NOBODY)
    # One more entry than there are clients: the index −1 of NOBODY finds the last entry, which is 0.
    held = owner[is_missing & ~free].bincount(minlength=int(owner.max()) + 2)
    lent = is_missing & (held[owner] >= 2)
    spare = is_clients & (classes[is_clients].bincount(minlength=int(classes.max()) + 1)[classes] >= 2)
    taken, given = _one(free if free.any() else lent, draws), _one(spare, draws)
    after = owner.clone()
    after[taken], after[given] = client, owner[taken]
    return after


def dirichlet(
    labels: Tensor, num_clients: int, concentration: float, seed: int, minimum: int = 10, minimum_classes: int = 2
) -> tuple[Tensor, ...]:
    """Label skew: each class is divided in proportions drawn from Dir(β). A lower `concentration` β gives more skew.

    A client that has its even share of all rows, N / `num_clients`, gets nothing of later classes. Draws are repeated
    until each client has `minimum` rows and `minimum_classes` classes. All rows are used. (The published code draws at
    most three times and then moves rows.)
    """
    classes = _classes(labels)
    counts = classes.bincount().tolist()
    _check_dirichlet(counts, num_clients, concentration, minimum, minimum_classes)
    for attempt in range(ATTEMPTS):
        table = skewed(counts, num_clients, partial(_proportions, concentration, seed, attempt))
        if table.sum(1).min() >= minimum and (table > 0).sum(1).min() >= minimum_classes:
            return _dealt(classes, torch.from_numpy(table), generator(seed, "dirichlet", "rows"))[:-1]
    raise BadInput(
        f"none of {ATTEMPTS} draws from Dir({concentration}) gave each of {num_clients} clients at least "
        f"{minimum} examples and {minimum_classes} classes: raise the concentration, take fewer clients, or lower "
        "minimum or minimum_classes"
    )


def skewed(
    counts: Sequence[int], num_clients: int, proportions: Callable[[int, int], NDArray[np.float64]]
) -> NDArray[np.int64]:
    """Number of rows of each class for each client, (clients, classes). `proportions(c, n)` divides class c among n
    clients: those with less than their even share so far.

    Drawing for these clients only has the same distribution as drawing for all, setting the others to zero and
    renormalising; but it cannot fail when the remaining proportions round to zero.
    """
    table = np.zeros((num_clients, len(counts)), dtype=np.int64)
    for c, count in enumerate(counts):
        has_room = table.sum(1) * num_clients < sum(counts)
        table[has_room, c] = cut(count, proportions(c, int(has_room.sum())))
    return table


def cut(count: int, proportions: NDArray[np.float64]) -> NDArray[np.int64]:
    """Sizes of the pieces when `count` rows are cut at the cumulative proportions, rounded down. The last piece has
    the rest."""
    ends = np.floor(np.cumsum(proportions) * count).astype(np.int64)
    ends[-1] = count
    return np.diff(ends, prepend=0)


def shards(labels: Tensor, num_clients: int, shards_per_client: int, seed: int) -> tuple[Tensor, ...]:
    """The pathological split: rows are sorted by label and cut into equal shards, which are dealt out at random.

    Within a label, rows keep their order. If the rows do not divide evenly, the last shards have one more row each.
    """
    _check_labels(labels)
    num_shards = num_clients * shards_per_client
    if num_clients < 1 or shards_per_client < 1 or num_shards > len(labels):
        raise BadInput(
            f"{len(labels)} examples cannot be dealt to {num_clients} clients in {shards_per_client} shards each: "
            "ask for at least one shard of at least one example for every client"
        )
    size, longer = divmod(len(labels), num_shards)
    sizes = [size] * (num_shards - longer) + [size + 1] * longer
    cuts = _pieces(labels.argsort(stable=True), sizes)
    hands = torch.randperm(num_shards, generator=generator(seed, "shards")).view(num_clients, -1).tolist()
    return tuple(torch.cat([cuts[shard] for shard in hand]).sort().values for hand in hands)


def by_site(sites: Sequence[str]) -> dict[str, Tensor]:
    """The rows of each site. Sites are in the order of their names."""
    rows: dict[str, list[int]] = {site: [] for site in sorted(set(sites))}
    for row, site in enumerate(sites):
        if not site.strip():
            raise BadInput(f"row {row} has no site; name one, or leave out the row")
        rows[site].append(row)
    return {site: torch.tensor(site_rows) for site, site_rows in rows.items()}


def split(labels: Tensor, test: float, seed: int, validation: float = 0.0) -> Divided:
    """A stratified split of a client's rows. `test` and `validation` are fractions; training gets the rest.

    The sizes of the parts, in all and of each class, differ from the exact fractions by less than one row. Largest
    remainders decide which classes are rounded up. Every class keeps at least one row for training, so the other parts
    are smaller if many classes have only one or two rows.
    """
    if not (test >= 0 and validation >= 0 and test + validation < 1):
        raise BadInput(f"test {test} and validation {validation} must be fractions of 0 or more with a sum below 1")
    classes, ties = _classes(labels), generator(seed, "split", "ties")
    counts = classes.bincount().tolist()
    num_test = _nearest(_exact(test) * len(labels))
    num_validation = _nearest(_exact(validation) * len(labels))
    tests = apportioned(num_test, [_exact(test) * n for n in counts], [n - 1 for n in counts], ties)
    spare = [n - taken - 1 for n, taken in zip(counts, tests, strict=True)]
    validations = apportioned(num_validation, [_exact(validation) * n for n in counts], spare, ties)
    tested, validated, trained = _dealt(classes, torch.tensor([tests, validations]), generator(seed, "split", "rows"))
    return Divided(trained, validated, tested)


def proportional(train_labels: Mapping[str, Tensor], test_labels: Tensor, seed: int) -> dict[str, Tensor]:
    """Divides a test set among clients, each class in proportion to the clients' training rows of that class.

    The parts are disjoint, and cover all classes that a client has. Fractions are rounded by largest remainders. This
    is pFedCSPC's division. `engine.test_sets.local_rows` differs: it gives each client the largest set with its
    own label proportions, so that many clients may share a row.
    """
    classes, names = _classes(test_labels), sorted(train_labels)
    if not names:
        raise BadInput("there are no clients to divide a test set among")
    columns = []
    for c, count in enumerate(classes.bincount().tolist()):
        label = test_labels[classes == c][0]
        train_counts = [int((train_labels[name] == label).sum()) for name in names]
        shares = [Fraction(count * train_count, max(sum(train_counts), 1)) for train_count in train_counts]
        # The word in the seed is the former name of this function. Another word would draw other rows.
        columns.append(apportioned(count, shares, [count] * len(names), generator(seed, "alike", "ties", c)))
    rows = _dealt(classes, torch.tensor(columns).T, generator(seed, "alike", "rows"))
    return dict(zip(names, rows[:-1], strict=True))


def apportioned(total: int, shares: Sequence[Fraction], most: Sequence[int], ties: torch.Generator) -> list[int]:
    """Rounds the shares so that their sum is `total`, by largest remainders, each at most `most`. Ties are random."""
    sizes = [min(floor(share), top) for share, top in zip(shares, most, strict=True)]
    order = torch.randperm(len(shares), generator=ties).tolist()
    by_remainder = sorted(order, key=lambda i: shares[i] % 1, reverse=True)
    can_grow = [i for i in by_remainder if sizes[i] < min(shares[i], most[i])]
    for i in can_grow[: total - sum(sizes)]:
        sizes[i] += 1
    return sizes


def _dealt(classes: Tensor, table: Tensor, draws: torch.Generator) -> tuple[Tensor, ...]:
    """Random rows: `table[k, c]` rows of class c for holder k. The last entry has the rows that are left."""
    rest = classes.bincount() - table.sum(0)
    order = torch.randperm(len(classes), generator=draws)
    by_class = order[classes[order].argsort(stable=True)]
    full = torch.cat([table, rest[None]])  # (K + 1, C)
    pieces = _pieces(by_class, full.T.flatten().tolist())
    return tuple(torch.cat(pieces[k :: len(full)]).sort().values for k in range(len(full)))


def _pieces(rows: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return list(rows.tensor_split(list(accumulate(sizes))[:-1]))


def _proportions(concentration: float, seed: int, attempt: int, label: int, num: int) -> NDArray[np.float64]:
    # torch draws from a Dirichlet distribution with its global generator only.
    draws = np.random.Generator(np.random.PCG64(derive_seed(seed, "dirichlet", attempt, label)))
    return draws.dirichlet(np.full(num, concentration))


def _classes(labels: Tensor) -> Tensor:
    """The class of each row as 0, 1, …, numbered by first appearance."""
    _check_labels(labels)
    _, first, by_value = np.unique(labels.numpy(), return_index=True, return_inverse=True)
    return torch.from_numpy(first.argsort().argsort()[by_value])


def _one(is_candidate: Tensor, draws: torch.Generator) -> Tensor:
    rows = is_candidate.nonzero().flatten()
    return rows[torch.randint(len(rows), (), generator=draws)]


def _exact(fraction: float) -> Fraction:
    return Fraction(str(fraction))


def _nearest(number: Fraction) -> int:
    """The nearest integer; halves are rounded up."""
    return floor(number + Fraction(1, 2))


def _check_labels(labels: Tensor) -> None:
    if labels.dim() != 1 or labels.dtype != torch.int64:
        raise BadInput(
            f"labels have shape {tuple(labels.shape)} and type {labels.dtype}; give one torch.int64 per example, (N,)"
        )
    if not len(labels):
        raise BadInput("there are no examples to divide")


def _check_sizes(labels: Tensor, sizes: Mapping[str, int]) -> None:
    if not sizes or min(sizes.values()) < 1:
        raise BadInput(
            f"the clients' sizes are {dict(sizes)}; name at least one client, and give each at least one example"
        )
    missing = sum(sizes.values()) - len(labels)
    if missing > 0:
        raise BadInput(
            f"{len(sizes)} clients need {sum(sizes.values())} examples of {len(labels)}: {missing} are missing. "
            "Give them a smaller fraction, take fewer clients, or get more examples"
        )


def _check_classes(labels: Tensor, sizes: Mapping[str, int]) -> None:
    values, counts = np.unique(labels.numpy(), return_counts=True)
    smallest = min(sizes, key=lambda name: (sizes[name], name))
    if sizes[smallest] < len(values):
        raise BadInput(
            f"client {smallest!r} cannot have all {len(values)} classes with {sizes[smallest]} examples: "
            "give it more, or set every_class to False"
        )
    if counts.min() < len(sizes):
        raise BadInput(
            f"class {values[counts.argmin()]} has {counts.min()} examples, but {len(sizes)} clients need one each: "
            "take fewer clients, or set every_class to False"
        )


def _check_dirichlet(
    counts: Sequence[int], num_clients: int, concentration: float, minimum: int, minimum_classes: int
) -> None:
    if num_clients < 1:
        raise BadInput(f"the number of clients is {num_clients}; give at least 1")
    if not LEAST <= concentration <= MOST:
        raise BadInput(f"the concentration is {concentration}; give a number from {LEAST} to {MOST}")
    if num_clients * max(minimum, minimum_classes) > sum(counts) or minimum_classes > len(counts):
        raise BadInput(
            f"{sum(counts)} examples of {len(counts)} classes cannot give each of {num_clients} clients {minimum} "
            f"examples and {minimum_classes} classes: take fewer clients, or lower minimum or minimum_classes"
        )
