"""FedPCL: clients fuse the features of an encoder, and contrast them with the class prototypes of all clients.

Tan, Long, Ma, Liu, Zhou, Jiang: Federated Learning from Pre-Trained Models: A Contrastive Learning Approach,
NeurIPS 2022.

Sends: class prototypes, and which classes it has. Keeps: its encoder and fusion layer, and its prototypes. Server:
sends everyone the prototypes of all clients, and their unweighted mean for each class.

Written from the paper's two terms as `clientpcl.py` and `serverpcl.py` of github.com/TsingZ0/PFLlib have them, which
are not the authors', and from the authors' networks and prediction, `lib/models/models.py` and `lib/update.py` of
github.com/yuetan031/FedPCL.

Departures:
1. Both terms compare an example with prototypes, over all classes, as in PFLlib; over the other classes alone is a
   setting, which is how the authors' code once had it. What the authors' code runs now compares prototypes with the
   examples of a batch in two variations, and leaves out the global term.
2. The encoder is the task's features, and trains, as in PFLlib: random weights say little of an image. The paper and
   the authors' code freeze pre-trained encoders, which is a setting: a task that wants them builds its features so,
   and several encoders are one part that joins their outputs.
3. A frozen encoder is in evaluation mode always, as in the authors' code.
4. A client without prototypes of a class counts with the global ones, as in all public code; so does a client that has
   not sent any yet, as in PFLlib. The authors' code waits until all have.
5. In the first round nothing trains, since there are no prototypes, as in all public code.
6. The nearest own prototype predicts; for a class that the client does not have, the global one. The authors' code
   takes the classes alone that the client has. The nearest global prototype is a setting.
7. Nothing descends a cross-entropy of the classifier, as in the authors' code, and the classifier is not used.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor, nn

from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import Method, Positive, Uploads
from protofed.api.requests import Objective
from protofed.api.task import ClientId, TaskSpec
from protofed.api.views import Points
from protofed.data.batches import Batch
from protofed.methods._shared.models import embedding_dim
from protofed.nn.networks import Model, Parts
from protofed.nn.precision import product
from protofed.prototypes import class_means, contrast
from protofed.prototypes.class_means import ClassSums, Prototypes
from protofed.prototypes.contrast import ABSENT, EPS
from protofed.tree import Params, record


class FrozenEncoder(nn.Module):
    """An encoder that does not train and is in evaluation mode always."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder.requires_grad_(False)

    def train(self, mode: bool = True) -> Self:
        return super().train(False)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.encoder(x)
        return z


@record
class Shared:
    """The prototypes of all clients in the order of their names, and their mean."""

    clients: Tensor  # (N, C, P), those that a client has not are the global ones
    owned: Tensor  # (N, C), 1 where a client sent one
    average: Prototypes  # (C, P), the global prototypes


@record
class Own:
    params: Params
    prototypes: Prototypes


