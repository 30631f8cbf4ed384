"""Rounds of GPFL in plain torch (Zhang and others, ICCV 2023)."""

from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofed.data.batches import Batch
from protofed.testing.federations import TASK
from references.plain import CLIENTS, SIZE, Modules, State, batches, load, mean, state_of, train

CLASSES, DIM = 4, 8


class Valve(nn.Module):
    """f ← ReLU((γ + 1) · f + β), γ and β from a condition by a layer, ReLU and LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.LayerNorm(DIM))
        self.beta = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.LayerNorm(DIM))

    def forward(self, features: Tensor, condition: Tensor) -> Tensor:
        out = torch.multiply(features, self.gamma(condition) + 1)
        return torch.relu(torch.add(out, self.beta(condition)))


def shares(client: str) -> Tensor:
    labels = TASK.clients[client].labels.tolist()
    return torch.tensor([labels.count(c) / SIZE[client] for c in range(CLASSES)])


def objective(frozen: Tensor, share: Tensor, lam: float, mu: float, modules: Modules, batch: Batch) -> Tensor:
    x, y = batch.x, batch.y
    generic, personal = frozen.sum(0) / CLASSES, sum((share[c] * frozen[c] for c in range(CLASSES)), torch.zeros(DIM))
    features = modules["features"](x)
    table = modules["categories"](torch.arange(CLASSES))
    rows = batch.weight > 0
    y, own = y[rows], modules["classifier"](modules["valve"](features, personal))[rows]
    shared = modules["valve"](features, generic)[rows]
    value = F.cross_entropy(own, y)
    value = value + F.cross_entropy(F.cosine_similarity(shared[:, None], table[None], dim=-1), y)
    value = value + lam * (shared - frozen[y]).square().sum(-1).sqrt().mean()
    decayed = [*modules["valve"].parameters(), *modules["categories"].parameters()]
    return value + sum((mu / 2 * p.square().sum() for p in decayed), torch.zeros(()))


def rounds(
    network: Mapping[str, nn.Module], initial: State, num_rounds: int, lam: float, mu: float
) -> tuple[State, dict[str, State]]:
    """The shared weights and the clients' classifiers at the end."""
    modules: Modules = {**network, "valve": Valve(), "categories": nn.Embedding(CLASSES, DIM)}
    heads = {c: {n: leaf for n, leaf in initial.items() if n.startswith("classifier")} for c in CLIENTS}
    shared = {n: leaf for n, leaf in initial.items() if not n.startswith("classifier")}
    for number in range(num_rounds):
        trained = {}
        for client in CLIENTS:
            load(modules, {**shared, **heads[client]})
            frozen = shared["categories.weight"]
            train(modules, batches(client, number), partial(objective, frozen, shares(client), lam, mu))
            state = state_of(modules)
            heads[client] = {n: state[n] for n in heads[client]}
            trained[client] = {n: state[n] for n in shared}
        shared = mean(trained)
    return shared, heads


def scores(network: Mapping[str, nn.Module], shared: State, head: State, client: str, x: Tensor) -> Tensor:
    modules: Modules = {**network, "valve": Valve(), "categories": nn.Embedding(CLASSES, DIM)}
    load(modules, {**shared, **head}, training=False)
    with torch.no_grad():
        return modules["classifier"](
            modules["valve"](modules["features"](x), shares(client) @ shared["categories.weight"])
        )
