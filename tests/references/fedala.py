"""FedALA in plain torch, after the authors' `utils/ALA.py`: element-wise shares W of the global model, learnt first.

The loss that decides when to stop is that of the mixture on all drawn examples. Statistics of BatchNorm are the global
ones.
"""

from statistics import pstdev

import torch
import torch.nn.functional as F

from protofed.seeds import generator
from references.plain import (
    CLIENTS,
    ROUNDS,
    TASK,
    State,
    batches,
    cross_entropy,
    examples,
    judged,
    mean,
    network,
    state_of,
    step_seed,
    train,
)


def rounds(start: State, names: tuple[str, ...], rate: float, part: float, threshold: float) -> dict:
    shares = {client: {name: torch.ones_like(start[name]) for name in names} for client in CLIENTS}
    own: dict[str, State] = {}
    for t in range(ROUNDS):
        sent = {}
        for client in CLIENTS:
            model, requests = network(start), 0
            if t:
                requests = learn(client, t, start, own[client], shares[client], rate, part, threshold)
                model = network(mixture(start, own[client], shares[client]))
            train(model, batches(client, t, requests))
            sent[client] = own[client] = state_of(model)
        start = mean(sent)
    assert any(((w > 0) & (w < 1)).any() for of in shares.values() for w in of.values()), "shares are not at the ends"
    kept = {c: {"params": own[c], "shares": shares[c], "num_trained": torch.tensor(ROUNDS)} for c in CLIENTS}
    return {"server": {"params": start}, "memories": kept}


def mixture(theirs: State, own: State, shares: State) -> State:
    return theirs | {name: own[name] + (theirs[name] - own[name]) * w for name, w in shares.items()}


def learn(
    client: str, t: int, theirs: State, own: State, shares: State, rate: float, part: float, threshold: float
) -> int:
    """Changes the shares; returns how many requests that took, by which the draws of batches are numbered."""
    data, losses, requests = TASK.clients[client], [], 0
    order = torch.randperm(len(data), generator=generator(step_seed(client, t), "mixing"))
    data = data.rows(order[: int(part * len(data))])
    while True:
        for batch in batches(client, t, requests, 1, data):
            model = network(mixture(theirs, own, shares))
            cross_entropy(model, batch).backward()
            slopes = {name: p.grad for name, p in model.named_parameters()}
            for name in shares:
                shares[name] = (shares[name] - rate * slopes[name] * (theirs[name] - own[name])).clamp(0, 1)
        x, y = examples(client, data)
        losses.append(F.cross_entropy(judged(mixture(theirs, own, shares), x), y).item())
        if t > 1:
            return requests + 1
        requests += 2
        if (len(losses) > 10 and pstdev(losses[-10:]) < threshold) or len(losses) == 100:
            return requests
