"""pFedCSPC around FedAvg in plain torch, after Eq. (2) to (18) of Meng and others, sum by sum.

Readings as on our page: Eq. (4) is a softmax; Eq. (5) at length 1; Eq. (6) an absolute difference; Eq. (7) a smooth L1
of distances over their mean; Eq. (11) with a hinge; Eq. (14) and (16) over a client's prototypes and then over owners;
the schedule is that of the authors' code. Partners of Eq. (10) are drawn, and given here.
"""

from collections.abc import Callable
from itertools import permutations

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
    network,
    part,
    server_batches,
    small_network,
    state_of,
    train,
)

WIDTH = 5
HEAD = ("projection", "classifier")
Pool = list[tuple[Tensor, int, int]]
"""Prototypes, their classes, and the places of their clients."""
Partners = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Of a round and its pool: rows of the same class, rows of others, and λ, (M, A) each."""


def build(client: str = "") -> dict[str, nn.Module]:
    projection = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU(), nn.Linear(FEATURES, WIDTH))
    return {
        "features": small_network()["features"],
        "projection": projection,
        "classifier": nn.Linear(WIDTH, CLASSES),
    }


def alignment(z: Tensor, y: list[int], u: dict[int, Tensor], tau: float) -> Tensor:
    """L_N + L_A + L_E."""

    def cosine(points: Tensor) -> Tensor:
        a, b, c = points.unbind(1)
        return F.cosine_similarity(a - b, c - b, dim=1)

    node = 0 * z.sum()
    for own, label in zip(z, y, strict=True):
        near = {c: torch.exp(F.cosine_similarity(own, u[c], dim=0) / tau) for c in u}
        node = node - torch.log(near[label] / sum(near.values())) / len(y) if label in u else node
    known = [k for k in range(len(y)) if y[k] in u]
    triplets = [t for t in permutations(known, 3) if len({y[k] for k in t}) == 3]
    pairs = [(i, j) for i, j in permutations(known, 2) if y[i] != y[j]]
    found = node
    if triplets:
        wanted = torch.stack([torch.stack([u[y[k]] for k in t]) for t in triplets])
        found = found + abs(cosine(z[torch.tensor(triplets)]) - cosine(wanted)).mean()
    if pairs:
        own = torch.stack([(z[i] - z[j]).norm() for i, j in pairs])
        wanted = torch.stack([(u[y[i]] - u[y[j]]).norm() for i, j in pairs])
        found = found + F.smooth_l1_loss(own / own.mean(), wanted / wanted.mean())
    return found


def weighted_contrast(z: Tensor, y: list[int], owner: list[int], tau: float) -> list[Tensor]:
    """Eq. (12), of each prototype."""
    each = []
    for i in range(len(y)):
        others = [s for s in range(len(y)) if s != i]
        sigma = torch.tensor([1.0 if (y[s] == y[i]) != (owner[s] == owner[i]) else 0.5 for s in others])
        exps = sigma * torch.exp(F.cosine_similarity(z[i], z[others], dim=1) / tau)
        is_positive = [y[s] == y[i] for s in others]
        each.append(-torch.log(exps[is_positive] / exps.sum()).mean() if any(is_positive) else 0 * z.sum())
    return each


def calibrated(
    state: State, pool: Pool, t: int, epochs: int, eta: float, tau: float, drawn: tuple[Tensor, Tensor, Tensor] | None
) -> State:
    """Projection and classifier after Eq. (17), of 30 epochs at a rate and the rest at a tenth of it."""
    u, label = torch.stack([p for p, _, _ in pool]), torch.tensor([c for _, c, _ in pool])
    owner = torch.tensor([k for _, _, k in pool])
    model = network(state, build)
    here = sorted(set(label.tolist()))
    assert here == list(range(CLASSES))
    if drawn is not None:
        for i, (same, other) in enumerate(zip(drawn[0].tolist(), drawn[1].tolist(), strict=True)):
            assert all(label[k] == label[i] and owner[k] == owner[i] for k in same)
            assert all(label[k] != label[i] and owner[k] == owner[i] for k in other)
        assert {round(value, 3) for value in drawn[2].flatten().tolist()} <= {0.1, 0.3, 0.5}

    def loss(model: nn.ModuleDict, batch: Batch) -> Tensor:
        head, rows = model["projection"], [int(batch.index[k]) for k in counted(batch)]
        z = head(u[rows])
        found = F.cross_entropy(model["classifier"](z), label[rows], reduction="none")
        found = found + eta * torch.stack(weighted_contrast(z, label[rows].tolist(), owner[rows].tolist(), tau))
        if drawn is None:
            return found.mean()
        here, (same, other, strength) = u[rows][:, None], (of[rows] for of in drawn)
        positive = head(here + strength[..., None] * (here - u[same]))
        negative = head(here + strength[..., None] * (u[other] - here))
        gaps = ((z[:, None] - positive) ** 2).sum(-1) - ((z[:, None] - negative) ** 2).sum(-1)
        return (found + eta * F.relu(gaps + 1).mean(1)).mean()

    for fit, (number, rate) in enumerate([(min(30, epochs), 0.1), (max(0, epochs - 30), 0.01)]):
        if number:
            planned = server_batches(u, label, t, fit, epochs=number, size=100)
            train(model, planned, loss, HEAD, {"lr": rate, "weight_decay": 1e-5})
    return part(state_of(model), *HEAD)


def centres(values: Tensor, pool: Pool) -> dict:
    """Eq. (14) and (16)."""
    owners = {c: sorted({k for _, label, k in pool if label == c}) for c in range(CLASSES)}
    means = []
    for c in range(CLASSES):
        own = [[v for v, (_, label, k) in zip(values, pool, strict=True) if (label, k) == (c, o)] for o in owners[c]]
        means.append(torch.stack([torch.stack(of_client).mean(0) for of_client in own]).mean(0))
    return {"mean": torch.stack(means), "count": torch.tensor([float(len(owners[c])) for c in range(CLASSES)])}


def rounds(
    start: State,
    kappa: float,
    eta: float,
    epochs: int,
    partners: Partners | None = None,
    each_example: bool = False,
    personalised: bool = True,
) -> dict:
    """With `each_example` every example is a cluster of its own; otherwise a class has its mean."""
    tau, received = 0.5, dict.fromkeys(CLIENTS, start)
    prototypes: dict[int, Tensor] = {}
    for t in range(ROUNDS):
        trained, pool = {}, []
        for place, client in enumerate(CLIENTS):

            def loss(model: nn.ModuleDict, batch: Batch) -> Tensor:
                rows = counted(batch)
                z, y = model["features"](batch.x)[rows], batch.y[rows]
                found = F.cross_entropy(model["classifier"](model["projection"](z)), y)
                return found + kappa * alignment(z, y.tolist(), prototypes, tau) if prototypes else found

            model = network(received[client], build)
            train(model, batches(client, t), loss)
            trained[client] = state_of(model)
            x, y = examples(client)
            z = features(trained[client], x, build)
            if each_example:
                pool += [(own, int(c), place) for own, c in zip(z, y, strict=True)]
            else:
                pool += [(own, c, place) for c, own in class_means(z, y).items()]
        merged = mean(trained)
        u, label, owner = (torch.stack([torch.as_tensor(row[i]) for row in pool]) for i in range(3))
        drawn = None if partners is None else partners(t, u, label, owner)
        head = calibrated(merged, pool, t, epochs, eta, tau, drawn)
        with torch.no_grad():
            exemplars = centres(network(merged | head, build)["projection"](u), pool)
        known = centres(u, pool)
        prototypes = dict(enumerate(known["mean"]))
        encoders, mixing = {c: part(own, "features") for c, own in trained.items()}, {}
        for place, client in enumerate(CLIENTS):
            losses = []
            for other in CLIENTS:
                model, rows = network(trained[other], build), owner == place
                with torch.no_grad():
                    said = model["classifier"](model["projection"](u[rows]))
                losses.append(F.cross_entropy(said, label[rows]).double())
            mixing[client] = torch.softmax(-torch.stack(losses) / 0.5, 0)
            mixed = mean(encoders, dict(zip(CLIENTS, mixing[client].tolist(), strict=True)))
            received[client] = merged | head | (mixed if personalised else {})
    stacked = {name: torch.stack([trained[c][name] for c in CLIENTS]) for name in part(start, "features")}
    server = {"base": {"params": merged}, "head": head, "prototypes": known, "exemplars": exemplars}
    if not personalised:
        return {"server": server}
    server |= {"encoders": stacked, "mixing": mixing}
    return {"server": server, "memories": {client: {"params": state} for client, state in trained.items()}}
