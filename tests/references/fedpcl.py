"""FedPCL in plain torch, after `clientpcl.py` and `serverpcl.py` of PFLlib, on whole batches."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Data = dict[str, tuple[Tensor, Tensor]]


def term(unit: Tensor, y: Tensor, prototypes: dict[int, Tensor], temperature: float, others: bool) -> Tensor:
    losses = []
    for row, c in zip(unit, y.tolist(), strict=True):
        exps = {k: torch.exp(row @ p / temperature) for k, p in prototypes.items()}
        losses.append(-torch.log(exps[c] / sum(e for k, e in exps.items() if k != c or not others)))
    return torch.stack(losses).mean()


def final_weights(
    data: Data,
    encoder: nn.Module,
    fusion: nn.Module,
    rounds: int,
    *,
    epochs: int,
    lr: float,
    momentum: float,
    temperature: float,
    others: bool,
    trains_encoder: bool,
) -> dict[str, nn.ModuleDict]:
    """Each client's encoder and fusion layer."""
    models = {name: copy.deepcopy(nn.ModuleDict({"features": encoder, "fusion": fusion})) for name in data}
    sent: dict[str, dict[int, Tensor]] = {}
    for _ in range(rounds):
        classes = sorted({c for own in sent.values() for c in own})
        average = {c: torch.stack([own[c] for own in sent.values() if c in own]).mean(0) for c in classes}
        padded = [{c: own.get(c, average[c]) for c in classes} for own in sent.values()]
        sent = {}
        for name, (x, y) in data.items():
            model = models[name]
            weights = model.parameters() if trains_encoder else model["fusion"].parameters()
            optimizer = torch.optim.SGD(weights, lr=lr, momentum=momentum)
            for _ in range(epochs if average else 0):
                optimizer.zero_grad()
                unit = F.normalize(model["fusion"](model["features"](x)), dim=1)
                loss = term(unit, y, average, temperature, others)
                for own in padded:
                    loss = loss + term(unit, y, own, temperature, others) / len(padded)
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                unit = F.normalize(model["fusion"](model["features"](x)), dim=1)
            sent[name] = {c: unit[y == c].mean(0) for c in sorted(set(y.tolist()))}
    return models
