"""FedSeProto in plain torch, after Eq. (8) to (16) of Lai and others; on each batch the basic model, then the rest.

The sign of Eq. (11) is turned, as the text around it wants. KL(N(z, 1) ‖ N(0, 1)) is half the square of z. Squares are
means over dimensions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from references.plain import (
    CLASSES,
    CLIENTS,
    FEATURES,
    ROUNDS,
    SGD,
    State,
    batches,
    class_means,
    counted,
    examples,
    mean,
    mean_over_owners,
    network,
    part,
    small_network,
    state_of,
)


class Decoder(nn.Module):
    """From 4×4 to 32×32, and to the 8×8 of the task's images."""

    def __init__(self) -> None:
        super().__init__()
        up = {"kernel_size": 4, "stride": 2, "padding": 1}
        first = [nn.Linear(2 * FEATURES, 2048), nn.ReLU(), nn.Unflatten(1, (128, 4, 4))]
        widths = [nn.ConvTranspose2d(128, 64, **up), nn.ReLU(), nn.ConvTranspose2d(64, 32, **up), nn.ReLU()]
        self.grown = nn.Sequential(*first, *widths, nn.ConvTranspose2d(32, 3, **up))

    def forward(self, z: Tensor) -> Tensor:
        return F.interpolate(self.grown(z), (8, 8), mode="bilinear")


def build() -> dict[str, nn.Module]:
    encoders = {part: nn.Linear(FEATURES, FEATURES) for part in ("semantic", "domain")}
    return {**small_network(), **encoders, "decoder": Decoder()}


def objective(
    m: nn.ModuleDict, x: Tensor, y: Tensor, rows: list[int], aims: dict[int, Tensor], weights: tuple[float, ...]
) -> Tensor:
    """Eq. (15), of the rows that count."""
    alpha, beta, lam = weights
    z = m["features"](x)[rows]
    s, d, head = m["semantic"](z), m["domain"](z), m["classifier"]
    x, y = x[rows], y[rows]
    teacher = head(z).detach().softmax(1)
    s1, s2 = (F.kl_div(head(own).log_softmax(1), teacher, reduction="none").sum(1) for own in (s, d))
    distillation = -torch.log(torch.exp(-s1) / (torch.exp(-s1) + torch.exp(-s2))).mean()
    rebuilt = m["decoder"](torch.cat([s, d], 1))
    information = (s**2).mean() / 2 + (d**2).mean() / 2 + F.mse_loss(rebuilt, x)
    of_classes = [F.mse_loss(s[y == c], aims[c].expand_as(s[y == c])) for c in aims if (y == c).any()]
    alignment = torch.stack(of_classes).mean() if of_classes else 0.0
    return F.cross_entropy(head(s), y) + alpha * distillation + beta * information + lam * alignment


def rounds(start: State, weights: tuple[float, float, float], shares_weights: bool = True) -> dict:
    stays = ("domain", "decoder") if shares_weights else ("",)
    own = {client: part(start, *stays) for client in CLIENTS}
    shared = {name: leaf for name, leaf in start.items() if not name.startswith(stays)}
    prototypes: dict[int, Tensor] = {}
    for t in range(ROUNDS):
        sent, means = {}, {}
        for client in CLIENTS:
            m = network(shared | own[client], build)
            basic = torch.optim.SGD([*m["features"].parameters(), *m["classifier"].parameters()], **SGD)
            rest = [p for name, p in m.named_parameters() if not name.startswith("classifier")]
            decoupling = torch.optim.SGD(rest, **SGD)
            for batch in batches(client, t):
                rows = counted(batch)
                m.zero_grad()
                F.cross_entropy(m["classifier"](m["features"](batch.x))[rows], batch.y[rows]).backward()
                basic.step()
                m.zero_grad()
                objective(m, batch.x, batch.y, rows, prototypes, weights).backward()
                decoupling.step()
            state = state_of(m)
            own[client], sent[client] = part(state, *stays), {name: state[name] for name in shared}
            x, y = examples(client)
            with torch.no_grad():
                means[client] = class_means(m["semantic"](m.eval()["features"](x)), y)
        shared, prototypes = mean(sent), mean_over_owners(means.values())
    told = {
        "mean": torch.stack([prototypes[c] for c in range(CLASSES)]),
        "count": torch.tensor([float(sum(c in of for of in means.values())) for c in range(CLASSES)]),
    }
    return {
        "server": {"params": shared, "prototypes": told},
        "memories": {client: {"params": state} for client, state in own.items()},
    }
