"""FedGH in plain torch, after Algorithm 1 of Yi and others: the server's header takes a step for each class mean."""

import torch
import torch.nn.functional as F

from references import fedavg
from references.plain import (
    CLIENTS,
    ROUNDS,
    State,
    class_means,
    examples,
    features,
    network,
    part,
    server_batches,
    state_of,
)


def rounds(start: State, rate: float, epochs: int = 1) -> dict:
    header, own = part(start, "classifier"), dict.fromkeys(CLIENTS, start)
    for t in range(ROUNDS):
        points, labels = [], []
        for client in CLIENTS:
            own[client] = fedavg.local(client, t, own[client] | header)
            x, y = examples(client)
            for c, point in class_means(features(own[client], x), y).items():
                points.append(point)
                labels.append(c)
        classifier = network(start | header)["classifier"]
        for batch in server_batches(torch.stack(points), torch.tensor(labels), t, epochs=epochs, size=1):
            loss = F.cross_entropy(classifier(batch.x), batch.y)
            slopes = torch.autograd.grad(loss, list(classifier.parameters()))
            with torch.no_grad():
                for p, slope in zip(classifier.parameters(), slopes, strict=True):
                    p -= rate * slope
        header = state_of({"classifier": classifier})
    return {"server": {"params": header}, "memories": {client: {"params": state} for client, state in own.items()}}