@dataclass(frozen=True)
class FedPCL(Method[Shared, Shared, Own, Prototypes]):
    tags = ("personal", "prototype", "heterogeneous")
    has_plain_classifier = False
    temperature: Positive = 0.07
    """τ, by which similarities are divided in both terms."""
    rivals: Literal["all", "others"] = "all"
    """The denominator of both terms: the prototypes of all classes, or of the other classes alone."""
    width: Annotated[int, Ge(1)] = 256
    """P, the size of the fused features."""
    encoder: Literal["frozen", "trained"] = "trained"
    """Whether the task's features stay as they are, or train too."""
    inference: Literal["own", "global"] = "own"
    """Whose prototypes predict: the client's, with the global ones for classes that it has not, or the global ones."""

    private = ("*",)

    def networks(self, spec: TaskSpec, client: ClientId) -> Parts:
        """The task's parts, none of which trains but perhaps the encoder, and the fusion layer."""
        parts = spec.model(client)
        fusion = nn.Sequential(nn.Linear(embedding_dim(spec, {"features": parts["features"]}), self.width), nn.ReLU())
        idle = {name: part.requires_grad_(False) for name, part in parts.items() if name != "features"}
        features = FrozenEncoder(parts["features"]) if self.encoder == "frozen" else parts["features"]
        return {**idle, "features": features, "fusion": fusion}

    # ---- the server's half

    def init_server(self, server: ServerContext) -> Shared:
        shape = len(server.spec.clients), server.num_classes
        average = class_means.no_prototypes(server.num_classes, self.width)
        return Shared(torch.zeros(*shape, self.width), torch.zeros(shape), average)

    def message_for(self, state: Shared, client: ClientId) -> Shared:
        return state

    def upload_spec(self, state: Shared, server: ServerContext) -> Prototypes:
        return state.average

    def aggregate(self, state: Shared, uploads: Uploads[Prototypes], server: ServerContext) -> Shared:
        """Everyone's last prototypes, and their mean (lib/utils.py, proto_aggregation)."""
        places = {client: k for k, client in enumerate(sorted(server.spec.clients))}
        mean, owned = state.clients.clone(), state.owned.clone()
        for client, upload in uploads:
            mean[places[client]], owned[places[client]] = upload.mean, upload.count
        sent = [Prototypes(m, n) for m, n in zip(mean, owned, strict=True)]
        average = class_means.mean_of(class_means.summed(map(class_means.of_owner, sent)), state.average)
        return Shared(torch.where(owned[..., None] > 0, mean, average.mean), owned, average)

    def prototype_sets(self, state: Shared) -> Mapping[str, Points]:
        return {
            "clients' prototypes": class_means.points(Prototypes(state.clients, state.owned)),
            "global prototypes": class_means.points(state.average),
        }

    # ---- the client's half

    def init_memory(self, client: ClientContext, message: Shared) -> Own:
        none = class_means.no_prototypes(client.num_classes, self.width)
        return Own(client.initial_params(), none)

    def local_weights(self, message: Shared, memory: Own) -> Params:
        return memory.params

    async def train(self, client: ClientContext, message: Shared, memory: Own) -> Reply[Prototypes, Own]:
        params = memory.params
        if message.average.is_known.any():
            params = await client.fit(Objective(self.loss), params=params, context=(message,))
        sums = await client.total(FusedSums(client.num_classes), params)
        prototypes = class_means.ownership(sums.prototypes())
        return Reply(prototypes, Own(params, prototypes))

    def loss(self, model: Model, batch: Batch, shared: Shared) -> Tensor:
        """The global and the local term (clientpcl.py, train)."""
        unit, others = fused(model, batch.x), self.rivals == "others"
        known = shared.average.is_known
        of_average = shared.average.mean[None]  # (1, C, P)
        terms = [
            prototype_contrast(unit, batch.y, means, known, self.temperature, others)
            for means in (of_average, shared.clients)
        ]
        return batch.mean(terms[0] + terms[1])

    def predict(self, model: Model, x: Tensor, message: Shared, memory: Own | None) -> Tensor:
        """The nearest prototype (lib/update.py, test_inference_twoway)."""
        known = message.average
        if memory is not None and self.inference == "own":
            own = memory.prototypes
            mean = torch.where(own.is_known[:, None], own.mean, known.mean)
            known = replace(known, mean=mean, count=torch.maximum(own.count, known.count))
        scores = contrast.nearest(fused(model, x), known.mean, known.is_known)
        return torch.where(known.is_known.any(), scores, 0.0)

    def shown_features(self, model: Model, x: Tensor) -> Tensor:
        return fused(model, x)


@dataclass(frozen=True)
class FusedSums:
    """Sums of the fused features of each class."""

    num_classes: int

    def __call__(self, model: Model, batch: Batch) -> ClassSums:
        return class_means.class_sums(fused(model, batch.x), batch.y, batch.weight, self.num_classes)


def fused(model: Model, x: Tensor) -> Tensor:
    """The fused features, of length 1, (B, P) (lib/models/models.py, ProjandDeci)."""
    return F.normalize(model.fusion(model.features(x)), dim=-1, eps=EPS)


def prototype_contrast(
    unit: Tensor, y: Tensor, means: Tensor, is_known: Tensor, temperature: float, others: bool
) -> Tensor:
    """−log of the share of the own class's prototype, meant over the sets of prototypes (K, C, P), (B,). Zero for an
    example whose class has none, or whose class alone has one."""
    logits = product(unit, means.detach().flatten(0, 1).T).view(-1, *means.shape[:2]) / temperature  # (B, K, C)
    logits = torch.where(is_known, logits, ABSENT)
    is_own = torch.arange(len(is_known), device=y.device) == y[:, None]  # (B, C)
    own = torch.where(is_own[:, None], logits, 0.0).sum(-1)  # (B, K)
    rivals = torch.where(is_own[:, None], ABSENT, logits) if others else logits
    is_told = is_known[y] & (is_known & ~is_own).any(-1)
    return torch.where(is_told, (rivals.logsumexp(-1) - own).mean(-1), 0.0)
