"""FedNTD: FedAvg whose clients keep the received model's opinion of the classes that an example is not of.

Lee, Jeong, Shin, Bae, Yun: Preservation of the Global Knowledge by Not-True Distillation in Federated Learning,
NeurIPS 2022.

Sends: weights. Keeps: nothing. Server: mean weighted by the number of examples.

Departures:
1. The temperature is 1, as in the authors' experiments; the class in their code has 3 (a setting).
2. The received model is in evaluation mode.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from protofed.api.method import NonNegative, Positive
from protofed.data.batches import Batch
from protofed.methods.families import GlobalModel, Weights
from protofed.nn.networks import Model
from protofed.prototypes.contrast import ABSENT
from protofed.tree import Nothing


@dataclass(frozen=True)
class FedNTD(GlobalModel[Nothing]):
    tags = ("global",)
    distillation_weight: NonNegative = 1.0
    """β, the weight of the not-true distillation."""
    temperature: Positive = 1.0
    """τ, by which the scores of both models are divided in the distillation."""

    def loss(self, model: Model, batch: Batch, message: Weights, memory: Nothing) -> Tensor:
        """The local objective: cross-entropy and the not-true distillation."""
        scores = model.logits(batch.x)  # (B, C)
        with torch.no_grad():
            received = model.frozen(message.params).logits(batch.x)
        distillation = not_true_divergence(scores, received, batch.y, self.temperature)
        return batch.cross_entropy(scores) + self.distillation_weight * batch.mean(distillation)


def not_true_divergence(scores: Tensor, teacher: Tensor, y: Tensor, temperature: float) -> Tensor:
    """τ² KL(teacher ‖ student) over the classes that an example is not of, (B,)."""
    is_true = torch.arange(scores.shape[-1], device=y.device) == y[:, None]  # (B, C)
    student, target = (
        torch.where(is_true, ABSENT, logits.float() / temperature).log_softmax(-1) for logits in (scores, teacher)
    )
    terms = target.exp() * (target - student)
    return temperature**2 * torch.where(is_true, 0.0, terms).sum(-1)
