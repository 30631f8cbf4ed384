"""FedPer++ in plain torch, written from our own page: neither the paper nor code was at hand."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofed.data.batches import Batch
from references.plain import (
    CLASSES,
    CLIENTS,
    ROUNDS,
    TASK,
    State,
    batches,
    counted,
    features,
    mean,
    network,
    part,
    state_of,
    train,
)


def rounds(start: State, feature_weight: float, head_decay: float) -> dict:
    own = {client: part(start, "classifier") for client in CLIENTS}
    shared = part(start, "features")
    counts = {client: TASK.clients[client].labels.bincount(minlength=CLASSES) for client in CLIENTS}
    for t in range(ROUNDS):
        sent = {}
        for client in CLIENTS:
            received = shared | own[client]
            prior = torch.log(torch.tensor([float(max(1, n)) for n in counts[client].tolist()]))

            def loss(model: nn.ModuleDict, batch: Batch) -> Tensor:
                rows = counted(batch)
                z = model["features"](batch.x)[rows]
                found = F.cross_entropy(model["classifier"](z) + prior, batch.y[rows])
                found = found + feature_weight * F.mse_loss(z, features(received, batch.x)[rows])
                return found + head_decay / 2 * sum((p**2).sum() for p in model["classifier"].parameters())

            model = network(received)
            train(model, batches(client, t), loss)
            own[client], sent[client] = part(state_of(model), "classifier"), part(state_of(model), "features")
        shared = mean(sent)
    kept = {client: {"params": own[client], "count": counts[client]} for client in CLIENTS}
    return {"server": {"params": shared}, "memories": kept}
