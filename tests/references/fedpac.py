"""FedPAC in plain torch, after the authors' `methods/fedpac.py`, `running.py` and `tools.py`, on whole batches."""

import copy

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from torch import Tensor, nn

Weights = dict[str, Tensor]
Data = dict[str, tuple[Tensor, Tensor]]


def class_means(z: Tensor, y: Tensor) -> dict[int, Tensor]:
    return {c: torch.stack([z[i] for i in range(len(y)) if y[i] == c]).mean(0) for c in sorted(set(y.tolist()))}


def statistics(z: Tensor, y: Tensor, classes: int) -> tuple[float, Tensor]:
    """V and h of a client, class by class."""
    v, h = 0.0, torch.zeros(classes, z.shape[1])
    for c, mean in class_means(z, y).items():
        own = z[y == c]
        share = len(own) / len(y)
        h[c] = share * mean
        v += share * torch.trace(own.T @ own / len(own)).item() - share**2 * (mean * mean).sum().item()
    return v / len(y), h


def combinations(variances: list[float], references: list[Tensor]) -> list[list[float]]:
    found = []
    for own in references:
        p = np.diag(variances).astype(float)
        for j, a in enumerate(references):
            for k, b in enumerate(references):
                p[j, k] += ((own - a) * (own - b)).double().sum().item()
        n = len(references)
        whole = {"type": "eq", "fun": lambda w: w.sum() - 1}
        solved = minimize(
            lambda w, p=p: w @ p @ w,
            np.full(n, 1 / n),
            jac=lambda w, p=p: 2 * p @ w,
            bounds=[(0, 1)] * n,
            constraints=[whole],
            options={"ftol": 1e-16, "maxiter": 1000},
        )
        weights = [w if w > 1e-3 else 0.0 for w in solved.x]
        found.append([w / sum(weights) for w in weights])
    return found


def trained(parts: nn.ModuleDict, x: Tensor, y: Tensor, own: str, aims: list[Tensor] | None, setting: dict) -> None:
    """Epochs of gradient descent for one part, the other held."""
    optimizer = torch.optim.SGD(parts[own].parameters(), lr=setting["lr"], momentum=setting["momentum"])
    for _ in range(setting["head_epochs"] if own == "classifier" else setting["epochs"]):
        optimizer.zero_grad()
        z = parts["features"](x)
        loss = F.cross_entropy(parts["classifier"](z), y)
        if aims is not None:
            loss = loss + setting["alignment"] * nn.MSELoss()(z, torch.stack(aims))
        loss.backward()
        optimizer.step()


def final_weights(
    data: Data, parts: nn.ModuleDict, rounds: int, **setting: float
) -> tuple[Weights, dict[str, Weights]]:
    """The mean body, and each client's head."""
    classes = parts["classifier"].out_features
    models = {name: copy.deepcopy(parts) for name in data}
    centroids: dict[int, Tensor] = {}
    for _ in range(rounds):
        variances, references, means = [], [], {}
        for name, (x, y) in data.items():
            model = models[name]
            with torch.no_grad():
                z = model["features"](x)
            before = class_means(z, y)
            v, h = statistics(z, y, classes)
            variances.append(v)
            references.append(h)
            trained(model, x, y, "classifier", None, setting)
            aims = [centroids.get(c, before[c]) for c in y.tolist()] if centroids else None
            trained(model, x, y, "features", aims, setting)
            with torch.no_grad():
                means[name] = class_means(model["features"](x), y)
        bodies = {name: model["features"].state_dict() for name, model in models.items()}
        total = sum(len(y) for _, y in data.values())
        body = {k: sum(len(data[n][1]) / total * bodies[n][k] for n in data) for k in bodies[next(iter(data))]}
        for c in range(classes):
            own = [((data[n][1] == c).sum(), means[n][c]) for n in data if c in means[n]]
            if own:
                centroids[c] = sum(count * mean for count, mean in own) / sum(count for count, _ in own)
        heads = [copy.deepcopy(model["classifier"].state_dict()) for model in models.values()]
        for model, weights in zip(models.values(), combinations(variances, references), strict=True):
            model["features"].load_state_dict(body)
            mixed = {k: sum(w * head[k] for w, head in zip(weights, heads, strict=True)) for k in heads[0]}
            model["classifier"].load_state_dict(mixed)
    return body, {name: model["classifier"].state_dict() for name, model in models.items()}
