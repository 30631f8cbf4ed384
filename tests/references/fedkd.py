"""Rounds of FedKD in plain torch and NumPy (Wu and others, Nature Communications 2022)."""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofed.data.batches import Batch
from references.plain import CLIENTS, Modules, State, batches, load, mean, state_of, train

DIM = 8


def objective(least: float, modules: Modules, batch: Batch) -> Tensor:
    x, y = batch.x, batch.y
    rows = batch.weight > 0
    h_t, h_s = modules["features"](x)[rows], modules["mentee_features"](x)[rows]
    t, s = modules["classifier"](h_t), modules["mentee_classifier"](h_s)
    task_t, task_s = F.cross_entropy(t, y[rows]), F.cross_entropy(s, y[rows])
    denominator = torch.maximum(task_t + task_s, torch.tensor(least))
    log_t, log_s = F.log_softmax(t, 1), F.log_softmax(s, 1)
    distil_t = F.kl_div(log_t, log_s.exp(), reduction="batchmean") / denominator
    distil_s = F.kl_div(log_s, log_t.exp(), reduction="batchmean") / denominator
    hidden = F.mse_loss(h_t, modules["adapter"](h_s)) / denominator
    return (task_t + distil_t + hidden) + (task_s + distil_s + hidden)


def compressed(update: Tensor, energy: float) -> Tensor:
    if update.ndim == 1:
        return update
    u, sigma, v = np.linalg.svd(update.reshape(len(update), -1).numpy().astype(np.float64), full_matrices=False)
    for count in range(1, len(sigma) + 1):
        if (sigma[:count] ** 2).sum() >= energy * (sigma**2).sum():
            break
    low_rank = sum(sigma[k] * np.outer(u[:, k], v[k]) for k in range(count))
    return torch.from_numpy(low_rank).float().reshape(update.shape)


def rounds(
    network: Callable[[], Mapping[str, nn.Module]],
    initial: State,
    num_rounds: int,
    energies: tuple[float, float],
    least: float,
) -> tuple[State, dict[str, State]]:
    """The mentee and what clients keep at the end."""
    modules: Modules = {
        **network(),
        **{f"mentee_{part}": module for part, module in network().items()},
        "adapter": nn.Linear(DIM, DIM, bias=False),
    }
    names = {f"{part}.{name}" for part, module in modules.items() for name, _ in module.named_parameters()}
    mentee = {n: leaf for n, leaf in initial.items() if n.startswith("mentee_")}
    kept = {client: {n: leaf for n, leaf in initial.items() if n not in mentee} for client in CLIENTS}
    for number in range(num_rounds):
        energy = energies[0] + (number + 1) / num_rounds * (energies[1] - energies[0])

        def sent(before: State, after: State, energy: float = energy) -> State:
            return {n: b + compressed(after[n] - b, energy) if n in names else after[n] for n, b in before.items()}

        uploads = {}
        for client in CLIENTS:
            load(modules, {**mentee, **kept[client]})
            train(modules, batches(client, number), partial(objective, least))
            state = state_of(modules)
            kept[client] = {n: state[n] for n in kept[client]}
            uploads[client] = sent(mentee, state)
        mentee = sent(mentee, mean(uploads))
    return mentee, kept
