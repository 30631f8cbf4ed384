"""FedHKD in plain torch, after the authors' `ClientFedHKD.py` and its Euclidean form in FL-bench, on whole batches."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Data = dict[str, tuple[Tensor, Tensor]]


def final_weights(
    data: Data,
    parts: nn.ModuleDict,
    rounds: int,
    *,
    epochs: int,
    lr: float,
    momentum: float,
    lam: float,
    gamma: float,
    temperature: float,
    as_in_code: bool,
) -> dict[str, Tensor]:
    """The mean weights. The hyper-knowledge of a class is averaged by its examples."""
    server = copy.deepcopy(parts)
    features: dict[int, Tensor] = {}
    predictions: dict[int, Tensor] = {}
    total = sum(len(y) for _, y in data.values())
    for _ in range(rounds):
        trained, sent = [], []
        for x, y in data.values():
            model = copy.deepcopy(server)
            optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
            for _ in range(epochs):
                optimizer.zero_grad()
                z = model["features"](x)
                loss = F.cross_entropy(model["classifier"](z), y)
                if features:
                    told = torch.softmax(model["classifier"](torch.stack(list(features.values()))) / temperature, 1)
                    wanted = torch.stack([predictions[c] for c in features])
                    aims = torch.stack([features[c] for c in y.tolist()])
                    if as_in_code:
                        loss = loss + lam * nn.KLDivLoss(reduction="none")(told.log(), wanted).mean()
                        loss = loss + gamma * nn.MSELoss()(z, aims)
                    else:
                        loss = loss + lam * sum(torch.dist(a, b) for a, b in zip(told, wanted, strict=True)) / len(told)
                        loss = loss + gamma * sum(torch.dist(a, b) for a, b in zip(z, aims, strict=True)) / len(y)
                loss.backward()
                optimizer.step()
            trained.append((len(y) / total, model.state_dict()))
            with torch.no_grad():
                z = model["features"](x)
                q = torch.softmax(model["classifier"](z) / temperature, 1)
            sent.append({c: ((y == c).sum(), z[y == c].mean(0), q[y == c].mean(0)) for c in set(y.tolist())})
        server.load_state_dict({k: sum(share * own[k] for share, own in trained) for k in trained[0][1]})
        for c in sorted({c for knowledge in sent for c in knowledge}):
            own = [knowledge[c] for knowledge in sent if c in knowledge]
            count = sum(n for n, _, _ in own)
            features[c] = sum(n * h for n, h, _ in own) / count
            predictions[c] = sum(n * q for n, _, q in own) / count
    return dict(server.state_dict())
