"""Who was trained on and who was not: the examples by which an audit judges attacks."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from protofed.api.task import ClientId, Task
from protofed.audit.statistics import matched
from protofed.data.batches import Data
from protofed.seeds import derive_seed


@dataclass(frozen=True)
class Examples:
    """As many members as others, and as many of each class, so that neither sizes nor labels tell them apart."""

    members: Data
    """That a client trained on."""
    others: Data
    """That it did not."""
    population: Data
    """More that nobody trained on, disjoint from the others: what an attacker knows of such data."""
    is_same_source: bool
    """Whether the others are the client's own. Else attacks may tell sources apart, not members."""


def examples_of(task: Task, client: ClientId, seed: int = 0) -> Examples | None:
    """Of one client; None if nothing is left to compare."""
    train, others, population = task.clients[client], task.local_tests.get(client), known_tests(task, client)
    is_own = others is not None
    if others is None:
        if population is None:
            return None
        order = np.random.default_rng(derive_seed(seed, "population", client)).permutation(len(population))
        half = len(order) // 2
        others, population = (population.rows(torch.from_numpy(np.sort(o))) for o in (order[:half], order[half:]))
    elif population is None:
        order = np.random.default_rng(derive_seed(seed, "population", client)).permutation(len(others))
        half = len(order) // 2
        population, others = (others.rows(torch.from_numpy(np.sort(o))) for o in (order[:half], order[half:]))
    # guard: audit-matches-labels
    here, there = matched(train.labels, others.labels, derive_seed(seed, "matched", client))
    if not len(here):
        return None
    members, outside = train.rows(torch.from_numpy(here)), others.rows(torch.from_numpy(there))
    return Examples(members, outside, population, is_own)


def known_tests(task: Task, client: ClientId) -> Data | None:
    """The test set of the client's domain, or all of them."""
    own = task.domain_of.get(client)
    names = [own] if own else [*task.tests]
    if not names:
        return None
    sets = [task.tests[name] for name in names]
    if len(sets) == 1:
        return sets[0]
    inputs: Tensor = torch.cat([one.inputs(one.index) for one in sets])
    return Data.of(inputs, torch.cat([one.labels for one in sets]))
