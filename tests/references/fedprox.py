"""FedProx in plain torch, after Eq. (2) of Li and others: cross-entropy and μ/2 ‖w − w_t‖²."""

from references.plain import State, averaged, batches, cross_entropy, distance, network, state_of, train


def rounds(start: State, mu: float) -> dict:
    def local(client: str, t: int, received: State) -> State:
        model = network(received)
        train(model, batches(client, t), lambda m, batch: cross_entropy(m, batch) + mu / 2 * distance(m, received))
        return state_of(model)

    return {"server": {"params": averaged(start, local)}}
