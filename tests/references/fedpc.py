"""FedPC in plain torch, after Algorithm 1 and Eq. (2) to (8) of Liu and others.

Clients are clustered by the best of all partitions into so many clusters, which k-means looks for. Principal components
as many as there are clients leave all distances as they are. L_p is the mean square, or as printed.
"""

from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofed.data.batches import Batch
from references.plain import (
    CLASSES,
    CLIENTS,
    EQUAL,
    FEATURES,
    ROUNDS,
    SIZE,
    State,
    batches,
    class_means,
    counted,
    examples,
    features,
    mean,
    network,
    part,
    state_of,
    train,
)

Means = dict[int, Tensor]


def of_client(state: State, client: str) -> Means:
    x, y = examples(client)
    return class_means(features(state, x), y)


def clustered(start: State, count: int) -> dict[str, int]:
    """The cluster of each client, numbered by the first of its clients."""
    found = {client: of_client(start, client) for client in CLIENTS}
    nothing = torch.zeros(FEATURES)
    points = [torch.cat([found[c].get(k, nothing) for k in range(CLASSES)]).double() for c in CLIENTS]

    def spread(labels: tuple[int, ...]) -> float:
        groups = [torch.stack([p for p, own in zip(points, labels, strict=True) if own == j]) for j in set(labels)]
        return sum(((group - group.mean(0)) ** 2).sum().item() for group in groups)

    candidates = [labels for labels in product(range(count), repeat=len(points)) if len(set(labels)) == count]
    numbered = [labels for labels in candidates if list(dict.fromkeys(labels)) == list(range(count))]
    return dict(zip(CLIENTS, min(numbered, key=spread), strict=True))


def pull(z: Tensor, y: Tensor, prototypes: Means, printed: bool) -> Tensor:
    """Eq. (3)."""
    if printed:
        there = {c: own for c, own in class_means(z, y).items() if c in prototypes}
        return sum((torch.sqrt(((own - prototypes[c]) ** 2).sum() + 1e-12) for c, own in there.items()), 0 * z.sum())
    each = [
        F.mse_loss(a, prototypes[c]) if c in prototypes else 0 * a.sum() for a, c in zip(z, y.tolist(), strict=True)
    ]
    return torch.stack(each).mean()


def blended(sent: list[Means], extractors: list[State]) -> tuple[list[Means], list[State]]:
    """Eq. (5) to (8)."""
    prototypes, mixed = [], []
    for j, own in enumerate(sent):
        similar = []
        for k, other in enumerate(sent):
            shared = sorted(own.keys() & other.keys())
            a, b = (torch.cat([of[c] for c in shared]).double() if shared else torch.zeros(1) for of in (own, other))
            similar.append(1.0 if j == k else F.cosine_similarity(a, b, dim=0).clamp(min=0).item())
        rho = [value / sum(similar) for value in similar]
        mixed.append({n: sum(r * e[n] for r, e in zip(rho, extractors, strict=True)) for n in extractors[0]})
        prototypes.append({})
        for c in range(CLASSES):
            owners = [(r, other[c]) for r, other in zip(rho, sent, strict=True) if c in other]
            if owners:
                prototypes[j][c] = sum(r * p for r, p in owners) / sum(r for r, _ in owners)
    return prototypes, mixed


def rounds(start: State, count: int, alpha: float, gamma: float, printed: bool = False) -> dict:
    """`printed` is Eq. (3) as printed, and means within a cluster that are not weighted."""
    weights = EQUAL if printed else SIZE
    cluster = clustered(start, count)
    extractors, own = [part(start, "features")] * count, {c: part(start, "classifier") for c in CLIENTS}
    prototypes: list[Means] = [{} for _ in range(count)]
    for t in range(ROUNDS):
        trained, means = {}, {}
        for client in CLIENTS:
            aims = prototypes[cluster[client]]

            def loss(model: nn.ModuleDict, batch: Batch) -> Tensor:
                rows = counted(batch)
                z, y = model["features"](batch.x)[rows], batch.y[rows]
                return alpha * F.cross_entropy(model["classifier"](z), y) + gamma * pull(z, y, aims, printed)

            model = network(extractors[cluster[client]] | own[client])
            train(model, batches(client, t), loss)
            own[client], trained[client] = part(state_of(model), "classifier"), part(state_of(model), "features")
            means[client] = of_client(state_of(model), client)
        members = [[c for c in CLIENTS if cluster[c] == j] for j in range(count)]
        sent, behind = [], torch.zeros(count, CLASSES)
        for j, of_cluster in enumerate(members):
            sent.append({})
            for c in range(CLASSES):
                owners = [client for client in of_cluster if c in means[client]]
                behind[j, c] = len(owners)
                if owners:
                    total = sum(weights[client] for client in owners)
                    sent[j][c] = sum(weights[client] / total * means[client][c] for client in owners)
        within = [mean({client: trained[client] for client in of_cluster}, weights) for of_cluster in members]
        prototypes, extractors = blended(sent, within)
    server = {
        "params": {name: torch.stack([e[name] for e in extractors]) for name in extractors[0]},
        "prototypes": {"mean": dense(prototypes)},
        "sent": {"mean": dense(sent), "count": behind},
        "assignment": {client: torch.tensor(j) for client, j in cluster.items()},
    }
    return {"server": server, "memories": {client: {"params": head} for client, head in own.items()}}


def dense(of_clusters: list[Means]) -> Tensor:
    nothing = torch.zeros(FEATURES)
    return torch.stack([torch.stack([own.get(c, nothing) for c in range(CLASSES)]) for own in of_clusters])
