"""Three rounds of FedADMM in plain torch, with the multiplier y that the paper has (Gong, Li, Freris, ICDE 2022).

A client descends f(w) + ⟨y, w − θ⟩ + ρ/2 ‖w − θ‖², then y ← y + ρ (w − θ), and sends
Δ = (w⁺ − w) + (y⁺ − y) / ρ. The server: θ ← θ + η · mean of Δ.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.data.batches import Batch
from references.plain import CLIENTS, SIZE, Modules, State, batches, load, state_of, train


def lagrangian(theta: State, y: State, rho: float, modules: Modules, batch: Batch) -> Tensor:
    x, label = batch.x, batch.y
    rows = batch.weight > 0
    value = F.cross_entropy(modules["classifier"](modules["features"](x))[rows], label[rows])
    for part, module in modules.items():
        for name, w in module.named_parameters():
            way = w - theta[f"{part}.{name}"]
            value = value + (y[f"{part}.{name}"] * way).sum() + rho / 2 * way.square().sum()
    return value


def rounds(modules: Modules, initial: State, present: list[tuple[str, ...]], rho: float, step: float = 0.0) -> State:
    """The global weights at the end; with step 0 the server's step size is the share of examples that took part."""
    names = [f"{part}.{name}" for part, module in modules.items() for name, _ in module.named_parameters()]
    theta = dict(initial)
    own = {client: {n: initial[n].clone() for n in names} for client in CLIENTS}
    y = {client: {n: torch.zeros_like(initial[n]) for n in names} for client in CLIENTS}
    for number, clients in enumerate(present):
        total = sum(SIZE[client] for client in clients)
        eta = step or total / sum(SIZE.values())
        delta = {n: torch.zeros_like(leaf) for n, leaf in theta.items()}
        for client in clients:
            load(modules, theta)
            train(modules, batches(client, number), partial(lagrangian, theta, y[client], rho))
            trained = state_of(modules)
            for n, leaf in trained.items():
                change = leaf - theta[n]
                if n in names:
                    before = y[client][n]
                    y[client][n] = before + rho * (leaf - theta[n])
                    change = (leaf - own[client][n]) + (y[client][n] - before) / rho
                    own[client][n] = leaf
                delta[n] += SIZE[client] / total * change
        theta = {n: leaf + (eta if n in names else 1.0) * delta[n] for n, leaf in theta.items()}
    return theta
