"""FedCP: a policy divides the features of each example between the client's own head and the shared one.

Zhang, Hua, Wang, Song, Xue, Ma, Guan: FedCP: Separating Feature Information for Personalized Federated Learning via
Conditional Policy, KDD 2023. Authors' code: TsingZ0/FedCP, `clientcp.py` and `servercp.py`.

Sends: the weights of features and policy, and the mean of its own head and the shared one. Keeps: its own head. Server:
mean weighted by the number of examples.

Departures:
1. Noise of the policy is drawn in training only. The authors' code draws it in tests too, so that its predictions are
   random.
2. The direction of the own head is that of the head that a client's training began from, also in the first round, for
   which the authors' code draws one at random.
3. The discrepancy is taken over the rows of a batch that count.
4. The policy divides what the classifier reads: the output of the projection where the network has one. The discrepancy
   is of that too.
5. Between rounds a client is tested with the server's weights and its own head, as in the authors' code.
"""

import copy
from dataclasses import dataclass
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofed.api.contexts import ClientContext, Reply
from protofed.api.method import NonNegative
from protofed.api.requests import Objective
from protofed.api.task import ClientId, TaskSpec
from protofed.data.batches import Batch
from protofed.methods._shared.models import CLASSIFIER, embedded, embedding_dim
from protofed.methods.families import OwnWeights, PartSharing, Weights, WeightUpload
from protofed.nn.networks import Model, Parts, matching
from protofed.nn.precision import product
from protofed.prototypes.contrast import EPS
from protofed.tree import Params

SHARED_HEAD = ("shared_head.*",)
BANDWIDTHS = (10.0, 15.0, 20.0, 50.0)
"""Of the Gaussian kernels whose sum the discrepancy is taken with, as in the authors' code."""


@dataclass(frozen=True)
class FedCP(PartSharing):
    tags = ("personal",)
    discrepancy_weight: NonNegative = 1.0
    """λ, how strongly features are held to the distribution of those that the received weights give."""

    private = CLASSIFIER
    has_plain_classifier = False

    def networks(self, spec: TaskSpec, client: ClientId) -> Parts:
        """The task's parts, of which the classifier is the client's own head, the shared head and the policy."""
        parts = spec.model(client)
        dim = embedding_dim(spec, parts)
        policy = nn.Sequential(nn.Linear(dim, 2 * dim), nn.LayerNorm(2 * dim), nn.ReLU())
        return {**parts, "shared_head": copy.deepcopy(parts["classifier"]), "policy": policy}

    async def trained(self, client: ClientContext, message: Weights, memory: OwnWeights) -> Params:
        objective = Objective(self.loss, freezes=SHARED_HEAD)
        return await client.fit(objective, params=self.local_weights(message, memory), context=(message, memory))

    async def train(
        self, client: ClientContext, message: Weights, memory: OwnWeights
    ) -> Reply[WeightUpload, OwnWeights]:
        reply = await super().train(client, message, memory)
        head = {name: leaf for name, leaf in reply.upload.params.items() if name.startswith("shared_head.")}
        own = {name: reply.memory.params[name.replace("shared_head", "classifier", 1)] for name in head}
        sent = {**reply.upload.params, **{name: (leaf + own[name]) / 2 for name, leaf in head.items()}}
        return Reply(WeightUpload(sent, reply.upload.num_examples), reply.memory)

    def loss(self, model: Model, batch: Batch, message: Weights, memory: OwnWeights) -> Tensor:
        """The local objective: cross-entropy of both heads together, and how far features are from the received."""
        z = embedded(model, batch.x)  # (B, P)
        scores = both_heads(model, z, direction(memory.params), logistic(batch.normal(*z.shape)))
        statistics = model.networks.buffer_copies(model.params)  # in training they are written and not read
        frozen = embedded(model.at({**message.params, **memory.params, **statistics}), batch.x)
        return batch.cross_entropy(scores) + self.discrepancy_weight * discrepancy(z, frozen, batch.weight)

    def predict(self, model: Model, x: Tensor, message: Weights, memory: OwnWeights | None) -> Tensor:
        """Both heads, without noise."""
        own = matching(model.params, CLASSIFIER) if memory is None else memory.params
        return both_heads(model, embedded(model, x), direction(own))


def direction(head: Params) -> Tensor:
    """The sum over classes of the head's weights, at length 1, (P,): what features the head looks at."""
    matrices = [leaf for leaf in head.values() if leaf.ndim == 2]
    weight = matrices[-1]
    for earlier in reversed(matrices[:-1]):
        weight = weight @ earlier
    return F.normalize(weight.sum(0), dim=0, eps=EPS)


def both_heads(model: Model, z: Tensor, context: Tensor, noise: Tensor | float = 0.0) -> Tensor:
    """The sum of what the own head says of its share of the features, and the shared head of the rest, (B, C)."""
    own, shared = model.policy(z * context).chunk(2, dim=-1)  # (B, P) both
    share = (own - shared + noise).sigmoid()  # the softmax over the two
    return model.classifier(share * z) + model.shared_head((1 - share) * z)


def logistic(normal: Tensor) -> Tensor:
    """Draws of the logistic distribution, which is that of the difference of two Gumbel draws, made of normal ones."""
    ratio = normal / sqrt(2)
    return (-ratio).erfc().log() - ratio.erfc().log()  # log Φ / (1 − Φ)


def discrepancy(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """The squared maximum mean discrepancy between the rows of x and y that count."""
    pairs = weight[:, None] * weight / weight.sum().square().clamp(min=1)  # (B, B)
    kernels = kernel(x, x) + kernel(y, y) - 2 * kernel(x, y)
    return (pairs * kernels).sum()


def kernel(x: Tensor, y: Tensor) -> Tensor:
    """The sum over bandwidths a of exp(−d² / 2a), (B, B)."""
    squares = x.square().sum(-1)[:, None] + y.square().sum(-1) - 2 * product(x, y.T)
    return torch.stack([(-squares / (2 * a)).exp() for a in BANDWIDTHS]).sum(0)
