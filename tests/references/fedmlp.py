"""FedMLP in plain torch, written from our own page: no code is public, and we have the abstract alone."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofed.data.batches import Batch
from references.fedproto import told
from references.plain import (
    CLASSES,
    CLIENTS,
    ROUNDS,
    State,
    batches,
    class_means,
    counted,
    judged,
    mean,
    mean_over_owners,
    network,
    state_of,
    train,
)


def related(prototypes: dict[int, Tensor], tau: float) -> dict[int, Tensor]:
    """Each class's mixture of all prototypes, by a softmax of their cosines to its own."""
    found = {}
    for c, own in prototypes.items():
        exps = {k: torch.exp(F.cosine_similarity(own, other, dim=0) / tau) for k, other in prototypes.items()}
        found[c] = sum(exps[k] * other for k, other in prototypes.items()) / sum(exps.values())
    return found


def rounds(start: State, pull: float, semantic: float, tau: float, retention: float) -> dict:
    prototypes: dict[int, Tensor] = {}
    mixed: dict[int, Tensor] = {}
    sent: dict[str, dict[int, Tensor]] = {}
    for t in range(ROUNDS):
        trained, sent = {}, {}
        for client in CLIENTS:
            seen: list[tuple[Tensor, Tensor]] = []

            def loss(model: nn.ModuleDict, batch: Batch) -> Tensor:
                rows = counted(batch)
                z, y = model["features"](batch.x)[rows], batch.y[rows]
                if batch.is_last_epoch:
                    seen.append((z.detach(), y))
                own = model["classifier"](z)
                teacher = judged(start, batch.x)[rows].softmax(-1)
                kept = (teacher * (teacher.log() - own.log_softmax(-1))).sum(-1)
                each = [F.cross_entropy(own[k], y[k]) + retention * kept[k] for k in range(len(rows))]
                for k, label in enumerate(y.tolist()):
                    if label in prototypes:
                        cosines = torch.stack([F.cosine_similarity(z[k], mixed[c], dim=0) for c in sorted(mixed)])
                        each[k] = each[k] + pull * F.mse_loss(z[k], prototypes[label])
                        each[k] = each[k] - semantic * (cosines / tau).log_softmax(0)[sorted(mixed).index(label)]
                return torch.stack(each).mean()

            model = network(start)
            train(model, batches(client, t), loss)
            trained[client] = state_of(model)
            sent[client] = class_means(torch.cat([z for z, _ in seen]), torch.cat([y for _, y in seen]))
        start, prototypes = mean(trained), mean_over_owners(sent.values())
        mixed = related(prototypes, tau)
    levels = {"classes": told(prototypes, sent), "semantic": torch.stack([mixed[c] for c in range(CLASSES)])}
    return {"server": {"params": start, "prototypes": levels}}
