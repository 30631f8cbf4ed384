"""GA around FedAvg in plain torch, after the authors' code, and with the centred gaps of losses of the paper.

A client of fewer than 100 examples is judged on those that it trains on. The step falls linearly from its first value.
"""

import torch
import torch.nn.functional as F

from references import fedavg
from references.plain import CLIENTS, ROUNDS, State, examples, judged, mean


def badness(state: State, client: str, errors: bool) -> float:
    x, y = examples(client)
    found = judged(state, x)
    return (found.argmax(1) != y).double().mean().item() if errors else F.cross_entropy(found, y).item()


def rounds(start: State, weights: dict[str, float], step: float, errors: bool, centred: bool) -> dict:
    share = {client: n / sum(weights.values()) for client, n in weights.items()}
    for t in range(ROUNDS):
        trained = {client: fedavg.local(client, t, start) for client in CLIENTS}
        start = mean(trained, share)
        gaps = {c: badness(start, c, errors) - badness(trained[c], c, errors) for c in CLIENTS}
        middle = sum(gaps.values()) / len(gaps) if centred else 0.0
        largest = max(abs(gap - middle) for gap in gaps.values())
        size = step / len(CLIENTS) * (1 - t / ROUNDS)
        moved = {c: min(max(share[c] + size * (gaps[c] - middle) / largest, 0), 1) for c in CLIENTS}
        share = {c: value / sum(moved.values()) for c, value in moved.items()}
    shares = {c: torch.tensor(value, dtype=torch.float64) for c, value in share.items()}
    return {"server": {"base": {"params": start}, "share": shares}}
