"""SCAFFOLD in plain torch, after Algorithm 1 of Karimireddy and others, option II by what it estimates.

A client's new control variate is the mean of the gradients of its steps. Without momentum that is
c_i − c + (x − y_i) / (K η). With momentum ρ a gradient that k − 1 others follow moves the weights 1 + ρ + … + ρ^(k−1)
times, and counts so often in the mean.
"""

import torch
from torch import nn

from references.plain import CLIENTS, SGD, SIZE, State, batches, mean, network, parameters, state_of, train


def rounds(
    start: State, server_lr: float, weights: dict[str, float] = SIZE, sgd: dict[str, float] = SGD, num_rounds: int = 3
) -> dict:
    names, x = parameters(start), start
    c = {name: torch.zeros_like(start[name]) for name in names}
    own = {client: dict(c) for client in CLIENTS}
    for t in range(num_rounds):
        trained, variates = {}, {}
        for client in CLIENTS:
            gradients: list[State] = []

            def correct(model: nn.ModuleDict) -> None:
                decay = sgd["weight_decay"]
                gradients.append({n: (p.grad + decay * p).detach().clone() for n, p in model.named_parameters()})
                for name, p in model.named_parameters():
                    p.grad += c[name] - own[client][name]

            model = network(x)
            train(model, batches(client, t), sgd=sgd, before_step=correct)
            trained[client] = state_of(model)
            steps = len(gradients)
            often = [sum(sgd["momentum"] ** i for i in range(steps - k)) for k in range(steps)]
            variates[client] = {
                name: sum(o * g[name].double() for o, g in zip(often, gradients, strict=True)).float() / sum(often)
                for name in names
            }
        means, own = mean(trained, weights), variates
        x = {n: x[n] + server_lr * (leaf - x[n]) if n in names else leaf for n, leaf in means.items()}
        c = mean(own, weights)
    return {
        "server": {"params": x, "control": c},
        "memories": {client: {"control": own[client]} for client in CLIENTS},
    }
