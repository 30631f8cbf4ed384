"""Local training, FedAvg-FT and Ditto in plain torch: a model of every client's own.

Local and FedAvg-FT have nothing but what their names say; Ditto is after Algorithm 1 of Li and others, its own model
trained after the global one.
"""

from references import fedavg
from references.plain import (
    CLIENTS,
    EPOCHS,
    ROUNDS,
    SGD,
    State,
    batches,
    cross_entropy,
    distance,
    mean,
    network,
    state_of,
    train,
)


def local(start: State) -> dict:
    own = dict.fromkeys(CLIENTS, start)
    for t in range(ROUNDS):
        own = {client: fedavg.local(client, t, own[client]) for client in CLIENTS}
    return {"memories": {client: {"params": state} for client, state in own.items()}}


def fine_tuned(start: State, epochs: int, only: tuple[str, ...] = ("",)) -> dict:
    own: dict[str, State] = {}
    for t in range(ROUNDS):
        for client in CLIENTS:
            model = network(start)
            train(model, batches(client, t, 1, epochs), only=only)
            own[client] = state_of(model)
        start = mean({client: fedavg.local(client, t, start) for client in CLIENTS})
    return {"server": {"params": start}, "memories": {client: {"params": state} for client, state in own.items()}}


def ditto(start: State, weight: float, to_trained: bool = False, plain: bool = False, epochs: int = EPOCHS) -> dict:
    """`to_trained` and `plain` are as in the code of FedNH: held to the weights just trained, by plain descent."""
    sgd = {"lr": SGD["lr"]} if plain else SGD
    own = dict.fromkeys(CLIENTS, start)
    for t in range(ROUNDS):
        trained = {}
        for client in CLIENTS:
            trained[client] = fedavg.local(client, t, start)
            near, model = trained[client] if to_trained else start, network(own[client])
            train(
                model,
                batches(client, t, 1, epochs),
                lambda m, b: cross_entropy(m, b) + weight / 2 * distance(m, near),
                sgd=sgd,
            )
            own[client] = state_of(model)
        start = mean(trained)
    return {"server": {"params": start}, "memories": {client: {"params": state} for client, state in own.items()}}
