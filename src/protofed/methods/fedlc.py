"""FedLC: FedAvg whose clients lower the scores of the classes that they have few examples of before the softmax.

Zhang, Li, Li, Xu, Wu, Ding, Wu: Federated Learning with Label Distribution Skew via Logits Calibration, ICML 2022.
The authors' code is not public; the loss is also in FL-bench (`src/client/fedlc.py`) and PFLlib (`clientlc.py`).

Sends: weights. Keeps: nothing. Server: mean weighted by the number of examples.

Departures:
1. The sum in the paper's loss leaves the true class out, so that the loss has no lower bound, and training diverges
   (KarhouTam/FL-bench, issue 5). As in both public implementations the sum is over all classes here; without the true
   class is a setting.
2. A class that the client does not have, whose margin is infinite, is left out of the sum, as by FedDecorr's authors
   (bytedance/FedDecorr, `fedlogitcal.py`); FL-bench gives it a count of 1e-8, which comes to the same. PFLlib counts
   the examples of all clients together; here a client counts its own, as in the paper.
3. Without the true class in the sum, a client of a single class has nothing to learn from, and its loss is 0.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from protofed.api.contexts import ClientContext
from protofed.api.method import NonNegative
from protofed.api.requests import Objective
from protofed.data.batches import Batch
from protofed.methods.families import GlobalModel, Weights
from protofed.nn.networks import Model
from protofed.prototypes.contrast import ABSENT
from protofed.tree import Nothing, Params


@dataclass(frozen=True)
class FedLC(GlobalModel[Nothing]):
    tags = ("global",)
    margin_weight: NonNegative = 1.0
    """τ, how much the scores of rare classes are lowered."""
    competitors: Literal["all classes", "other classes"] = "all classes"
    """What the true class competes with in the loss: the softmax of all classes, or as in the paper's formula all but
    the true one, whose loss has no lower bound."""

    async def trained(self, client: ClientContext, message: Weights, memory: Nothing) -> Params:
        count = client.data.labels.bincount(minlength=client.num_classes)  # (C,)
        return await client.fit(Objective(self.calibrated_loss), params=message.params, context=(count,))

    def calibrated_loss(self, model: Model, batch: Batch, count: Tensor) -> Tensor:
        scores = calibrated(model.logits(batch.x), count, self.margin_weight)
        if self.competitors == "all classes":
            return batch.cross_entropy(scores)
        return batch.mean(loss_against_others(scores, batch.y))


def calibrated(scores: Tensor, count: Tensor, weight: float) -> Tensor:
    """f_c(x) − τ n_c^(−1/4), of the classes that the client has, (B, C)."""
    margin = weight * count.clamp(min=1).to(scores.dtype) ** -0.25
    return torch.where(count > 0, scores - margin, ABSENT)


def loss_against_others(scores: Tensor, y: Tensor) -> Tensor:
    """−log of exp f_y over the sum of exp f_c of the other classes, per example, (B,)."""
    is_true = torch.arange(scores.shape[-1], device=y.device) == y[:, None]
    others = torch.where(is_true, ABSENT, scores)
    own = scores.gather(-1, y[:, None]).squeeze(-1)
    has_others = (others > ABSENT / 2).any(-1)
    return torch.where(has_others, others.logsumexp(-1) - own, 0.0)
