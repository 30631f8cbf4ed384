"""FedPLVM: clients and server cluster prototypes, so that a domain that varies more has more of them.

Wang, Bian, Zhang, Chen, Xu: Taming Cross-Domain Representation Variance in Federated Prototype Learning with
Heterogeneous Data Domains, NeurIPS 2024.

Sends: weights, and some prototypes of each class that it has. Keeps: nothing. Server: mean of the weights by the number
of examples; FINCH clusters the clients' prototypes of each class, and the clusters' means are the global prototypes.

Written from the authors' code, `main.py`, `utils/util.py` and `utils/update.py` of github.com/TriStonesWang/FedPLVM.

Departures:
1. A client sends at most so many prototypes of a class (a setting), since uploads have a fixed size; the paper sets no
   limit. While FINCH's coarsest partition has more clusters, the two nearest are joined, as FINCH does for a required
   number of clusters.
2. The terms of the prototypes weigh 10 by default; the authors' code has 100, which learns slowly on small tasks.
3. Cosines below 1e-4 count as 1e-4 in the contrast: a power below 1 has an infinite slope at 0, and none below. The
   features of the authors' networks are not negative.
4. A class that no reply of a round holds keeps its prototypes.
5. An example whose class has no prototype is learnt by cross-entropy alone, and counts in the mean over the batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Ge, Interval
from torch import Tensor

from protofed import tree
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
from protofed.prototypes import class_means
from protofed.prototypes.class_means import Prototypes
from protofed.prototypes.contrast import ABSENT, EPS
from protofed.prototypes.finch import cluster_means, finch
from protofed.tree import Mean, Nothing, Params, Ragged, record

SMALLEST_COSINE = 1e-4


@record
class Targets:
    """What clients learn against."""

    clusters: Annotated[Tensor, Ragged(fill=0)]  # (M, D), the global prototypes
    label: Annotated[Tensor, Ragged(fill=-1)]  # (M,), their classes; −1 where there is none
    average: Prototypes  # the mean of each class's global prototypes


@record
class Upload:
    params: Annotated[Params, WeightsRole()]
    mean: Annotated[Tensor, Prototype()]  # (C, J, D), the local prototypes; zero where there is none
    count: Annotated[Tensor, Count()]  # (C, J), 1 where there is a prototype, else 0
    num_examples: Annotated[Tensor, Count()]  # ()


State = WeightsAndPrototypes[Targets]


@dataclass(frozen=True)
class FedPLVM(Averages, Method[State, State, Nothing, Upload]):
    tags = ("global", "prototype", "server-side")
    prototype_weight: NonNegative = 10.0
    """λ, the weight of what the prototypes add to the loss."""
    sparsity: Annotated[float, Interval(gt=0, le=1)] = 0.25
    """α, the power of the cosines in the contrast. At 1 it is the usual contrast."""
    temperature: Positive = 0.07
    """τ, by which the powers of the cosines are divided."""
    correction: bool = True
    """Whether features are also turned to the average prototype of their class."""
    most_prototypes: Annotated[int, Ge(1)] = 8
    """J, the most prototypes of a class that a client sends."""

    # ---- the server's half

    def init_server(self, server: ServerContext) -> State:
        empty = class_means.no_prototypes(server.num_classes, server.feature_dim)
        none = Targets(torch.zeros(1, server.feature_dim), torch.tensor([-1]), empty)
        return WeightsAndPrototypes(server.initial_params(), none)

    def message_for(self, state: State, client: ClientId) -> State:
        return state

    def public(self, state: State) -> tuple[Params, State] | None:
        return state.params, state

    def upload_spec(self, state: State, server: ServerContext) -> Upload:
        shape = server.num_classes, self.most_prototypes
        return Upload(state.params, torch.zeros(*shape, server.feature_dim), torch.zeros(shape), torch.tensor(0))

    def aggregate(self, state: State, uploads: Uploads[Upload], server: ServerContext) -> State:
        mean, prototypes, device = Mean(), {}, state.prototypes.label.device
        for client, upload in uploads:
            mean.add(upload.params, self.weight_of(upload.num_examples))
            prototypes[client] = Prototypes(upload.mean.cpu(), upload.count.cpu())
        with torch.device("cpu"):  # a few prototypes are quicker there than the launches that a GPU would take
            sent = [prototypes[client] for client in sorted(prototypes)]
            targets = self.clustered(sent, tree.map(Tensor.cpu, state.prototypes))
        return WeightsAndPrototypes(mean.value(), tree.map(lambda leaf: leaf.to(device), targets))

    def clustered(self, sent: list[Prototypes], previous: Targets) -> Targets:
        """The global level: clusters of each class's local prototypes (util.py, cluster_protos_finch), and their means
        (proto_aggregation_cluster)."""
        clusters, label, average, count = [], [], previous.average.mean.clone(), previous.average.count.clone()
        for c in range(len(count)):
            own = torch.cat([p.mean[c][p.is_known[c]] for p in sent])  # (N, D)
            found = coarsest_means(own) if len(own) else previous.clusters[previous.label == c]
            if len(own):
                average[c], count[c] = found.double().mean(0), len(own)
            clusters.append(found)
            label += [c] * len(found)
        return Targets(torch.cat(clusters), torch.tensor(label, dtype=torch.int64), Prototypes(average, count))

    def prototype_sets(self, state: State) -> Mapping[str, Points]:
        targets = state.prototypes
        known = targets.label >= 0
        return {
            "global prototypes": Points(targets.clusters[known], targets.label[known]),
            "average prototypes": class_means.points(targets.average),
        }

    # ---- the client's half

    def local_weights(self, message: State, memory: Nothing) -> Params:
        return message.params

    async def train(self, client: ClientContext, message: State, memory: Nothing) -> Reply[Upload, Nothing]:
        params = await client.fit(Objective(self.loss), params=message.params, context=(message.prototypes,))
        z = await client.map(features, params)
        with torch.device("cpu"):
            local = self.local_prototypes(z.cpu(), client.data.labels.cpu(), client.num_classes)
        mean, count = local.mean.to(z.device), local.count.to(z.device)
        return Reply(Upload(params, mean, count, client.num_examples), memory)

    def local_prototypes(self, z: Tensor, y: Tensor, num_classes: int) -> Prototypes:
        """The local level: means of the clusters of each class's features (util.py, cluster_protos_finch)."""
        mean = torch.zeros(num_classes, self.most_prototypes, z.shape[-1])
        count = torch.zeros(num_classes, self.most_prototypes)
        for c in torch.unique(y).tolist():
            found = coarsest_means(z[y == c], self.most_prototypes)
            mean[c, : len(found)], count[c, : len(found)] = found, 1
        return Prototypes(mean, count)

    def loss(self, model: Model, batch: Batch, targets: Targets) -> Tensor:
        """The local objective (update.py, update_weights_proposed)."""
        z = model.features(batch.x)
        term = sparse_contrast(z, batch.y, targets.clusters, targets.label, self.sparsity, self.temperature)
        if self.correction:
            term = term + correction(z, batch.y, targets.average)
        return batch.cross_entropy(model.scores(z)) + self.prototype_weight * batch.mean(term)


