"""FedROD: one body with two heads, a balanced one that all share and an own one that corrects it for the client.

Chen, Chao: On Bridging Generic and Personalized Federated Learning for Image Classification, ICLR 2022. The authors'
repository (hongyouc/Fed-RoD) has no code; the method is also in PFLlib (`clientrod.py`) and FL-bench
(`src/client/fedrod.py`).

Sends: the weights of the body and the generic head. Keeps: its personal head. Server: mean weighted by the number of
examples.

Departures:
1. The personal head is linear and is trained by the client alone. The paper's other variant, in which a network makes
   it of the client's class frequencies, is left out.
2. The personal head begins with zeros, so that a client that has never taken part predicts as all do. PFLlib begins
   with the generic head's weights; the paper does not say.
3. Both losses are descended in one step; their gradients do not meet, since the personal one stops at the features and
   at the generic scores, as in PFLlib. In FL-bench it goes on into the body.
4. A class that the client does not have is left out of the balanced softmax, as its prior of 0 says.
5. Of the paper's losses for the generic head there is the balanced softmax, its main one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from protofed.api.contexts import ClientContext
from protofed.api.method import NonNegative
from protofed.api.requests import Objective
from protofed.api.task import ClientId, TaskSpec
from protofed.data.batches import Batch
from protofed.methods._shared.models import embedding_dim
from protofed.methods.families import OwnWeights, PartSharing, Weights
from protofed.nn.networks import Model, Parts
from protofed.prototypes.contrast import ABSENT
from protofed.tree import Params


@dataclass(frozen=True)
class FedROD(PartSharing):
    tags = ("global", "personal")
    clients_use = "own models"
    balance: NonNegative = 1.0
    """γ, the power of a class's number of examples by which the softmax is balanced; at 0 the generic head learns by
    cross-entropy."""

    private = ("personal.*",)
    has_plain_classifier = False

    def networks(self, spec: TaskSpec, client: ClientId) -> Parts:
        parts = spec.model(client)
        personal = nn.Linear(embedding_dim(spec, parts), spec.num_classes)
        nn.init.zeros_(personal.weight)
        nn.init.zeros_(personal.bias)
        return {**parts, "personal": personal}

    def public(self, state: Weights) -> tuple[Params, Weights] | None:
        return state.params, state

    async def trained(self, client: ClientContext, message: Weights, memory: OwnWeights) -> Params:
        count = client.data.labels.bincount(minlength=client.num_classes)  # (C,)
        start = self.local_weights(message, memory)
        return await client.fit(Objective(self.both_losses), params=start, context=(count,))

    def both_losses(self, model: Model, batch: Batch, count: Tensor) -> Tensor:
        """The balanced softmax of the generic head, and the cross-entropy of both heads together, which moves the
        personal one alone."""
        embedding = model.embedding(model.features(batch.x))
        generic = model.classifier(embedding)
        together = generic.detach() + model.personal(embedding.detach())
        return batch.cross_entropy(balanced(generic, count, self.balance)) + batch.cross_entropy(together)

    def predict(self, model: Model, x: Tensor, message: Weights, memory: OwnWeights | None) -> Tensor:
        """The scores of the generic head, and at a client those of its personal head added."""
        embedding = model.embedding(model.features(x))
        generic = model.classifier(embedding)
        return generic if memory is None else generic + model.personal(embedding)


def balanced(scores: Tensor, count: Tensor, power: float) -> Tensor:
    """g_c(z) + γ log n_c, of the classes that the client has, (B, C). With γ = 0 all classes have the prior 1."""
    if not power:
        return scores
    prior = power * count.clamp(min=1).to(scores.dtype).log()
    return torch.where(count > 0, scores + prior, ABSENT)
