"""FedGen in plain torch, after Zhu, Hong and Zhou and the authors' `serverpFedGen.py` and `userpFedGen.py`, given all
noise: nothing of protofed."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batches = Callable[[str, int], Iterable[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]]]
"""Inputs, labels, rows that count, noise for these labels, drawn labels and noise for them, of a client in a round."""
GeneratorBatches = Callable[[int], Iterable[tuple[Tensor, Tensor]]]
"""Noise and labels for each step of the generator in a round."""


def rounds(
    start: nn.ModuleDict,
    generator: nn.Sequential,
    labels: dict[str, Tensor],
    batches: Batches,
    generator_batches: GeneratorBatches,
    num_rounds: int,
    sgd: dict[str, float],
    settings: dict[str, Any],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The global weights, and those of the generator."""
    server, generator = copy.deepcopy(start), copy.deepcopy(generator)
    num_classes = start["classifier"].out_features
    total = sum(len(y) for y in labels.values())
    for t in range(num_rounds):
        mean = {name: torch.zeros_like(leaf, dtype=torch.float64) for name, leaf in server.state_dict().items()}
        sent = {}
        for client, own in labels.items():
            model = copy.deepcopy(server).train()
            optimizer = torch.optim.SGD(model.parameters(), **sgd)
            generator.eval()
            for x, y, counts, noise, drawn, drawn_noise in batches(client, t):
                optimizer.zero_grad()
                scores = model["classifier"](model["features"](x))
                loss = F.cross_entropy(scores[counts], y[counts])
                if t > 0:
                    with torch.no_grad():
                        target = model["classifier"](generator(with_class(noise, y, num_classes))).softmax(-1)
                        made = generator(with_class(drawn_noise, drawn, num_classes))
                    agreement = F.kl_div(scores[counts].log_softmax(-1), target[counts], reduction="batchmean")
                    teaching = F.cross_entropy(model["classifier"](made)[counts], drawn[counts])
                    decay = settings["decay"] ** t
                    loss = loss + decay * (settings["alpha"] * teaching + settings["beta"] * agreement)
                loss.backward()
                optimizer.step()
            sent[client] = model
            for name, leaf in model.state_dict().items():
                mean[name] += len(own) / total * leaf.double()
        server.load_state_dict({name: leaf.to(server.state_dict()[name].dtype) for name, leaf in mean.items()})
        train_generator(generator, sent, labels, generator_batches(t), num_classes, settings)
    return server.state_dict(), generator.state_dict()


def train_generator(
    generator: nn.Sequential,
    models: dict[str, nn.ModuleDict],
    labels: dict[str, Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    num_classes: int,
    settings: dict[str, Any],
) -> None:
    generator.train()
    optimizer = torch.optim.Adam(generator.parameters(), lr=settings["lr"], weight_decay=0.01)
    everyone = torch.cat(list(labels.values()))
    for noise, y in batches:
        optimizer.zero_grad()
        z = generator(with_class(noise, y, num_classes))
        loss = settings["eta"] * diversity(noise, z)
        for client, model in models.items():
            share = torch.stack([(labels[client] == c).sum() / (everyone == c).sum() for c in y])
            loss = loss + (F.cross_entropy(model["classifier"](z), y, reduction="none") * share).mean()
        loss.backward()
        optimizer.step()


def with_class(noise: Tensor, y: Tensor, num_classes: int) -> Tensor:
    return torch.cat([noise, F.one_hot(y, num_classes).float()], dim=1)


def diversity(noise: Tensor, z: Tensor) -> Tensor:
    """Pair by pair."""
    n = len(z)
    terms = [((noise[i] - noise[j]) ** 2).mean() * (z[i] - z[j]).abs().mean() for i in range(n) for j in range(n)]
    return torch.exp(-torch.stack(terms).mean())
