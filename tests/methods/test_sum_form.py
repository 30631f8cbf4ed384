"""Which servers need sums over clients alone, found out by what they do and compared with what they say.

Two clients of different domains exchange mass: what one's upload gains, the other's loses. Both have equally many
examples of each class, so that every sum over clients stays as it was, whatever its weights. A server that reads sums
cannot notice. Every pair whose counts are equal is tried.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from doubles import sum_of
from methods.conformance import CLASSES, FEATURES, after, federation, small_task
from protofed import tree
from protofed.api.contexts import ServerContext
from protofed.api.method import Method
from protofed.api.roles import Count, Prototype, roles
from protofed.engine.round import RoundClients
from protofed.methods import METHODS
from protofed.methods.families import SumMethod
from protofed.prototypes.gaussians import ClassGaussians, class_gaussians, moments, no_gaussians, of_moments, pooled
from protofed.seeds import generator
from protofed.tree import Tree

TOLERANCE = 1e-5
LEAST_SIZE = 0.1
"""Of what a change is a part of: differences of weights are small, and as inexact as the weights."""
SETTINGS: dict[str, dict[str, Any]] = {
    "fpl, global": {"contrast_with": "global", "consistent_with": "global"},
    "fpl, half global": {"contrast_with": "global"},
    "fpl_sums, two clusters": {"num_clusters": 2},
    "fedpc_sums, two clusters": {"num_clusters": 2, "least_clients": 1},
    "fedseproto, prototypes": {"shares": "prototypes"},
    "fedproc, uniform": {"prototype_weighting": "uniform"},
    "fedmd": {"alignment_size": 8},
    "cfl": {"first_round": 0, "stationary_norm": 1e9, "progress_norm": 0.0},
}
CASES = sorted({*METHODS, *SETTINGS})
NOT_SUMS = {
    *("cfl", "fedamp", "feddistill", "fedfomo", "fedgen", "fedgh", "fedpac", "fedpc", "fedpcl", "fedplvm", "fedtgp"),
    *("fpl", "fpl, half global", "ga", "grace", "mp_fedcl", "pfedcspc"),
}
TASK = small_task({name: [0, 1, 2, 3, 0, 1, 2, 3] for name in ("ann", "bob", "cyd", "dan", "eve")})


def method_of(case: str) -> Method[Any, Any, Any, Any]:
    return METHODS[case.partition(",")[0]](**SETTINGS.get(case, {}))


class Replayed:
    """The clients of a round, who say again what they said once; two of them may have exchanged mass."""

    summing = None

    def __init__(self, clients: RoundClients) -> None:
        self._clients, self.ids = clients, clients.ids
        self._said: list[dict[str, Tree]] = []
        self._call = 0
        self.pair: tuple[str, str] | None = None

    @property
    def server(self) -> ServerContext:
        """As it was before anything was drawn from it."""
        return replace(self._clients.server)

    def again(self, pair: tuple[str, str] | None) -> "Replayed":
        self.pair, self._call = pair, 0
        return self

    def run(self, step: Any, message_for: Any, like: Any, group: Any = None) -> Iterator[tuple[str, Tree]]:
        if self._call == len(self._said):
            self._said.append(dict(self._clients.run(step, message_for, like, group)))
        said = dict(self._said[self._call])
        self._call += 1
        if self.pair is not None:
            one, other = self.pair
            said[one], said[other] = exchanged(said[one], said[other], self.alike(one, other))
        yield from said.items()

    def alike(self, a: str, b: str) -> Tensor:
        """The classes in which all sums of a round treat both alike, (C,): none if they count differently."""
        return torch.stack([same_counts(said[a], said[b]) for said in self._said]).all(0)

    def pairs(self) -> list[tuple[str, str]]:
        return [(a, b) for a, b in combinations(self.ids, 2) if self.alike(a, b).any()]


def counts(upload: Tree) -> list[Tensor]:
    role_of, leaves = roles(upload), tree.named_leaves(upload)
    return [leaf for path, leaf in leaves.items() if isinstance(role_of.get(path), Count)]


def same_counts(a: Tree, b: Tree) -> Tensor:
    """By class where clusters of each class are counted, (S, J, C), else for all classes at once."""
    found = torch.ones(CLASSES, dtype=torch.bool)
    for x, y in zip(counts(a), counts(b), strict=True):
        found &= (x == y).flatten(0, 1).all(0) if x.dim() == 3 else torch.equal(x, y)
    return found


def exchanged(a: Tree, b: Tree, classes: Tensor) -> tuple[Tree, Tree]:
    """Both uploads after one has given the other some of all of its numbers, as much as these are large."""
    draws, role_of, gained, lost = generator(0, "mass"), roles(a), [], []
    for (path, x), y in zip(tree.named_leaves(a).items(), tree.leaves(b), strict=True):
        mass = torch.zeros_like(x)
        if x.is_floating_point() and not isinstance(role_of.get(path), Count):
            mass = torch.randn(x.shape, generator=draws, dtype=x.dtype) * (x - y).abs().mean()
            if isinstance(role_of.get(path), Prototype):
                mass = mass * ((x != 0).any(-1) & (y != 0).any(-1) & rows(classes, x))[..., None]
        gained.append(x + mass)
        lost.append(y - mass)
    return tree.with_leaves(a, gained), tree.with_leaves(b, lost)


def rows(classes: Tensor, prototypes: Tensor) -> Tensor:
    """Of these classes, which may have several prototypes each, one after another."""
    found = classes.repeat_interleave(len(prototypes) // len(classes))
    return found.view(-1, *[1] * (prototypes.dim() - 2))


def noticed(case: str) -> float:
    """By how much the server's state changes, in parts of the largest number of a leaf; the most of all pairs."""
    method = method_of(case)
    of = federation(method, TASK)
    state = after(1, of)
    clients = Replayed(RoundClients(of, state, of.ids, "round"))
    plain = of.method.round(state.server, clients)
    pairs = clients.pairs()
    assert pairs, "no two clients have the same counts"
    return max(difference(of.method.round(state.server, clients.again(pair)), plain) for pair in pairs)


