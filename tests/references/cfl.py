"""Rounds of clustered federated learning in plain torch (Sattler, Müller, Samek, 2021), with every bipartition tried.

The paper's bipartition is the one whose highest similarity across the cut is lowest; it is found here by trying all.
"""

from itertools import combinations

import torch
import torch.nn.functional as F
from torch import Tensor

from references.plain import CLIENTS, SIZE, Modules, State, batches, load, mean, state_of, train


def rounds(
    modules: Modules, initial: State, num_rounds: int, first: int, stationary: float, progress: float
) -> tuple[list[tuple[str, ...]], dict[str, State]]:
    """The clusters and the clients' weights at the end."""
    names = [f"{part}.{name}" for part, module in modules.items() for name, _ in module.named_parameters()]
    models, clusters = dict.fromkeys(CLIENTS, initial), [CLIENTS]
    for number in range(num_rounds):
        trained, way = {}, {}
        for client in CLIENTS:
            load(modules, models[client])
            train(modules, batches(client, number))
            trained[client] = state_of(modules)
            way[client] = torch.cat([(trained[client][n] - models[client][n]).flatten() for n in names])
        parted: list[tuple[str, ...]] = []
        for members in clusters:
            total = sum(SIZE[client] for client in members)
            together = sum((SIZE[client] / total * way[client] for client in members), torch.zeros(()))
            longest = max(way[client].norm().item() for client in members)
            if number >= first and together.norm() < stationary and longest > progress and len(members) > 2:
                parted += best_cut(members, way)
            else:
                parted.append(members)
        clusters = parted
        for members in clusters:
            state = mean({client: trained[client] for client in members})
            models |= dict.fromkeys(members, state)
    return sorted(clusters), models


def best_cut(members: tuple[str, ...], way: dict[str, Tensor]) -> list[tuple[str, ...]]:
    found = []
    for count in range(1, len(members)):
        for one in combinations(members, count):
            other = tuple(client for client in members if client not in one)
            across = max(F.cosine_similarity(way[a], way[b], dim=0).item() for a in one for b in other)
            found.append((across, [one, other]))
    return min(found)[1]
