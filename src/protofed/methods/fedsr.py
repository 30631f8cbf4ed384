"""FedSR: features are random, and simple: short, and saying of an example little more than its class.

Nguyen, Torr, Lim: FedSR: A Simple and Effective Domain Generalization Method for Federated Learning, NeurIPS 2022.

Sends: weights. Keeps: the reference distribution of each class, which it trains. Server: mean.

Departures:
1. Mean and spread of an example's features are made by one linear layer more, from what the classifier would read (the
   output of the projection if there is one), so that any network will do; the authors' encoder gives both itself.
2. The length is not squared, as in the authors' code, for which its weight was chosen; the paper prints the square (a
   setting).
3. Clients train for the configured number of epochs; the authors' code averages after every 5 batches.
4. Spreads are at least 10⁻⁶, and the scale before the reference distributions is positive: the absolute value of what
   is learnt. The authors' code bounds neither.
5. Scores are logarithms of the mean of the softmax over the samples. All examples share the draws, so that a prediction
   does not depend on the other examples of its batch.
"""

from dataclasses import dataclass
from math import log
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor, nn

from protofed.api.method import NonNegative
from protofed.api.task import ClientId, TaskSpec
from protofed.data.batches import Batch
from protofed.methods._shared.models import embedded, embedding_dim
from protofed.methods.families import OwnWeights, PartSharing, Weights
from protofed.nn.networks import Model, Parts, Patterns
from protofed.seeds import normal
from protofed.tree import Params

REFERENCE: Patterns = ("reference.*",)
SMALLEST = 1e-6


class ReferenceGaussians(nn.Module):
    """A normal distribution for each class, and how far examples are from that of their class."""

    def __init__(self, num_classes: int, dim: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(num_classes, dim))
        self.raw_spread = nn.Parameter(torch.ones(num_classes, dim))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, mean: Tensor, spread: Tensor, y: Tensor) -> Tensor:
        scale = self.scale.abs() + SMALLEST
        return divergence(scale * mean, scale * spread, self.mean[y], positive(self.raw_spread[y]))


@dataclass(frozen=True)
class FedSR(PartSharing):
    tags = ("global",)
    length_weight: NonNegative = 0.01
    """α_L2R, how strongly features are kept short."""
    information_weight: NonNegative = 0.001
    """α_CMI, how strongly features are kept from saying more than the class."""
    length: Literal["norm", "square"] = "norm"
    """Whether the length of a feature vector is squared."""
    samples: Annotated[int, Ge(1)] = 20
    """How many samples of the features a prediction averages over."""

    private = REFERENCE
    has_plain_classifier = False

    def networks(self, spec: TaskSpec, client: ClientId) -> Parts:
        parts = spec.model(client)
        dim = embedding_dim(spec, parts)
        return {**parts, "gaussian": nn.Linear(dim, 2 * dim), "reference": ReferenceGaussians(spec.num_classes, dim)}

    def public(self, state: Weights) -> tuple[Params, Weights] | None:
        return state.params, state

    def loss(self, model: Model, batch: Batch, message: Weights, memory: OwnWeights) -> Tensor:
        """The local objective: cross-entropy of one sample, its length, and the divergence from its class."""
        mean, spread = encoded(model, batch.x)
        z = mean + spread * batch.normal(*mean.shape)  # (B, P)
        length = z.square().sum(-1) if self.length == "square" else z.norm(dim=-1)
        information = model.reference(mean, spread, batch.y)
        penalty = self.length_weight * length + self.information_weight * information
        return batch.cross_entropy(model.classifier(z)) + batch.mean(penalty)

    def predict(self, model: Model, x: Tensor, message: Weights, memory: OwnWeights | None) -> Tensor:
        """The logarithm of the mean of the softmax over samples of the features."""
        mean, spread = encoded(model, x)
        noise = normal(torch.zeros((), dtype=torch.int64, device=x.device), self.samples, 1, mean.shape[-1])
        z = mean + spread * noise  # (S, B, P)
        scores = model.classifier(z.flatten(0, 1)).view(self.samples, x.shape[0], -1)
        return scores.log_softmax(-1).logsumexp(0) - log(self.samples)


def encoded(model: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and spread of the features of each example, (B, P) both."""
    mean, raw_spread = model.gaussian(embedded(model, x)).chunk(2, dim=-1)
    return mean, positive(raw_spread)


def positive(raw: Tensor) -> Tensor:
    return F.softplus(raw).clamp(min=SMALLEST)


def divergence(mean: Tensor, spread: Tensor, other_mean: Tensor, other_spread: Tensor) -> Tensor:
    """KL(N(mean, spread²) ‖ N(other_mean, other_spread²)), summed over the dimensions."""
    squares = spread.square() + (mean - other_mean).square()
    terms = other_spread.log() - spread.log() + squares / (2 * other_spread.square()) - 0.5
    return terms.sum(-1)
