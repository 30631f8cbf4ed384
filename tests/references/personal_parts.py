"""FedPer, FedRep, LG-Fed and FedBN in plain torch: clients keep some parts and send the others.

FedPer is after Algorithm 1 of Arivazhagan and others; FedRep after Algorithm 1 of Collins and others, where the head
trains first; LG-Fed after Algorithm 1 of Liang and others; FedBN after Algorithm 1 of Li and others.
"""

from references.plain import CLIENTS, ROUNDS, State, batches, mean, network, part, state_of, train

HEAD, BODY, NORMS = "classifier", "features", "features.1"


def rounds(start: State, kept: str, head_epochs: int = 0) -> dict:
    """With `head_epochs` the head trains first, and the body after it; otherwise both train together."""
    own = {client: part(start, kept) for client in CLIENTS}
    shared = {name: leaf for name, leaf in start.items() if not name.startswith(kept)}
    for t in range(ROUNDS):
        sent = {}
        for client in CLIENTS:
            model = network(shared | own[client])
            if head_epochs:
                train(model, batches(client, t, 0, head_epochs), only=(HEAD,))
                train(model, batches(client, t, 1), only=(BODY,))
            else:
                train(model, batches(client, t))
            own[client] = part(state_of(model), kept)
            sent[client] = {name: leaf for name, leaf in state_of(model).items() if name in shared}
        shared = mean(sent)
    return {"server": {"params": shared}, "memories": {c: {"params": state} for c, state in own.items()}}
