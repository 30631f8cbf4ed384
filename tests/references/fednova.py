"""FedNova in plain torch, after the authors' optimiser (`distoptim/FedNova.py`), which counts ‖a‖₁ step by step."""

import torch

from references.plain import (
    CLIENTS,
    ROUNDS,
    SGD,
    SIZE,
    State,
    batches,
    cross_entropy,
    distance,
    mean,
    network,
    parameters,
    state_of,
    train,
)


def normaliser(steps: int, momentum: float, pull: float) -> float:
    """‖a‖₁ after so many steps; `pull` is the learning rate times μ."""
    counter, total = 0.0, 0.0
    for _ in range(steps):
        if momentum:
            counter = counter * momentum + 1
            total += counter
        if pull:
            total = total * (1 - pull) + 1
        elif not momentum:
            total += 1
    return total


def rounds(start: State, mu: float = 0.0, server_momentum: float = 0.0, sgd: dict[str, float] = SGD) -> dict:
    share = {client: n / sum(SIZE.values()) for client, n in SIZE.items()}
    names, x, lr = parameters(start), start, sgd["lr"]
    buffer = {name: torch.zeros_like(start[name], dtype=torch.float64) for name in names}
    for t in range(ROUNDS):
        trained, directions, steps = {}, {}, {}
        for client in CLIENTS:
            model, of_batches = network(x), batches(client, t)
            train(model, of_batches, lambda m, b: cross_entropy(m, b) + mu / 2 * distance(m, x), sgd=sgd)
            trained[client] = state_of(model)
            a = normaliser(len(of_batches), sgd["momentum"], lr * mu)
            directions[client] = {name: (x[name].double() - trained[client][name]) / a for name in names}
            steps[client] = len(of_batches) if mu else a
        effective = sum(share[client] * steps[client] for client in CLIENTS)
        x = mean(trained) | {name: x[name] for name in names}
        for name in names:
            change = effective * sum(share[client] * directions[client][name] for client in CLIENTS)
            buffer[name] = server_momentum * buffer[name] + change / lr
            x[name] = (x[name] - lr * buffer[name]).float()
    velocity = {name: -leaf for name, leaf in buffer.items()} if server_momentum else {}
    return {"server": {"params": x, "velocity": velocity}}
