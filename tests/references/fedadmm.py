"""Three rounds of FedADMM in plain torch, with the multiplier y that the paper has (Gong, Li, Freris, ICDE 2022).

A client descends f(w) + ⟨y, w − θ⟩ + ρ/2 ‖w − θ‖², then y ← y + ρ (w − θ), and sends
Δ = (w⁺ − w) + (y⁺ − y) / ρ. The server: θ ← θ + η · mean of Δ.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.data.batches import Batch
from references.replayed import CLIENTS, SIZE, Modules, State, batches, load, state_of, train


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
            weights = {f"{p}.{n}": w for p, m in modules.items() for n, w in m.named_parameters()}

            def lagrangian(x: Tensor, label: Tensor, batch: Batch, client: str = client, w: State = weights) -> Tensor:
                rows = batch.weight > 0
                scores = modules["classifier"](modules["features"](x))
                value = F.cross_entropy(scores[rows], label[rows])
                for n in names:
                    way = w[n] - theta[n]
                    value = value + (y[client][n] * way).sum() + rho / 2 * way.square().sum()
                return value

            train(modules, batches(client, number), lagrangian)
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
