"""FedTGP in plain torch, after the authors' `servertgp.py` and `clienttgp.py`, on whole batches."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Data = dict[str, tuple[Tensor, Tensor]]


class GlobalPrototypes(nn.Module):
    """The server's network."""

    def __init__(self, classes: int, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, dim)
        self.middle = nn.Linear(dim, dim)
        self.last = nn.Linear(dim, dim)

    def forward(self) -> Tensor:
        return self.last(self.middle(self.embedding.weight).relu())


def margin_of(sent: list[dict[int, Tensor]], threshold: float) -> float:
    mean = {
        c: torch.stack([means[c] for means in sent if c in means]).mean(0) for c in sorted({c for m in sent for c in m})
    }
    gaps = [min(torch.dist(mean[c], mean[k]).item() for k in mean if k != c) for c in mean]
    return min(max(gaps), threshold)


def train_server(
    server: GlobalPrototypes, sent: list[dict[int, Tensor]], epochs: int, lr: float, threshold: float
) -> None:
    z = torch.stack([mean for means in sent for mean in means.values()])
    y = torch.tensor([c for means in sent for c in means])
    margin = margin_of(sent, threshold)
    optimizer = torch.optim.SGD(server.parameters(), lr=lr)
    for _ in range(epochs):
        made = server()
        distance = torch.stack([torch.stack([torch.dist(a, b) for b in made]) for a in z])
        for row, c in enumerate(y.tolist()):
            distance[row, c] = distance[row, c] + margin
        optimizer.zero_grad()
        F.cross_entropy(-distance, y).backward()
        optimizer.step()


def final_weights(
    data: Data,
    parts: nn.ModuleDict,
    server: GlobalPrototypes,
    rounds: int,
    *,
    epochs: int,
    lr: float,
    momentum: float,
    pull: float,
    server_epochs: int,
    server_lr: float,
    threshold: float,
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """The global prototypes' network, and each client's model."""
    models = {name: copy.deepcopy(parts) for name in data}
    known: Tensor | None = None
    for _ in range(rounds):
        sent = []
        for name, (x, y) in data.items():
            model = models[name]
            optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
            for _ in range(epochs):
                optimizer.zero_grad()
                z = model["features"](x)
                loss = F.cross_entropy(model["classifier"](z), y)
                if known is not None:
                    loss = loss + pull * F.mse_loss(torch.stack([known[c] for c in y.tolist()]), z)
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                z = model["features"](x)
            sent.append({c: z[y == c].mean(0) for c in sorted(set(y.tolist()))})
        train_server(server, sent, server_epochs, server_lr, threshold)
        known = server().detach()
    return dict(server.state_dict()), {name: dict(model.state_dict()) for name, model in models.items()}
