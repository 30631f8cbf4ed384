"""FedDecorr in plain torch, after the authors' code, or ‖K‖² / d² as Shi and others print it."""

import torch.nn.functional as F
from torch import Tensor, nn

from protofed.data.batches import Batch
from references.plain import State, averaged, batches, counted, network, state_of, train


def penalty(z: Tensor, printed: bool) -> Tensor:
    n, d = z.shape
    if n < 2:
        return 0 * z.sum()
    z = z - z.mean(0)
    z = z / (z.var(0) + 1e-8).sqrt()
    products = z.T @ z
    if printed:
        return ((products / n) ** 2).sum() / d**2
    return sum(products[i, j] ** 2 for i in range(d) for j in range(d) if i != j) / (d * (d - 1)) / n


def rounds(start: State, beta: float, printed: bool = False) -> dict:
    def loss(model: nn.ModuleDict, batch: Batch) -> Tensor:
        rows = counted(batch)
        z = model["features"](batch.x)[rows]
        return F.cross_entropy(model["classifier"](z), batch.y[rows]) + beta * penalty(z, printed)

    def local(client: str, t: int, received: State) -> State:
        model = network(received)
        train(model, batches(client, t), loss)
        return state_of(model)

    return {"server": {"params": averaged(start, local)}}
