"""FedSR in plain torch, after the authors' code: a sampled feature, its length, and its divergence.

One linear layer more gives mean and spread, which the authors' encoder gives itself. Each client keeps the reference
distributions that it trains.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from protofed.data.batches import Batch
from references.plain import (
    CLASSES,
    CLIENTS,
    FEATURES,
    ROUNDS,
    State,
    batches,
    counted,
    mean,
    network,
    part,
    small_network,
    state_of,
    train,
)


def build() -> dict[str, nn.Module]:
    reference = nn.ParameterDict(
        {
            "mean": torch.zeros(CLASSES, FEATURES),
            "raw_spread": torch.ones(CLASSES, FEATURES),
            "scale": torch.tensor(1.0),
        }
    )
    return {**small_network(), "gaussian": nn.Linear(FEATURES, 2 * FEATURES), "reference": reference}


def rounds(start: State, length_weight: float, information_weight: float, squared: bool = False) -> dict:
    def loss(model: nn.ModuleDict, batch: Batch) -> Tensor:
        rows, reference = counted(batch), model["reference"]
        out = model["gaussian"](model["features"](batch.x))
        mu, sigma = out[:, :FEATURES], F.softplus(out[:, FEATURES:])
        z = (mu + sigma * batch.normal(len(batch.y), FEATURES))[rows]
        y, scale = batch.y[rows], abs(reference["scale"]) + 1e-6
        own = Normal(scale * mu[rows], scale * sigma[rows])
        of_class = Normal(reference["mean"][y], F.softplus(reference["raw_spread"][y]))
        length = (z**2).sum(1) if squared else torch.sqrt((z**2).sum(1))
        information = kl_divergence(own, of_class).sum(1).mean()
        return (
            F.cross_entropy(model["classifier"](z), y)
            + length_weight * length.mean()
            + information_weight * information
        )

    own = {client: part(start, "reference") for client in CLIENTS}
    shared = part(start, "features", "classifier", "gaussian")
    for t in range(ROUNDS):
        sent = {}
        for client in CLIENTS:
            model = network(shared | own[client], build)
            train(model, batches(client, t), loss)
            own[client] = part(state_of(model), "reference")
            sent[client] = part(state_of(model), "features", "classifier", "gaussian")
        shared = mean(sent)
    return {"server": {"params": shared}, "memories": {client: {"params": state} for client, state in own.items()}}
