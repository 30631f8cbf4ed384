"""FedDistill: clients send the mean scores that they give each class, and learn from those of the others.

Jeong, Oh, Kim, Park, Bennis, Kim: Communication-Efficient On-Device Machine Learning: Federated Distillation and
Augmentation under Non-IID Private Data, NeurIPS 2018 workshop on Machine Learning on the Phone. We know of no code of
the authors'; third parties' are zhuangdizhu/FedGen, `userFedDistill.py`, and TsingZ0/PFLlib, `clientfd.py`.

Sends: class means of scores, and which classes it has. Keeps: its whole model. Server: plain mean of each class's
scores over the clients that have it; for each client over the others.

Departures:
1. Means are of scores before the softmax, and the softmax of a mean is what is learnt, as in FedGen; PFLlib takes the
   mean scores themselves as probabilities.
2. The second term is the cross-entropy with what is learnt, as in the paper. FedGen takes the divergence, which has the
   same gradient.
3. Means are over the batches of a client's last epoch; over all epochs of a round in public code, in FedGen even over
   all rounds so far.
4. A class that a client does not have does not count. In FedGen it counts as scores of 0, and every sum is divided by
   one example too many.
5. A client that does not take part counts with what it sent last. In public code it does not count.
6. What a client learns is of the other clients, as in the paper; of all, with its own, as in public code, is a setting.
7. An example whose class nobody has sent is learnt from its label alone.
8. Federated augmentation, the paper's second part, by which clients complete their data from a generator that the
   server trains on examples that they upload, is left out.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import Method, NonNegative, Uploads
from protofed.api.requests import Objective
from protofed.api.task import ClientId
from protofed.data.batches import Batch
from protofed.methods.families import OwnWeights
from protofed.nn.networks import Model
from protofed.prototypes import class_means
from protofed.prototypes.class_means import ClassSums, Prototypes
from protofed.tree import Params, Tree, record


@record
class SentScores:
    """What the server knows: the last mean scores of each client, and their sums."""

    total: Tensor  # (C, C) in float64, the sum over clients
    owners: Tensor  # (C,), how many clients have sent scores of the class
    sent: dict[ClientId, Prototypes]  # of scores, so that D is C


@dataclass(frozen=True)
class FedDistill(Method[SentScores, Prototypes, OwnWeights, Prototypes]):
    tags = ("personal", "heterogeneous")
    distillation_weight: NonNegative = 1.0
    """γ, how much the mean scores count beside the label. At 0 clients train alone."""
    teacher: Literal["others", "all"] = "others"
    """Whose mean scores a client learns: those of the other clients, or those of all, with its own."""

    private = ("*",)

    def init_server(self, server: ServerContext) -> SentScores:
        size = server.num_classes
        nothing = class_means.no_prototypes(size, size)
        return summed(dict.fromkeys(sorted(server.spec.clients), nothing), size)

    def message_for(self, state: SentScores, client: ClientId) -> Prototypes:
        """F̂ of the client: the mean over those that have the class."""
        total, owners, own = state.total, state.owners, state.sent.get(client)
        if self.teacher == "others" and own is not None:
            total, owners = total - own.mean, owners - own.is_known.to(owners.dtype)
        mean = (total / owners.clamp(min=1)[:, None]).float()
        return Prototypes(torch.where((owners > 0)[:, None], mean, 0.0), owners)

    def upload_spec(self, state: SentScores, server: ServerContext) -> Prototypes:
        return class_means.no_prototypes(server.num_classes, server.num_classes)

    def aggregate(self, state: SentScores, uploads: Uploads[Prototypes], server: ServerContext) -> SentScores:
        return summed({**state.sent, **dict(uploads)}, server.num_classes)

    def init_memory(self, client: ClientContext, message: Prototypes) -> OwnWeights:
        return OwnWeights(client.initial_params())

    def local_weights(self, message: Prototypes, memory: OwnWeights) -> Params:
        return memory.params

    async def train(
        self, client: ClientContext, message: Prototypes, memory: OwnWeights
    ) -> Reply[Prototypes, OwnWeights]:
        fold = ScoreSums(client.num_classes)
        params, sums = await client.fit(Objective(self.loss), params=memory.params, context=(message,), fold=fold)
        return Reply(class_means.ownership(sums.prototypes()), OwnWeights(params))

    def loss(self, model: Model, batch: Batch, message: Prototypes) -> Tensor:
        """Cross-entropy with the label, and γ times that with the softmax of the class's mean scores."""
        scores = model.logits(batch.x)
        teacher = message.mean[batch.y].softmax(-1)  # (B, C)
        distillation = F.cross_entropy(scores, teacher, reduction="none") * message.is_known[batch.y]
        return batch.cross_entropy(scores) + self.distillation_weight * batch.mean(distillation)


@dataclass(frozen=True)
class ScoreSums:
    """The statistic behind mean scores, for the fold of a fit."""

    num_classes: int

    def __call__(self, model: Model, batch: Batch, *context: Tree) -> ClassSums:
        return class_means.class_sums(model.logits(batch.x), batch.y, batch.weight, self.num_classes)


def summed(sent: dict[ClientId, Prototypes], num_classes: int) -> SentScores:
    """What clients have sent, with the sums over them."""
    total, owners = torch.zeros(num_classes, num_classes, dtype=torch.float64), torch.zeros(num_classes)
    for client in sorted(sent):
        total, owners = total + sent[client].mean, owners + sent[client].is_known
    return SentScores(total, owners, sent)
