"""FedProto in plain torch, after the authors' `federated_main.py`, with own models or with weights averaged too.

Local prototypes are the means of the features that the last epoch saw, as there; the server's mean is not weighted.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofed.data.batches import Batch
from references.plain import (
    CLASSES,
    CLIENTS,
    FEATURES,
    ROUNDS,
    State,
    batches,
    class_means,
    counted,
    examples,
    features,
    mean,
    mean_over_owners,
    network,
    state_of,
    train,
)

Means = dict[int, Tensor]


def trained(
    start: State, client: str, t: int, prototypes: Means, weight: float, running: bool = True
) -> tuple[State, Means]:
    """A client's weights after a round, and its class means."""
    seen: list[tuple[Tensor, Tensor]] = []

    def loss(model: nn.ModuleDict, batch: Batch) -> Tensor:
        rows = counted(batch)
        z, y = model["features"](batch.x)[rows], batch.y[rows]
        if batch.is_last_epoch:
            seen.append((z.detach(), y))
        aims = torch.stack([prototypes.get(int(c), own.detach()) for c, own in zip(y, z, strict=True)])
        return F.cross_entropy(model["classifier"](z), y) + weight * F.mse_loss(z, aims)

    model = network(start)
    train(model, batches(client, t), loss)
    if not running:
        x, y = examples(client)
        return state_of(model), class_means(features(state_of(model), x), y)
    return state_of(model), class_means(torch.cat([z for z, _ in seen]), torch.cat([y for _, y in seen]))


def told(prototypes: Means, sent: dict[str, Means]) -> dict:
    return {
        "mean": torch.stack([prototypes.get(c, torch.zeros(FEATURES)) for c in range(CLASSES)]),
        "count": torch.tensor([float(sum(c in own for own in sent.values())) for c in range(CLASSES)]),
    }


def own_models(start: State, weight: float, running: bool = True) -> dict:
    models, prototypes, sent = dict.fromkeys(CLIENTS, start), {}, {}
    for t in range(ROUNDS):
        found = {client: trained(models[client], client, t, prototypes, weight, running) for client in CLIENTS}
        models, sent = {c: own for c, (own, _) in found.items()}, {c: means for c, (_, means) in found.items()}
        prototypes = mean_over_owners(sent.values())
    return {"server": told(prototypes, sent), "memories": {c: {"params": own} for c, own in models.items()}}


def averaged_weights(start: State, weight: float, running: bool = True) -> dict:
    prototypes, sent = {}, {}
    for t in range(ROUNDS):
        found = {client: trained(start, client, t, prototypes, weight, running) for client in CLIENTS}
        start, sent = mean({c: own for c, (own, _) in found.items()}), {c: means for c, (_, means) in found.items()}
        prototypes = mean_over_owners(sent.values())
    return {"server": {"params": start, "prototypes": told(prototypes, sent)}}
