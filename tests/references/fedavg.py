"""FedAvg in plain torch, after Algorithm 1 of McMahan and others: epochs of descent, and the mean by examples."""

from references.plain import State, averaged, batches, network, state_of, train


def local(client: str, t: int, received: State) -> State:
    model = network(received)
    train(model, batches(client, t))
    return state_of(model)


def rounds(start: State) -> dict:
    return {"server": {"params": averaged(start, local)}}
