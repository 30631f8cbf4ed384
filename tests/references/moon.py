"""MOON in plain torch, after the authors' `main.py`: cross-entropy of two similarities, of which the first is right."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofed.data.batches import Batch
from references.plain import CLIENTS, State, averaged, batches, counted, features, network, state_of, train


def rounds(start: State, mu: float, temperature: float) -> dict:
    previous: dict[str, State] = {}

    def local(client: str, t: int, received: State) -> State:
        def loss(model: nn.ModuleDict, batch: Batch) -> Tensor:
            rows = counted(batch)
            z = model["features"](batch.x)[rows]
            found = F.cross_entropy(model["classifier"](z), batch.y[rows])
            if client in previous:
                near = F.cosine_similarity(z, features(received, batch.x)[rows])
                far = F.cosine_similarity(z, features(previous[client], batch.x)[rows])
                logits = torch.stack([near, far], 1) / temperature
                found = found + mu * F.cross_entropy(logits, torch.zeros(len(rows), dtype=torch.int64))
            return found

        model = network(received)
        train(model, batches(client, t), loss)
        return state_of(model)

    def remembered(client: str, t: int, received: State) -> State:
        previous[client] = local(client, t, received)
        return previous[client]

    params = averaged(start, remembered)
    kept = {client: {"params": previous[client], "exists": torch.tensor(1.0)} for client in CLIENTS}
    return {"server": {"params": params}, "memories": kept}