def difference(a: Tree, b: Tree) -> float:
    found = [0.0]
    one, other = tree.named_leaves(a), tree.named_leaves(b)
    for path, x in one.items():
        y = other[path]
        if x.shape != y.shape:
            return float("inf")
        if x.numel():
            gap, size = (x.double() - y.double()).abs().max().item(), y.double().abs().max().item()
            found.append(gap / max(size, LEAST_SIZE))
    return max(found)


@pytest.mark.parametrize("case", CASES)
def test_a_server_notices_exchanged_mass_unless_it_says_that_it_reads_sums(case: str) -> None:
    """T13."""
    found = noticed(case)
    if method_of(case).sums:
        assert found <= TOLERANCE
        assert isinstance(method_of(case), SumMethod)
    else:
        assert found > TOLERANCE


def test_these_servers_need_more_than_sums() -> None:
    """A method joins or leaves this list on purpose."""
    assert {case for case in CASES if not method_of(case).sums} == NOT_SUMS


def test_more_than_exchanged_mass_is_noticed_by_a_sum() -> None:
    """Without this, a server that reads nothing would pass."""
    of = federation(method_of("fedavg"), TASK)
    state = after(1, of)
    clients = Replayed(RoundClients(of, state, of.ids, "round"))
    plain = of.method.round(state.server, clients)
    [said] = clients._said
    said["ann"], _ = exchanged(said["ann"], said["bob"], torch.ones(CLASSES, dtype=torch.bool))
    assert difference(of.method.round(state.server, clients.again(None)), plain) > 1e-3


def test_gaussians_of_sums_are_those_of_all_examples_together() -> None:
    """What CCVR asks after the last round, against one computation over all features."""
    draws = generator(1, "features")
    clients = [5.0 + torch.randn(n, FEATURES, generator=draws) for n in (9, 4, 1, 0)]
    labels = [torch.arange(len(z)) % 2 for z in clients]
    sent = [class_gaussians(z, y, 3) for z, y in zip(clients, labels, strict=True)]
    found = of_moments(sum_of(map(moments, sent)))
    z, y = torch.cat(clients).double(), torch.cat(labels)
    assert found.count.tolist() == [8, 6, 0]
    for c in range(2):
        torch.testing.assert_close(found.mean[c], z[y == c].mean(0), atol=1e-6, rtol=0)
        torch.testing.assert_close(found.covariance[c], torch.cov(z[y == c].T), atol=1e-5, rtol=0)
    assert not found.mean[2].any()
    assert not found.covariance[2].any()
    one_by_one = pooled(enumerate_by_name(sent), no_gaussians(3, FEATURES))
    assert difference(found, one_by_one) < 1e-12


def enumerate_by_name(sent: list[ClassGaussians]) -> list[tuple[str, ClassGaussians]]:
    return [(f"c{k}", gaussians) for k, gaussians in enumerate(sent)]
