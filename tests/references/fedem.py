"""Three rounds of FedEM in plain torch (Marfoq and others, NeurIPS 2021), one component after another.

E-step: q(s, m) ∝ π_m exp(−loss of example s by component m); then π_m is the mean of q(·, m). M-step: component m
descends the mean of q(s, m) · loss. The server averages each component by the clients' numbers of examples.
"""

from functools import partial
from math import exp

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.data.batches import Batch
from protofed.testing.federations import TASK
from references.plain import CLIENTS, Modules, State, batches, examples, load, mean, state_of, train


def objective(q: dict[int, float], modules: Modules, batch: Batch) -> Tensor:
    x, y = batch.x, batch.y
    """`q` by row of the client's store."""
    rows = [k for k in range(len(y)) if batch.weight[k] > 0]
    scores = modules["classifier"](modules["features"](x))
    losses = [q[int(batch.index[k])] * F.cross_entropy(scores[k : k + 1], y[k : k + 1]) for k in rows]
    return torch.stack(losses).sum() / len(rows)


def rounds(modules: Modules, components: list[State], num_rounds: int) -> tuple[list[State], dict[str, list[float]]]:
    """The components and the clients' weights of them at the end."""
    count = len(components)
    pi = {client: [1 / count] * count for client in CLIENTS}
    for number in range(num_rounds):
        trained: list[dict[str, State]] = [{} for _ in components]
        for client in CLIENTS:
            losses, (x, y) = [], examples(client)
            for state in components:
                load(modules, state, training=False)
                with torch.no_grad():
                    scores = modules["classifier"](modules["features"](x))
                losses.append([-s.log_softmax(-1)[label].item() for s, label in zip(scores, y, strict=True)])
            shares = [[pi[client][m] * exp(-losses[m][s]) for m in range(count)] for s in range(len(y))]
            q = [[share / sum(of_example) for share in of_example] for of_example in shares]
            pi[client] = [sum(of_example[m] for of_example in q) / len(q) for m in range(count)]
            store = TASK.clients[client].index.tolist()
            for m, state in enumerate(components):
                load(modules, state)
                by_row = {row: q[s][m] for s, row in enumerate(store)}
                train(modules, batches(client, number, fit=1), partial(objective, by_row))
                trained[m][client] = state_of(modules)
        components = [mean(of_component) for of_component in trained]
    return components, pi


def prediction(modules: Modules, components: list[State], pi: list[float], x: Tensor) -> Tensor:
    """Logarithms of the mixture's probabilities."""
    said = torch.zeros(())
    for state, weight in zip(components, pi, strict=True):
        load(modules, state, training=False)
        with torch.no_grad():
            said = said + weight * modules["classifier"](modules["features"](x)).softmax(-1)
    return said.log()
