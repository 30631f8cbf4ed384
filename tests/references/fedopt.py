"""FedOPT in plain torch, after Algorithm 2 of Reddi and others, and FedAvgM after Hsu, Qi and Brown."""

import torch

from references import fedavg
from references.plain import CLIENTS, ROUNDS, State, mean, parameters


def rounds(start: State, kind: str, lr: float, beta1: float, beta2: float, tau: float) -> dict:
    names, x = parameters(start), start
    m = {name: torch.zeros_like(start[name]) for name in names}
    v = {name: torch.full_like(start[name], tau**2) for name in names}
    for t in range(ROUNDS):
        averaged = mean({client: fedavg.local(client, t, x) for client in CLIENTS})
        for name in names:
            delta = averaged[name] - x[name]
            if kind == "momentum":
                m[name] = beta1 * m[name] + delta
                averaged[name] = x[name] + lr * m[name]
                continue
            first = 0 if kind == "adagrad" else beta1
            m[name] = first * m[name] + (1 - first) * delta
            if kind == "adagrad":
                v[name] = v[name] + delta**2
            elif kind == "adam":
                v[name] = beta2 * v[name] + (1 - beta2) * delta**2
            else:
                v[name] = v[name] - (1 - beta2) * delta**2 * torch.sign(v[name] - delta**2)
            averaged[name] = x[name] + lr * m[name] / (torch.sqrt(v[name]) + tau)
        x = averaged
    return {"server": {"params": x, "first": m, "second": v}}
