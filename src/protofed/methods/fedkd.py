"""FedKD: every client has a mentor of its own and a mentee shared by all, which teach each other; updates travel
thinned.

Wu, Wu, Lyu, Huang, Xie: Communication-Efficient Federated Learning via Knowledge Distillation, Nature Communications
13, 2022. Authors' code: wuch15/FedKD, `run.py` and `model_bert.py`; for images TsingZ0/PFLlib, `clientkd.py`, by
others.

Sends: the mentee's weights, moved by the largest singular values of its update. Keeps: its mentor, and the map between
both features. Server: mean of what clients send, of which again the largest singular values count.

Departures:
1. Mentor and mentee have the task's network, with different first weights; the paper's mentor is larger. Nothing else
   depends on it.
2. Messages and uploads have weights, to which the thinned update has been added, as large as without: a record has one
   size in all rounds. The numbers are those of the paper, the bytes are not; the page says what factors would take.
3. The kernels of a convolution are one matrix, (out, in · height · width); the authors' code has no convolutions.
   PFLlib takes the singular values of each kernel by itself, and those of weights, not of updates.
4. The fewest singular values are kept whose squares reach the part; all, where all are needed. The authors' code keeps
   none then.
5. Updates that have no two dimensions, such as biases, and statistics of BatchNorm travel whole, as in the authors'
   code.
6. The divergence is the sum over classes, as in the paper; the authors' code takes the mean over classes too.
7. The hidden states are what the classifiers read; the paper's transformers also compare attention and all layers. One
   linear map takes the mentee's to the mentor's, as in PFLlib.
8. The distillation losses are divided by the sum of both losses, but at least by a bound that is a setting: a client
   that has learnt its examples well would else divide by nearly 0. The authors' code has no bound; PFLlib clips
   gradients at norm 10.
9. Clients count by their numbers of examples in the mean, as in all methods here; equally in the authors' code.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Interval
from torch import Tensor, nn

from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import Positive
from protofed.api.task import ClientId, TaskSpec
from protofed.data.batches import Batch
from protofed.methods._shared.models import embedding_dim
from protofed.methods.families import OwnWeights, PartSharing, Totals, Weights, WeightUpload
from protofed.nn.networks import Model, Parts
from protofed.tree import Params

Part = Annotated[float, Interval(gt=0, le=1)]


@dataclass(frozen=True)
class FedKD(PartSharing):
    tags = ("personal",)
    first_energy: Part = 0.95
    """T_start: the part of an update's squared singular values that is kept in the first rounds."""
    last_energy: Part = 0.98
    """T_end: the part that is kept in the last round. Between them it changes by the same amount in every round."""
    least_loss: Positive = 0.1
    """What the distillation losses are divided by at least."""

    private = ("features.*", "projection.*", "classifier.*", "adapter.*")
    has_plain_classifier = False

    def networks(self, spec: TaskSpec, client: ClientId) -> Parts:
        """The mentor under the task's names, the mentee, and the map from the mentee's features to the mentor's."""
        mentor, mentee = spec.model(client), spec.model(client)
        adapter = nn.Linear(embedding_dim(spec, mentee), embedding_dim(spec, mentor), bias=False)
        return {**mentor, **{f"mentee_{part}": module for part, module in mentee.items()}, "adapter": adapter}

    def energy(self, round: int, num_rounds: int) -> float:
        """T(t), the part of the squared singular values that is kept in round t, counted from 0."""
        return self.first_energy + (round + 1) / num_rounds * (self.last_energy - self.first_energy)

    async def train(
        self, client: ClientContext, message: Weights, memory: OwnWeights
    ) -> Reply[WeightUpload, OwnWeights]:
        reply = await super().train(client, message, memory)
        energy = self.energy(client.round, client.num_rounds)
        thinned = moved(message.params, reply.upload.params, client.networks.trainable, energy)
        return Reply(WeightUpload(thinned, reply.upload.num_examples), reply.memory)

    def from_sum(self, state: Weights, totals: Totals, server: ServerContext) -> Weights:
        mean: Params = totals["upload"].value().params
        energy = self.energy(server.round, server.num_rounds)
        return Weights(moved(state.params, mean, server.networks.trainable, energy))

    def loss(self, model: Model, batch: Batch, message: Weights, memory: OwnWeights) -> Tensor:
        """The objectives of mentor and mentee together: each has its cross-entropy, the divergence from the other's
        probabilities, and the distance of their features, the latter two divided by both cross-entropies."""
        z = model.embedding(model.features(batch.x))
        mentee_z = mentee_embedding(model, batch.x)
        scores, mentee_scores = model.classifier(z), model.mentee_classifier(mentee_z)
        both = batch.cross_entropy(scores) + batch.cross_entropy(mentee_scores)
        divergences = divergence(scores, mentee_scores) + divergence(mentee_scores, scores)
        distance = (z - model.adapter(mentee_z)).square().mean(-1)
        return both + batch.mean(divergences + 2 * distance) / both.clamp(min=self.least_loss)


def mentee_embedding(model: Model, x: Tensor) -> Tensor:
    """What the mentee's classifier reads."""
    z: Tensor = model.mentee_features(x)
    return model.mentee_projection(z) if "mentee_projection" in model.networks.parts else z


def divergence(scores: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher ‖ scores) of the probabilities, (B,)."""
    own, other = scores.log_softmax(-1), teacher.log_softmax(-1)
    return (other.exp() * (other - own)).sum(-1)


def moved(start: Params, end: Params, names: tuple[str, ...], energy: float) -> Params:
    """The weights after the thinned update from `start` to `end`; what is not among the names is at its end."""
    return {
        name: leaf + thinned(end[name] - leaf, energy) if name in names else end[name] for name, leaf in start.items()
    }


def thinned(update: Tensor, energy: float) -> Tensor:
    """The update made of its largest singular values: the fewest whose squares sum to this part of all."""
    if update.ndim < 2:
        return update
    u, values, v = torch.linalg.svd(update.flatten(1).double(), full_matrices=False)
    squares = values.square().cumsum(0)
    count = int((squares < energy * squares[-1]).sum()) + 1
    kept: Tensor = u[:, :count] * values[:count] @ v[:count]
    return kept.view(update.shape).to(update.dtype)
