"""FedETF in plain torch, after the authors' code: cosines to a fixed frame, balanced by the client's counts."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofed.data.batches import Batch
from protofed.seeds import generator
from references.plain import (
    CLASSES,
    CLIENTS,
    FEATURES,
    TASK,
    State,
    averaged,
    batches,
    counted,
    network,
    small_network,
    state_of,
    train,
)


def frame(dim: int) -> Tensor:
    """√(C / (C − 1)) U (I − 1 1ᵀ / C), of orthonormal columns U of drawn numbers."""
    drawn = torch.rand(dim, CLASSES, dtype=torch.float64, generator=generator(0, "equiangular frame"))
    u = torch.linalg.qr(drawn)[0]
    ones = torch.ones(CLASSES, CLASSES, dtype=torch.float64)
    found = (CLASSES / (CLASSES - 1)) ** 0.5 * u @ (torch.eye(CLASSES, dtype=torch.float64) - ones / CLASSES)
    between = found.T @ found
    assert torch.allclose(between, torch.where(between > 0, 1.0, -1 / (CLASSES - 1)).double())
    return found.float()


def rounds(start: State, dim: int, gamma: float) -> dict:
    vectors = frame(dim)

    def build() -> dict[str, nn.Module]:
        head = nn.Module()
        head.projection = nn.Linear(FEATURES, dim)
        head.raw_scale = nn.Parameter(torch.zeros(()))
        return {"features": small_network()["features"], "classifier": head}

    def local(client: str, t: int, received: State) -> State:
        counts = torch.tensor([max(1, int((TASK.clients[client].labels == c).sum())) for c in range(CLASSES)])

        def loss(model: nn.ModuleDict, batch: Batch) -> Tensor:
            rows, head = counted(batch), model["classifier"]
            direction = F.normalize(head.projection(model["features"](batch.x)), dim=1)
            scores = torch.log(1 + torch.exp(head.raw_scale)) * direction @ vectors
            return F.cross_entropy(scores[rows] + gamma * counts.log(), batch.y[rows])

        model = network(received, build)
        train(model, batches(client, t), loss)
        return state_of(model)

    kept = {client: {"count": TASK.clients[client].labels.bincount(minlength=CLASSES).float()} for client in CLIENTS}
    return {"server": {"params": averaged(start, local)}, "memories": kept}
