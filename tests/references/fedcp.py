"""Rounds of FedCP in plain torch (Zhang and others, KDD 2023), with two Gumbel numbers for each feature.

The softmax over the two parts is taken as the authors do. Its noise is made of the batch's normal draws: the difference
of two Gumbel numbers is all that counts, so that the second may be 0.
"""

import copy
from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofed.data.batches import Batch
from references.plain import CLIENTS, Modules, State, batches, load, mean, state_of, train

DIM = 8


def modules_of(network: Mapping[str, nn.Module]) -> Modules:
    policy = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.LayerNorm(2 * DIM), nn.ReLU())
    return {**network, "shared_head": copy.deepcopy(network["classifier"]), "policy": policy}


def both(modules: Modules, z: Tensor, context: Tensor, noise: Tensor) -> Tensor:
    parts = modules["policy"](z * context.expand_as(z)).view(len(z), 2, DIM)
    shares = (parts + torch.stack([noise, torch.zeros_like(noise)], 1)).softmax(1)
    own, shared = shares[:, 0], shares[:, 1]
    return modules["classifier"](own * z) + modules["shared_head"](shared * z)


def mmd(x: Tensor, y: Tensor) -> Tensor:
    total = torch.zeros(())
    for a, b, sign in ((x, x, 1), (y, y, 1), (x, y, -2)):
        squares = (a[:, None] - b[None]).square().sum(-1)
        for bandwidth in (10, 15, 20, 50):
            total = total + sign * torch.exp(-0.5 * squares / bandwidth).mean()
    return total


def objective(received: nn.Module, context: Tensor, lam: float, modules: Modules, batch: Batch) -> Tensor:
    x, y = batch.x, batch.y
    z, rows = modules["features"](x), batch.weight > 0
    uniform = torch.special.ndtr(batch.normal(*z.shape).double())
    noise = (uniform / (1 - uniform)).log().float()
    scores = both(modules, z, context, noise)
    with torch.no_grad():
        frozen = received(x)
    return F.cross_entropy(scores[rows], y[rows]) + lam * mmd(z[rows], frozen[rows])


def context_of(head: State) -> Tensor:
    weight = head["classifier.weight"].sum(0)
    return weight / weight.norm()


def rounds(
    network: Mapping[str, nn.Module], initial: State, num_rounds: int, lam: float
) -> tuple[State, dict[str, State]]:
    """The shared weights and the clients' heads at the end."""
    modules = modules_of(network)
    heads = {c: {n: leaf for n, leaf in initial.items() if n.startswith("classifier")} for c in CLIENTS}
    shared = {n: leaf for n, leaf in initial.items() if not n.startswith("classifier")}
    for number in range(num_rounds):
        trained = {}
        for client in CLIENTS:
            load(modules, {**shared, **heads[client]})
            received = copy.deepcopy(modules["features"])
            loss = partial(objective, received, context_of(heads[client]), lam)
            train(modules, batches(client, number), loss, ("features", "classifier", "policy"))
            state = state_of(modules)
            heads[client] = {n: state[n] for n in heads[client]}
            trained[client] = {n: state[n] for n in shared}
            for n in ("weight", "bias"):
                trained[client][f"shared_head.{n}"] = 0.5 * state[f"classifier.{n}"] + 0.5 * state[f"shared_head.{n}"]
        shared = mean(trained)
    return shared, heads


def scores(network: Mapping[str, nn.Module], shared: State, head: State, x: Tensor) -> Tensor:
    modules = modules_of(network)
    load(modules, {**shared, **head}, training=False)
    with torch.no_grad():
        z = modules["features"](x)
        return both(modules, z, context_of(head), torch.zeros_like(z))
