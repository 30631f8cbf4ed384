"""FedASAM in plain torch, after the code of Caldarola and others: climb by the scaled gradient, take that of the top.

The statistics of BatchNorm move at the weights themselves alone. With `averaging` the server has the mean of its
models of the rounds after that share of them.
"""

import torch

from references.plain import (
    CLIENTS,
    ROUNDS,
    SGD,
    State,
    batches,
    cross_entropy,
    mean,
    network,
    state_of,
)


def rounds(start: State, rho: float, eta: float, averaging: float = 1.0) -> dict:
    def local(client: str, t: int, received: State) -> State:
        model = network(received)
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        for batch in batches(client, t):
            model.zero_grad()
            cross_entropy(model, batch).backward()
            climbed, places, squares = {}, state_of(model), 0.0
            for name, p in model.named_parameters():
                scale = abs(p.detach()) + eta if "weight" in name else torch.ones_like(p)
                climbed[name] = scale**2 * p.grad
                squares += float(((scale * p.grad) ** 2).double().sum())
            high = {name: places[name] + rho * step / squares**0.5 for name, step in climbed.items()}
            tried = network(places | high)
            cross_entropy(tried, batch).backward()
            for p, other in zip(model.parameters(), tried.parameters(), strict=True):
                p.grad = other.grad
            optimizer.step()
        return state_of(model)

    models: list[State] = []
    for t in range(ROUNDS):
        start = mean({client: local(client, t, start) for client in CLIENTS})
        if t + 1 > averaging * ROUNDS:
            models.append(start)
    average = {n: torch.stack([m[n] for m in models]).mean(0) for n in start} if models else start
    return {"server": {"params": start, "average": average, "count": torch.tensor(len(models))}}
