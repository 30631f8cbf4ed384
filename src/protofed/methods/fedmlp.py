"""FedMLP, a reconstruction: clients learn against class prototypes and against their mixtures with related classes.

Guo, Wang, Geng: Dynamic Heterogeneous Federated Learning with Multi-Level Prototypes, Pattern Recognition 153, 2024. No
code is public and this was made from the abstract: what the paper names is here, but every formula is ours.

Sends: weights, class prototypes, and which classes it has. Keeps: nothing. Server: mean of the weights by the number of
examples; unweighted mean of each class's prototypes over the clients that own it; semantic prototypes made of these.

Departures:
1. A semantic prototype is the mean of all class prototypes, weighted by a softmax of their cosines to that of the class
   over the temperature.
2. The regularisation by class prototypes is the squared distance to that of the own class, averaged over the dimensions
   of the feature.
3. The regularisation by semantic prototypes is −log softmax of the cosines to them over the same temperature.
4. The regularisation between tasks is KL(received model ‖ own model) of the predicted classes. It is off by default:
   the paper has it for tasks that change over time.
5. Weights and temperature are ours.
6. A client's prototypes are the running means of its last epoch by default; recomputed after training is a setting.
7. A class that no reply of a round holds keeps its prototype.
8. An example whose class has no prototype adds nothing to the regularisations but counts in the mean over the batch.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.api.contexts import ClientContext, Reply
from protofed.api.method import NonNegative, Positive
from protofed.data.batches import Batch
from protofed.methods.families import PrototypeSharing, PrototypeUpload, WeightsAndPrototypes
from protofed.nn.networks import Model
from protofed.prototypes import class_means, contrast
from protofed.prototypes.class_means import ClassSums, PrototypeMode, Prototypes
from protofed.tree import Nothing, Params, record


@record
class Levels:
    """What clients learn against."""

    classes: Prototypes  # the global prototype of each class
    semantic: Tensor  # (C, D), zero where the class has none


@dataclass(frozen=True)
class FedMLP(PrototypeSharing[Levels]):
    tags = ("global", "prototype", "reconstruction")
    pull_weight: NonNegative = 1.0
    """How strongly features are pulled to the prototype of their class."""
    semantic_weight: NonNegative = 0.1
    """The weight of the comparison with semantic prototypes."""
    temperature: Positive = 0.5
    """By what cosines are divided, between prototypes and of features with semantic prototypes."""
    retention_weight: NonNegative = 0.0
    """How strongly predictions are held to those of the received model, for tasks that change over time."""
    prototype_mode: PrototypeMode = "running"
    """Whether a client's prototypes are the running means of its last epoch or recomputed after training."""

    def no_prototypes(self, num_classes: int, dim: int) -> Levels:
        return Levels(class_means.no_prototypes(num_classes, dim), torch.zeros(num_classes, dim))

    def combine(self, sums: ClassSums, previous: Levels) -> Levels:
        classes = class_means.mean_of(sums, previous.classes)
        return Levels(classes, semantic_prototypes(classes, self.temperature))

    def prototype_loss(self, z: Tensor, batch: Batch, targets: Levels) -> Tensor:
        """The two regularisations by prototypes, per example, (B,)."""
        is_known = targets.classes.is_known
        label = torch.where(is_known, torch.arange(len(is_known), device=z.device), -1)
        pull = contrast.pull(z, batch.y, targets.classes.mean, is_known)
        semantic = contrast.cluster_contrast(z, batch.y, targets.semantic, label, self.temperature)
        return self.pull_weight * pull + self.semantic_weight * semantic

    async def train(
        self, client: ClientContext, message: WeightsAndPrototypes[Levels], memory: Nothing
    ) -> Reply[PrototypeUpload, Nothing]:
        if self.retention_weight:
            client = client.with_loss_term(self.retention, message.params)
        return await super().train(client, message, memory)

    def retention(self, model: Model, batch: Batch, received: Params) -> Tensor:
        """The regularisation between tasks: how far predictions are from those of the received model."""
        with torch.no_grad():
            target = model.frozen(received).logits(batch.x).log_softmax(-1)
        scores = model.logits(batch.x).log_softmax(-1)
        return self.retention_weight * batch.mean((target.exp() * (target - scores)).sum(-1))


def semantic_prototypes(classes: Prototypes, temperature: float) -> Tensor:
    """Each class's prototype, mixed with those of related classes, (C, D); zero for a class that has none."""
    means = classes.mean.double()
    unit = F.normalize(means, dim=-1, eps=contrast.EPS)
    logits = torch.where(classes.is_known, unit @ unit.T / temperature, contrast.ABSENT)  # (C, C)
    mixed = logits.softmax(-1) @ means
    return (mixed * classes.is_known[:, None]).to(classes.mean.dtype)
