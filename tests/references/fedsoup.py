"""FedSoup in plain torch, after Algorithm 1 of Chen and others and the authors' code.

A client of fewer than 100 examples selects on those that it trains on.
"""

import torch

from references import fedavg
from references.plain import CLIENTS, ROUNDS, State, examples, judged, mean


def right(state: State, client: str) -> int:
    x, y = examples(client)
    return int((judged(state, x).argmax(1) == y).sum())


def rounds(start: State, share: float) -> dict:
    pool = {client: {name: torch.zeros_like(leaf) for name, leaf in start.items()} for client in CLIENTS}
    count = dict.fromkeys(CLIENTS, 0)
    own: dict[str, State] = {}
    joined = 0
    for t in range(ROUNDS):
        for client in CLIENTS:
            w, p, n = fedavg.local(client, t, start), pool[client], count[client]
            if t + 1 > share * ROUNDS:
                a = {name: (w[name] + n * p[name]) / (n + 1) for name in w}
                b = {name: (w[name] + start[name] + n * p[name]) / (n + 2) for name in w}
                if right(b, client) > right(a, client):
                    w = b
                    pool[client] = {name: (n * p[name] + start[name]) / (n + 1) for name in w}
                    count[client] = n + 1
                    joined += 1
                else:
                    w = a
            own[client] = w
        start = mean(own)
    assert 0 < joined < len(CLIENTS) * (ROUNDS - 1), "both happen"
    kept = {c: {"params": own[c], "pool": pool[c], "count": torch.tensor(count[c])} for c in CLIENTS}
    return {"server": {"params": start}, "memories": kept}
