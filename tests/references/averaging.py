"""Averaging around FedAvg in plain torch: the mean of the server's models of the last rounds (SWA)."""

import torch

from references import fedavg
from references.plain import CLIENTS, ROUNDS, State, mean


def rounds(start: State, after: int) -> dict:
    """The mean of all models from after this round on."""
    models = []
    for t in range(ROUNDS):
        start = mean({client: fedavg.local(client, t, start) for client in CLIENTS})
        models.append(start)
    average = {name: torch.stack([model[name] for model in models[after:]]).mean(0) for name in start}
    return {"server": {"base": {"params": start}, "average": average, "count": torch.tensor(len(models[after:]))}}
