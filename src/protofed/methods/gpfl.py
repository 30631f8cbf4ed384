"""GPFL: every client learns shared features and features of its own at once, through one valve with two settings.

Zhang, Hua, Wang, Song, Xue, Ma, Cao, Guan: GPFL: Simultaneously Learning Global and Personalized Feature Information
for Personalized Federated Learning, ICCV 2023. Authors' code: TsingZ0/GPFL, `clientgp.py` and `servergp.py`.

Sends: the weights of everything but the classifier, with those of the valve and the embeddings of the classes. Keeps:
its classifier, and its shares of the classes. Server: mean weighted by the number of examples.

Departures:
1. Both conditions of the valve are made of the embeddings that a client received. In the authors' code they are made of
   those that it has trained before, and are 0 in the first round.
2. The distance of a feature vector to the embedding of its class is taken for each example, and the mean of these
   counts; the authors' code takes one norm over all numbers of a batch.
3. μ is half of the squared length in the loss, of which the gradient is the weight decay of the authors' code with SGD.
4. The valve and the embeddings work on what the classifier reads: the output of the projection where the network has
   one.
5. Valve, embeddings and the rest train with the configured optimiser; the authors' code has one for each, with one
   rate.
6. Between rounds a client is tested with the server's weights and its own classifier, as in the authors' code.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofed.api.contexts import ClientContext
from protofed.api.method import NonNegative
from protofed.api.task import ClientId, TaskSpec
from protofed.data.batches import Batch
from protofed.methods._shared.models import CLASSIFIER, embedded, embedding_dim
from protofed.methods.families import OwnWeights, PrivateParts, Weights
from protofed.nn.networks import Model, Parts, matching
from protofed.prototypes.contrast import EPS
from protofed.tree import record

EMBEDDINGS = "categories.weight"
GUIDES = ("valve.*", "categories.*")


class ConditionalValve(nn.Module):
    """What is taken from features (B, P), given a condition (P,): ReLU((γ + 1) · z + β)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.LayerNorm(dim))
        self.beta = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.LayerNorm(dim))

    def forward(self, z: Tensor, condition: Tensor) -> Tensor:
        return F.relu(z * (self.gamma(condition) + 1) + self.beta(condition))


@record
class OwnHead(OwnWeights):
    """The memory of a client."""

    share: Tensor  # (C,), of each class among its examples


@dataclass(frozen=True)
class GPFL(PrivateParts[OwnHead]):
    tags = ("personal",)
    not_by_record = "its loss goes by how many examples of each class a client has"
    guidance_weight: NonNegative = 0.01
    """λ, how strongly shared features are drawn to the embedding of their class."""
    decay: NonNegative = 0.1
    """μ, how strongly valve and embeddings are kept short."""

    private = CLASSIFIER
    has_plain_classifier = False

    def networks(self, spec: TaskSpec, client: ClientId) -> Parts:
        parts = spec.model(client)
        dim = embedding_dim(spec, parts)
        return {**parts, "valve": ConditionalValve(dim), "categories": nn.Embedding(spec.num_classes, dim)}

    def init_memory(self, client: ClientContext, message: Weights) -> OwnHead:
        count = client.data.labels.bincount(minlength=client.num_classes)
        return OwnHead(matching(client.initial_params(), self.private), count / count.sum())

    def loss(self, model: Model, batch: Batch, message: Weights, memory: OwnHead) -> Tensor:
        """The local objective: cross-entropy of the own features, and what guides the shared ones."""
        z, received = embedded(model, batch.x), message.params[EMBEDDINGS]  # (B, P), (C, P)
        shared = model.valve(z, received.mean(0))
        angle = batch.cross_entropy(cosines(shared, model.params[EMBEDDINGS]))
        distance = batch.mean(torch.linalg.vector_norm(shared - received[batch.y], dim=-1))
        short = sum((leaf.square().sum() for leaf in matching(model.trainable, GUIDES).values()), z.new_zeros(()))
        own = batch.cross_entropy(model.classifier(model.valve(z, memory.share @ received)))
        return own + angle + self.guidance_weight * distance + self.decay / 2 * short

    def predict(self, model: Model, x: Tensor, message: Weights, memory: OwnHead | None) -> Tensor:
        """The classifier on the client's own features."""
        received = message.params[EMBEDDINGS]
        condition = received.mean(0) if memory is None else memory.share @ received
        return model.classifier(model.valve(embedded(model, x), condition))


def cosines(z: Tensor, embeddings: Tensor) -> Tensor:
    """Between features and the embeddings of all classes, (B, C)."""
    return F.normalize(z, dim=-1, eps=EPS) @ F.normalize(embeddings, dim=-1, eps=EPS).T
