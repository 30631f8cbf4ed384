"""FedDecorr: any method with a global model, whose clients also keep the dimensions of their features uncorrelated.

Shi, Liang, Zhang, Tan, Bai: Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated
Learning, ICLR 2023.

Sends: what the base method sends. Keeps: what the base method keeps. Server: what the base method does.

Departures:
1. The penalty has the scale of the authors' code by default, for which β was tuned: the squared correlations of
   different dimensions, averaged over the pairs and times the size of the batch. The paper prints ‖K‖² / d², which
   also counts the dimensions' own (a setting).
2. Features are what the classifier reads: the output of the projection if the network has one.
3. Rows that only fill a batch are left out. A batch in which one row counts adds nothing.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from protofed.api.contexts import ClientContext, Reply
from protofed.api.method import Method, NonNegative
from protofed.data.batches import Batch
from protofed.methods._shared.wrappers import Wrapper
from protofed.methods.fedavg import FedAvg
from protofed.nn.networks import Model

Scale = Literal["code", "paper"]
EPS = 1e-8


@dataclass(frozen=True)
class FedDecorr(Wrapper):
    tags = ("global", "wrapper")
    base: Method[Any, Any, Any, Any] = field(default_factory=FedAvg)
    """The method that is wrapped."""
    decorrelation_weight: NonNegative = 0.01
    """β, the weight of the penalty; 0 leaves the base method alone. The paper takes 0.1, with which minidigits
    learns less."""
    scale: Scale = "code"
    """Whether the penalty is that of the authors' code, over pairs of dimensions and times the size of the batch, or
    ‖K‖² / d² as in the paper."""

    async def train(self, client: ClientContext, message: Any, memory: Any) -> Reply[Any, Any]:
        if self.decorrelation_weight:
            client = client.with_loss_term(self.penalty)
        return await self.base.train(client, message, memory)

    def penalty(self, model: Model, batch: Batch) -> Tensor:
        """What every objective of the base method has added to it."""
        z = model.embedding(model.features(batch.x))
        return self.decorrelation_weight * correlation(z, batch.weight, self.scale)


def correlation(z: Tensor, weight: Tensor, scale: Scale) -> Tensor:
    """How much the dimensions of the features (B, D) are correlated over the rows that count."""
    rows, dim = weight.sum().clamp(min=1), z.shape[-1]
    centred = (z - (z * weight[:, None]).sum(0) / rows) * weight[:, None]
    variance = centred.square().sum(0) / (rows - 1).clamp(min=1)
    unit = centred / (variance + EPS).sqrt()
    correlations = unit.T @ unit / rows  # (D, D), K
    if scale == "paper":
        return correlations.square().mean()
    is_pair = ~torch.eye(dim, dtype=torch.bool, device=z.device)
    return rows * (correlations.square() * is_pair).sum() / max(1, dim * (dim - 1))