def coarsest_means(points: Tensor, most: int | None = None) -> Tensor:
    """The means of FINCH's coarsest partition of more than one cluster, (J, D); no more than `most` of them."""
    labels = finch(points)[-1]
    if most is not None:
        labels = joined(points, labels, most)
    return cluster_means(points, labels).to(points.dtype)


def joined(points: Tensor, labels: Tensor, most: int) -> Tensor:
    """The clusters (n,) after the two whose means have the largest cosine were joined until so many were left."""
    while (count := int(labels.max()) + 1) > most:
        unit = F.normalize(cluster_means(points, labels), dim=-1, eps=EPS)
        cosines = product(unit, unit.T).fill_diagonal_(-torch.inf)
        first, second = sorted(divmod(int(cosines.argmax()), count))
        labels = torch.where(labels == second, first, labels)
        labels = labels - (labels > second).to(labels.dtype)
    return labels


def sparse_contrast(z: Tensor, y: Tensor, clusters: Tensor, label: Tensor, alpha: float, temperature: float) -> Tensor:
    """The α-sparsity prototype loss, (B,): −log of the share of the own class's prototypes, of exp(cosᵅ / τ). Zero for
    an example whose class has none (update.py, criterion_InfoNCE_alpha)."""
    unit = F.normalize(z.float(), dim=-1, eps=EPS)
    targets = F.normalize(clusters.detach().float(), dim=-1, eps=EPS)
    similarity = product(unit, targets.T).clamp(min=SMALLEST_COSINE).pow(alpha) / temperature
    logits = torch.where(label >= 0, similarity, ABSENT)  # (B, M)
    is_own = y[:, None] == label
    own = torch.where(is_own, logits, ABSENT)
    return torch.where(is_own.any(-1), logits.logsumexp(-1) - own.logsumexp(-1), 0.0)


def correction(z: Tensor, y: Tensor, average: Prototypes) -> Tensor:
    """2 (1 − cos)² to the average prototype of the class, (B,) (update.py, criterion_correction)."""
    cosine = F.cosine_similarity(z.float(), average.mean.detach()[y].float(), dim=-1, eps=EPS)
    return 2 * (1 - cosine).square() * average.is_known[y]
