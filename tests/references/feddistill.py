"""Three rounds of federated distillation in plain torch (Jeong and others, 2018), with lists of scores for each class.

A client descends cross-entropy with the label plus γ times cross-entropy with the softmax of the mean scores that the
other clients gave the label's class.
"""

from collections import defaultdict
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.data.batches import Batch
from references.plain import CLIENTS, SIZE, Modules, State, batches, load, state_of, train

Teacher = dict[int, Tensor]
"""Scores by class."""


def objective(teacher: Teacher, gamma: float, seen: list[tuple[int, Tensor]], modules: Modules, batch: Batch) -> Tensor:
    x, y = batch.x, batch.y
    scores = modules["classifier"](modules["features"](x))
    rows = [k for k in range(len(y)) if batch.weight[k] > 0]
    value = scores.new_zeros(())
    for k in rows:
        label = int(y[k])
        seen.append((label, scores[k].detach()))
        value = value - F.log_softmax(scores[k], -1)[label]
        if label in teacher:
            value = value - gamma * (F.softmax(teacher[label], -1) * F.log_softmax(scores[k], -1)).sum()
    return value / len(rows)


def rounds(
    modules: Modules, initial: State, present: list[tuple[str, ...]], gamma: float, others: bool
) -> dict[str, State]:
    """The clients' weights at the end."""
    models = {client: dict(initial) for client in CLIENTS}
    sent: dict[str, Teacher] = {client: {} for client in CLIENTS}
    for number, clients in enumerate(present):
        new = {}
        for client in clients:
            teacher = {}
            for label in range(4):
                given = [sent[c][label] for c in CLIENTS if label in sent[c] and not (others and c == client)]
                if given:
                    teacher[label] = torch.stack(given).mean(0)
            load(modules, models[client])
            seen: list[tuple[int, Tensor]] = []
            train(modules, batches(client, number), partial(objective, teacher, gamma, seen))
            models[client] = state_of(modules)
            of_class = defaultdict(list)
            for label, scores in seen[-SIZE[client] :]:  # of the last epoch
                of_class[label].append(scores)
            new[client] = {label: torch.stack(scores).mean(0) for label, scores in of_class.items()}
        sent |= new
    return models
