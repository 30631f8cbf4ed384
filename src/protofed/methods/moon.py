"""MOON: FedAvg whose clients keep their features near the global model's and away from their own previous ones.

Li, He, Song: Model-Contrastive Federated Learning, CVPR 2021.

Sends: weights. Keeps: the weights it trained last. Server: mean weighted by the number of examples.

Departures:
1. A client that has not trained before has no previous model, and the contrast is left out in its first round (the
   authors' code does the same by an empty pool).
2. The contrast is taken on what the classifier reads: the output of the projection head if the network has one, as in
   the paper, and the features if not.
3. Both teachers are in evaluation mode.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.api.contexts import ClientContext
from protofed.api.method import NonNegative, Positive
from protofed.data.batches import Batch
from protofed.methods._shared.models import embedded
from protofed.methods.families import GlobalModel, Weights
from protofed.nn.networks import Model
from protofed.tree import Params, record


@record
class Previous:
    params: Params
    exists: Tensor  # (), 0 until the client has trained


@dataclass(frozen=True)
class Moon(GlobalModel[Previous]):
    tags = ("global",)
    contrast_weight: NonNegative = 1.0
    """μ in Eq. (4): the weight of the contrast. The paper takes 5 on CIFAR-10, 1 on CIFAR-100 and Tiny-ImageNet."""
    temperature: Positive = 0.5
    """τ in Eq. (3)."""

    def init_memory(self, client: ClientContext, message: Weights) -> Previous:
        return Previous(message.params, torch.tensor(0.0))

    def remember(self, params: Params, memory: Previous) -> Previous:
        return Previous(params, torch.tensor(1.0))

    def loss(self, model: Model, batch: Batch, message: Weights, memory: Previous) -> Tensor:
        """The local objective, Eq. (4)."""
        z = embedded(model, batch.x)
        with torch.no_grad():
            z_global = embedded(model.frozen(message.params), batch.x)
            z_previous = embedded(model.frozen(memory.params), batch.x)
        contrast = model_contrast(z, z_global, z_previous, self.temperature) * memory.exists
        return batch.cross_entropy(model.classifier(z)) + self.contrast_weight * batch.mean(contrast)


def model_contrast(z: Tensor, z_global: Tensor, z_previous: Tensor, temperature: float) -> Tensor:
    """−log of the global model's share in the similarity to both, per example, Eq. (3)."""
    to_global = F.cosine_similarity(z, z_global, eps=1e-8) / temperature
    to_previous = F.cosine_similarity(z, z_previous, eps=1e-8) / temperature
    return F.softplus(to_previous - to_global)
