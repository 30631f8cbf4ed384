"""FedProc: clients first learn to tell the global class prototypes apart, and go over to cross-entropy round by round.

Mu, Shen, Cheng, Geng, Fu, Zhang, Zhang: FedProc: Prototypical Contrastive Federated Learning on Non-IID Data, Future
Generation Computer Systems 143, 2023.

Sends: weights, class prototypes, and how many examples are behind each. Keeps: nothing. Server: mean of the weights by
the number of examples; mean of each class's prototypes by the number of its examples.

Departures:
1. An example whose class has no prototype is learnt by cross-entropy alone. So the whole first round is, as in the
   authors' code, and centres of the untrained model are not needed.
2. Prototypes are the means of features as the network gives them, and lengths are taken out where both are compared.
   The authors' network scales its features to length 1, and its classifier reads them so.
3. The contrast is taken on features, before a projection if the network has one; the authors' code takes the output of
   the projection.
4. A client's prototypes are the running means of its last epoch by default; in evaluation mode after training is a
   setting. The authors' code computes them in training mode.
5. A class that no reply of a round holds keeps its prototype, as in the authors' code.
6. The contrast has no temperature, as in all public code: similarities lie between −1 and 1, and it never falls below
   log(1 + (C − 1) e⁻²).
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.api.contexts import ClientContext, Reply
from protofed.api.private import PrivateClient
from protofed.api.requests import Objective
from protofed.data.batches import Batch
from protofed.methods._shared.one_step import PrototypesOneStep
from protofed.methods.families import PrototypeUpload, WeightsAndPrototypes
from protofed.nn.networks import Model
from protofed.prototypes import class_means, contrast
from protofed.prototypes.class_means import ClassSums, PrototypeMode, Prototypes
from protofed.tree import Nothing, Tree


@dataclass(frozen=True)
class FedProc(PrototypesOneStep[Prototypes]):
    tags = ("global", "prototype")
    prototype_weighting: Literal["examples", "uniform"] = "examples"
    """Whether a client's prototype counts in the global one by its number of examples, or as much as any other's."""
    schedule: Literal["open", "closed"] = "open"
    """α, the share of the contrast in round t of T, counted from 0: 1 − t/T (open), or 1 − t/(T−1) (closed), by which
    the last round is cross-entropy alone."""
    prototype_mode: PrototypeMode = "running"
    """Whether a client's prototypes are the running means of its last epoch or recomputed after training."""

    def no_prototypes(self, num_classes: int, dim: int) -> Prototypes:
        return class_means.no_prototypes(num_classes, dim)

    def added(self, prototypes: Prototypes) -> ClassSums:
        return class_means.by_count(prototypes)

    def combine(self, sums: ClassSums, previous: Prototypes) -> Prototypes:
        return class_means.mean_of(sums, previous)

    def share(self, round: int, num_rounds: int) -> float:
        """α, the share of the contrast in the objective of a round."""
        last = num_rounds if self.schedule == "open" else max(1, num_rounds - 1)
        return 1 - round / last

    def not_in_sums(self) -> str:
        is_by_client = self.prototype_weighting == "uniform"
        return 'counts clients alike in prototypes: set prototype_weighting to "examples"' if is_by_client else ""

    def record_loss(
        self, message: WeightsAndPrototypes[Prototypes], round: int, num_rounds: int
    ) -> tuple[Objective, tuple[Tree, ...]]:
        share = torch.tensor(self.share(round, num_rounds))
        return Objective(partial(self.shared_loss, share=share)), (message.prototypes,)

    async def train(
        self, client: ClientContext, message: WeightsAndPrototypes[Prototypes], memory: Nothing
    ) -> Reply[PrototypeUpload, Nothing]:
        context = message.prototypes, torch.tensor(self.share(client.round, client.num_rounds))
        params, prototypes = await class_means.fit_with_prototypes(
            client, Objective(self.shared_loss), message.params, context, self.prototype_mode
        )
        return Reply(PrototypeUpload(params, self.weighted(prototypes), client.num_examples), memory)

    async def train_privately(
        self, client: PrivateClient, message: WeightsAndPrototypes[Prototypes], memory: Nothing
    ) -> Reply[PrototypeUpload, Nothing]:
        share = client.post(lambda: torch.tensor(self.share(client.round, client.num_rounds)))
        context = message.prototypes, share
        params = await client.fit(Objective(self.shared_loss), params=message.params, context=context)
        prototypes = client.post(self.weighted, await client.prototypes(message.params))
        return Reply(PrototypeUpload(params, prototypes, client.num_examples), memory)

    def weighted(self, prototypes: Prototypes) -> Prototypes:
        """With the counts by which they count in the global ones."""
        return class_means.ownership(prototypes) if self.prototype_weighting == "uniform" else prototypes

    def shared_loss(self, model: Model, batch: Batch, targets: Prototypes, share: Tensor) -> Tensor:
        """The local objective: α times the contrast and 1 − α times cross-entropy."""
        z = model.features(batch.x)  # (B, D)
        alpha = share * targets.is_known[batch.y]  # (B,)
        cross_entropy = F.cross_entropy(model.scores(z), batch.y, reduction="none")
        return batch.mean((1 - alpha) * cross_entropy + alpha * self.prototype_loss(z, batch, targets))

    def prototype_loss(self, z: Tensor, batch: Batch, targets: Prototypes) -> Tensor:
        """The global prototypical contrast: −log softmax of the cosines to the prototypes, (B,)."""
        classes = torch.arange(len(targets.count), device=z.device)
        label = torch.where(targets.is_known, classes, -1)
        return contrast.cluster_contrast(z, batch.y, targets.mean, label, temperature=1.0)
