"""MP-FedCL (reconstruction): clients send several prototypes of each class, and learn by contrast with those of all.

Qiao, Munir, Adhikary, Le, Raha, Zhang, Hong: MP-FedCL: Multiprototype Federated Contrastive Learning for Edge
Intelligence, IEEE Internet of Things Journal, 2023.

Sends: weights, and some prototypes of each class that it has. Keeps: nothing. Server: mean of the weights by the number
of examples; puts the prototypes of all clients into one pool.

There is no public code. Written from the paper's abstract: k-means gives the prototypes of each class, the server pools
them, and clients descend their own loss and a supervised contrastive one against the pool.

Departures:
1. The contrast is the usual supervised one, over cosines, with the mean over the prototypes of the own class outside
   the logarithm. Its weight, the temperature and the number of clusters are ours.
2. The weights of all clients are averaged, and the classifier predicts.
3. K-means starts ten times by k-means++, and the tightest partition counts. A class of fewer examples than clusters has
   as many prototypes as examples.
4. The pool has the prototypes of the round's replies, the client's own among them. A class that no reply of a round
   holds keeps its prototypes.
5. An example whose class has no prototype is learnt by cross-entropy alone, and counts in the mean over the batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor

from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import Method, NonNegative, Positive, Uploads
from protofed.api.requests import Objective
from protofed.api.roles import Count, Prototype
from protofed.api.roles import Weights as WeightsRole
from protofed.api.task import ClientId
from protofed.api.views import Points
from protofed.data.batches import Batch
from protofed.methods._shared.models import features
from protofed.methods.families import Averages, WeightsAndPrototypes
from protofed.nn.networks import Model
from protofed.nn.precision import product
from protofed.prototypes.class_means import Prototypes
from protofed.prototypes.contrast import ABSENT, EPS
from protofed.prototypes.finch import cluster_means
from protofed.prototypes.kmeans import kmeans
from protofed.seeds import generator
from protofed.tree import Mean, Nothing, Params, Ragged, record


@record
class Pool:
    """The prototypes of all clients."""

    prototypes: Annotated[Tensor, Ragged(fill=0)]  # (M, D)
    label: Annotated[Tensor, Ragged(fill=-1)]  # (M,), their classes; −1 where there is none


@record
class Upload:
    params: Annotated[Params, WeightsRole()]
    mean: Annotated[Tensor, Prototype()]  # (C, J, D), the client's prototypes; zero where there is none
    count: Annotated[Tensor, Count()]  # (C, J), 1 where there is a prototype, else 0
    num_examples: Annotated[Tensor, Count()]  # ()


State = WeightsAndPrototypes[Pool]


@dataclass(frozen=True)
class MPFedCL(Averages, Method[State, State, Nothing, Upload]):
    tags = ("global", "prototype", "reconstruction")
    clusters: Annotated[int, Ge(1)] = 2
    """k, prototypes of a class that a client sends."""
    contrast_weight: NonNegative = 1.0
    """The weight of the contrast."""
    temperature: Positive = 0.07
    """By which cosines are divided."""

    # ---- the server's half

    def init_server(self, server: ServerContext) -> State:
        nothing = Pool(torch.zeros(1, server.feature_dim), torch.tensor([-1]))
        return WeightsAndPrototypes(server.initial_params(), nothing)

    def message_for(self, state: State, client: ClientId) -> State:
        return state

    def public(self, state: State) -> tuple[Params, State] | None:
        return state.params, state

    def upload_spec(self, state: State, server: ServerContext) -> Upload:
        shape = server.num_classes, self.clusters
        return Upload(state.params, torch.zeros(*shape, server.feature_dim), torch.zeros(shape), torch.tensor(0))

    def aggregate(self, state: State, uploads: Uploads[Upload], server: ServerContext) -> State:
        mean, sent = Mean(), {}
        for client, upload in uploads:
            mean.add(upload.params, self.weight_of(upload.num_examples))
            sent[client] = Prototypes(upload.mean, upload.count)
        return WeightsAndPrototypes(mean.value(), pooled([sent[client] for client in sorted(sent)], state.prototypes))

    def prototype_sets(self, state: State) -> Mapping[str, Points]:
        known = state.prototypes.label >= 0
        return {"clients' prototypes": Points(state.prototypes.prototypes[known], state.prototypes.label[known])}

    # ---- the client's half

    def local_weights(self, message: State, memory: Nothing) -> Params:
        return message.params

    async def train(self, client: ClientContext, message: State, memory: Nothing) -> Reply[Upload, Nothing]:
        params = await client.fit(Objective(self.loss), params=message.params, context=(message.prototypes,))
        z = await client.map(features, params)
        draws, y = generator(client.step_seed, "clusters"), client.data.labels.cpu()
        with torch.device("cpu"):  # a GPU would have to be asked after every step of k-means
            local = clustered(z.cpu(), y, client.num_classes, self.clusters, draws)
        mean, count = local.mean.to(z.device), local.count.to(z.device)
        return Reply(Upload(params, mean, count, client.num_examples), memory)

    def loss(self, model: Model, batch: Batch, pool: Pool) -> Tensor:
        """The local objective: cross-entropy, and the contrast with the pool."""
        z = model.features(batch.x)
        term = supervised_contrast(z, batch.y, pool.prototypes, pool.label, self.temperature)
        return batch.cross_entropy(model.scores(z)) + self.contrast_weight * batch.mean(term)


def clustered(z: Tensor, y: Tensor, num_classes: int, clusters: int, draws: torch.Generator) -> Prototypes:
    """The means of k clusters of each class's features (n, D): (C, J, D) and (C, J)."""
    mean, count = torch.zeros(num_classes, clusters, z.shape[-1]), torch.zeros(num_classes, clusters)
    for c in torch.unique(y).tolist():
        own = z[y == c]
        found = cluster_means(own, kmeans(own, min(clusters, len(own)), draws))
        mean[c, : len(found)], count[c, : len(found)] = found.to(z.dtype), 1
    return Prototypes(mean, count)


def pooled(sent: list[Prototypes], previous: Pool) -> Pool:
    """All prototypes of the round, and those from before of classes that nobody sent."""
    count = sent[0].count
    classes = torch.arange(len(count), device=count.device)[:, None].expand_as(count)  # (C, J)
    label = torch.cat([classes[p.is_known] for p in sent])
    stays = (previous.label >= 0) & ~torch.isin(previous.label, label)
    prototypes = torch.cat([previous.prototypes[stays], *(p.mean[p.is_known] for p in sent)])
    return Pool(prototypes, torch.cat([previous.label[stays], label]))


def supervised_contrast(z: Tensor, y: Tensor, prototypes: Tensor, label: Tensor, temperature: float) -> Tensor:
    """−log of the share of each prototype of the own class among all, meant over these, (B,). Zero for an example whose
    class has none."""
    unit = F.normalize(z.float(), dim=-1, eps=EPS)
    targets = F.normalize(prototypes.detach().float(), dim=-1, eps=EPS)
    logits = torch.where(label >= 0, product(unit, targets.T) / temperature, ABSENT)  # (B, M)
    is_own = (y[:, None] == label).to(logits.dtype)
    count = is_own.sum(-1)
    own = (logits * is_own).sum(-1) / count.clamp(min=1)
    return torch.where(count > 0, logits.logsumexp(-1) - own, 0.0)
