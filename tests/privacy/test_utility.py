"""What noise does to prototypes alone: runs of FPL on minidigits whose weights are trained and sent without noise.

Class sums are made of the weights that were sent, clipped and noised by what private runs use, and the prototypes that
they give take the place of the others. So these runs promise nothing; they show what the prototypes' noise costs.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor

from protofed import Sgd
from protofed.engine.federation import Federation
from protofed.engine.private import release_rounds
from protofed.engine.state import State
from protofed.engine.training import Training
from protofed.methods.fedavg import FedAvg
from protofed.methods.fpl import FPL
from protofed.privacy import class_sums
from protofed.privacy.account import mu_of, multiplier
from protofed.privacy.class_sums import class_queries, means_of, whole_sums
from protofed.privacy.noise import Query, Simulated
from protofed.privacy.shares import NoiseShare
from protofed.prototypes.class_means import ClassSums
from protofed.runtimes.sequential import Sequential
from protofed.seeds import derive_seed
from protofed.tasks.minidigits import Minidigits

ROUNDS, EPOCHS, LONGEST, CLASSES = 8, 3, 2.0, 10
LEAST, CLIENTS = 9, 12

Made = Callable[[list[tuple[Tensor, Tensor]], tuple[Query, Query], int], ClassSums]
"""Class sums of all, from those of each client, in whole grids and without noise."""


@cache
def task() -> Any:
    return Minidigits(norm="group").build()


def federation(method: Any, seed: int) -> Federation:
    training = Training(rounds=ROUNDS, epochs=EPOCHS, batch_size=32, optimizer=Sgd(lr=0.02, momentum=0.9), seed=seed)
    return Federation(method, task(), training, Sequential())


def accuracy(of: Federation, state: State) -> float:
    """Per cent, the mean over the domains."""
    message = of.method.message_for(state.server, of.ids[0])
    model = of.networks_of(of.ids[0]).model(state.server.params)
    found = []
    with torch.no_grad():
        for data in task().tests.values():
            scores = of.method.predict(model, task().transform.clean(data.inputs(data.index)), message, None)
            found.append(float((scores.argmax(1) == data.labels).float().mean()))
    return 100 * sum(found) / len(found)


@torch.no_grad()
def own_sums(of: Federation, params: Any, queries: tuple[Query, Query]) -> list[tuple[Tensor, Tensor]]:
    found = []
    for client in of.ids:
        data = task().clients[client]
        z = of.networks_of(client).model(params).features(task().transform.clean(data.inputs(data.index)))
        found.append(whole_sums(z, data.labels, *queries))
    return found


def trained(epsilon: float, releases: int, made: Made, seed: int) -> float:
    """FPL with global prototypes that are made of class sums; all of ε is theirs."""
    of = federation(FPL(contrast_with="global", consistent_with="global"), seed)
    m = multiplier(mu_of(epsilon, 1e-5), releases)
    state = of.start()
    queries = class_queries(m, LONGEST, CLASSES, of.server_context(0, "load").feature_dim)
    for number in range(ROUNDS):
        received = state.server
        state = of.advance(state)
        prototypes = received.prototypes
        if number in release_rounds(releases, ROUNDS):
            sums = made(own_sums(of, received.params, queries), queries, derive_seed(seed, number))
            prototypes = of.method.combine(sums, prototypes)  # type: ignore[attr-defined]
        state = replace(state, server=replace(state.server, prototypes=prototypes))
    return accuracy(of, state)


def cleaned(total: Tensor, count: Tensor, query: Query, times: float) -> ClassSums:
    means, is_known = means_of(total, count, query, True, times)
    known = count * is_known
    return ClassSums(means * known[:, None], known)


def without_noise(own: list[tuple[Tensor, Tensor]], queries: tuple[Query, Query], seed: int) -> ClassSums:
    total, count = (sum(parts) * query.grid for parts, query in zip(zip(*own, strict=True), queries, strict=True))
    return ClassSums(total, count)


def in_the_sum(own: list[tuple[Tensor, Tensor]], queries: tuple[Query, Query], seed: int) -> ClassSums:
    """Each client adds a share of noise, of which those that stay at least are enough."""
    sums = []
    for place, query in enumerate(queries):
        share = NoiseShare(query.most, query.multiplier, LEAST, "simulated", False, query.is_whole)
        added = [
            share.added(parts[place].flatten() * query.grid, derive_seed(seed, k, place)).view_as(parts[place])
            for k, parts in enumerate(own)
        ]
        sums.append(torch.stack(added).sum(0))
    return cleaned(sums[0], sums[1], queries[0], sqrt(CLIENTS / LEAST))


def at_each_client(own: list[tuple[Tensor, Tensor]], queries: tuple[Query, Query], seed: int) -> ClassSums:
    """Each client makes prototypes of noised sums of its own, and sends those that are not mostly noise."""
    made = []
    for k, parts in enumerate(own):
        noise = Simulated(derive_seed(seed, k))
        total, count = (query.released(part, noise) for query, part in zip(queries, parts, strict=True))
        one = cleaned(total, count, queries[0], 1.0)
        made.append(ClassSums(one.total / one.count.clamp(min=1)[:, None], (one.count > 0).double()))
    return ClassSums(torch.stack([one.total for one in made]).sum(0), torch.stack([one.count for one in made]).sum(0))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_noise_inside_the_sum_costs_prototypes_little(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """T18: at ε = 3 with two releases. The control: noise at each client in all rounds but the first, of which all
    prototypes are sent."""
    plain = trained(3.0, 2, without_noise, seed)
    assert plain > 60
    assert trained(3.0, 2, in_the_sum, seed) >= plain - 4
    monkeypatch.setattr(class_sums, "ABSTAIN", 1e9)
    assert trained(3.0, ROUNDS - 1, at_each_client, seed) < plain - 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_prototypes_that_are_mostly_noise_are_better_left_out(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """T19: noise at each client, ε = 8, seven releases. The control: κ is ½ in the place of ¼."""
    of = federation(FedAvg(), seed)
    state = of.start()
    for _ in range(ROUNDS):
        state = of.advance(state)
    plain = accuracy(of, state)
    assert trained(8.0, 7, at_each_client, seed) >= plain - 3
    monkeypatch.setattr(class_sums, "ABSTAIN", 0.5)
    assert trained(8.0, 7, at_each_client, seed) < plain - 3
