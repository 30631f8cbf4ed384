"""FedFomo in plain torch, after Eq. (3) to (5) of Zhang and others and the authors' `server.py` and `client.py`.

Every client is sent the models of all others. Which of its examples are for validation is drawn, and given here.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from protofed.data.batches import Data
from references.plain import (
    CLIENTS,
    ROUNDS,
    State,
    batches,
    examples,
    judged,
    network,
    parameters,
    state_of,
    train,
)


def loss(state: State, client: str, data: Data) -> float:
    x, y = examples(client, data)
    return F.cross_entropy(judged(state, x), y).item()


def length(a: State, b: State, norm: int) -> float:
    return torch.cat([(a[n] - b[n]).double().flatten() for n in parameters(a)]).norm(norm).item()


def rounds(start: State, split: Callable[[str], tuple[Data, Data]], from_trained: bool = False, norm: int = 1) -> dict:
    """`from_trained` is the rule of FL-bench: the baseline is the model just trained."""
    used = dict.fromkeys(CLIENTS, start)
    trained: dict[str, State] = {}
    affinity = {client: torch.zeros(len(CLIENTS)) for client in CLIENTS}
    mixed = 0
    for t in range(ROUNDS):
        for client in CLIENTS:
            model = network(used[client])
            train(model, batches(client, t, data=split(client)[0]))
            trained[client] = state_of(model)
        for k, client in enumerate(CLIENTS):
            baseline, validation = (trained if from_trained else used)[client], split(client)[1]
            worth = {}
            for other in CLIENTS:
                gain = loss(baseline, client, validation) - loss(trained[other], client, validation)
                away = length(trained[other], baseline, norm)
                worth[other] = gain / away if away else 0.0
            positive = {other: value for other, value in worth.items() if value > 0}
            total = sum(positive.values())
            used[client] = {
                name: leaf + sum(w / total * (trained[o][name].double() - leaf) for o, w in positive.items())
                for name, leaf in baseline.items()
            }
            used[client] = {name: leaf.float() for name, leaf in used[client].items()}
            mixed += len(positive) > 1
            size = sum(abs(value) for value in worth.values())
            for j, other in enumerate(CLIENTS):
                affinity[client][j] += worth[other] / size if j != k else 0
    assert mixed, "some client takes from another"
    kept = {client: {"params": used[client], "trained": trained[client]} for client in CLIENTS}
    return {"server": {"models": trained, "affinity": affinity}, "memories": kept}
