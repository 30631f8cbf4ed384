"""FedNH in plain torch, after the authors' `FedNH.py`: a head of unit rows that only the server turns."""

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
    counted,
    examples,
    features,
    mean,
    network,
    small_network,
    state_of,
    train,
)

ROWS = "classifier.prototypes"


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))
        self.register_buffer("prototypes", torch.zeros(CLASSES, FEATURES))

    def forward(self, z: Tensor) -> Tensor:
        return torch.stack([self.scale * F.cosine_similarity(z, row, dim=-1) for row in self.prototypes], 1)


def build() -> dict[str, nn.Module]:
    return {"features": small_network()["features"], "classifier": Head()}


def rounds(start: State, rho: float) -> dict:
    assert torch.allclose(start[ROWS] @ start[ROWS].T, torch.eye(CLASSES), atol=1e-6)

    def loss(model: nn.ModuleDict, batch: Batch) -> Tensor:
        rows = counted(batch)
        return F.cross_entropy(model["classifier"](model["features"](batch.x))[rows], batch.y[rows])

    for t in range(ROUNDS):
        trained = {}
        sums, counts = torch.zeros(CLASSES, FEATURES), torch.zeros(CLASSES)
        for client in CLIENTS:
            model = network(start, build)
            train(model, batches(client, t), loss)
            trained[client] = state_of(model)
            x, y = examples(client)
            z = F.normalize(features(trained[client], x, build), dim=1)
            for c in set(y.tolist()):
                n = int((y == c).sum())
                sums[c] += n * F.normalize(z[y == c].sum(0), dim=0)
                counts[c] += n
        assert counts.all()
        aims = F.normalize(sums / counts[:, None], dim=1)
        start = mean(trained) | {ROWS: F.normalize(rho * start[ROWS] + (1 - rho) * aims, dim=1)}
    return {"server": {"params": start}}
