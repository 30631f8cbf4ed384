"""FedPer++ (reconstruction): FedPer whose body is held near the received one, and whose head is trained balanced.

Xu, Yan, Huang: FedPer++: Toward Improved Personalized Federated Learning on Heterogeneous and Imbalanced Data,
IJCNN 2022. Neither the paper nor code of it was at hand. What it aims at is taken from its title, the three terms from
common practice; with all of them off the method is FedPer.

Sends: the weights of everything but the classifier. Keeps: its classifier, and how many examples of each class it has.
Server: mean weighted by the number of examples.

Departures:
1. Features are held to those of the received body, by the squared error averaged over their dimensions; the received
   body is in evaluation mode. This is a guess at the paper's regularised local training.
2. Imbalance is met by adding the logarithm of the client's number of examples of a class to its score in training; a
   class that the client lacks counts as one example. This is a guess too.
3. The weight decay of the head is a penalty in the objective, on top of the optimiser's own weight decay.
4. As in FedPer here, the personal layers are the classifier, and between rounds a client is tested with the server's
   body and its own head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from protofed.api.contexts import ClientContext
from protofed.api.method import NonNegative
from protofed.data.batches import Batch
from protofed.methods._shared.models import CLASSIFIER
from protofed.methods.families import OwnWeights, PrivateParts, Weights
from protofed.nn.networks import Model, matching
from protofed.tree import record


@record
class HeadAndCounts(OwnWeights):
    count: Tensor  # (C,), the client's examples of each class


@dataclass(frozen=True)
class FedPerPlus(PrivateParts[HeadAndCounts]):
    tags = ("personal", "reconstruction")
    not_by_record = "its loss goes by how many examples of each class a client has"
    feature_weight: NonNegative = 0.1
    """How strongly features are held to those of the received body."""
    balanced: bool = True
    """Whether scores are balanced by the client's numbers of examples of each class while it trains."""
    head_decay: NonNegative = 5e-4
    """Weight decay of the head."""

    private = CLASSIFIER

    def init_memory(self, client: ClientContext, message: Weights) -> HeadAndCounts:
        count = torch.bincount(client.data.labels, minlength=client.num_classes)  # (C,)
        return HeadAndCounts(matching(client.initial_params(), self.private), count)

    def loss(self, model: Model, batch: Batch, message: Weights, memory: HeadAndCounts) -> Tensor:
        """The local objective: cross-entropy and the three terms, each of which may be off."""
        z = model.features(batch.x)
        scores = model.scores(z)
        if self.balanced:
            scores = balanced(scores, memory.count)
        loss = batch.cross_entropy(scores)
        if self.feature_weight:
            with torch.no_grad():
                received = model.frozen(message.params).features(batch.x)
            loss = loss + self.feature_weight * batch.mean((z - received).square().mean(-1))
        if self.head_decay:
            squares = [leaf.square().sum() for leaf in matching(model.trainable, CLASSIFIER).values()]
            loss = loss + self.head_decay / 2 * torch.stack(squares).sum()
        return loss


def balanced(scores: Tensor, count: Tensor) -> Tensor:
    """Scores (B, C) of a softmax that knows how often each class occurs."""
    return scores + count.clamp(min=1).log()
