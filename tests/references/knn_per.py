"""Three rounds of kNN-Per in plain torch (Marfoq and others, ICML 2022): FedAvg, then neighbours one by one."""

from math import exp

import torch
from torch import Tensor

from references.plain import CLIENTS, Modules, State, batches, examples, load, mean, state_of, train


def averaged(modules: Modules, initial: State, num_rounds: int) -> State:
    """The global weights after so many rounds."""
    state = initial
    for number in range(num_rounds):
        trained = {}
        for client in CLIENTS:
            load(modules, state)
            train(modules, batches(client, number))
            trained[client] = state_of(modules)
        state = mean(trained)
    return state


def probabilities(modules: Modules, state: State, client: str, x: Tensor, k: int, mixing: float) -> Tensor:
    """What a client says of inputs."""
    load(modules, state, training=False)
    own, labels = examples(client)
    with torch.no_grad():
        stored, asked = modules["features"](own), modules["features"](x)
        said = []
        for z, scores in zip(asked, modules["classifier"](asked), strict=True):
            distances = [((z - s) ** 2).sum().item() for s in stored]
            nearest = sorted(range(len(stored)), key=distances.__getitem__)[:k]
            kernel = {i: exp(-distances[i] / len(z)) for i in nearest}
            local = torch.zeros(len(scores))
            for i, value in kernel.items():
                local[int(labels[i])] += value / sum(kernel.values())
            said.append(mixing * local + (1 - mixing) * scores.softmax(-1))
    return torch.stack(said)
