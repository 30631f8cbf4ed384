"""FedPC: clients are clustered once by their prototypes; clusters share extractors by similarity, heads stay personal.

Liu, Wang, Liu, Ma: Personalized federated learning method based on prototype clustering mechanism, Journal on
Communications, 2025 (in Chinese).

Sends: the weights of everything but the classifier, class prototypes, and which classes it has; once, before the first
round, the prototypes of the initial weights. Keeps: its classifier. Server: clusters the clients; in each round the
mean of each cluster's weights and prototypes, then for each cluster a mean over all clusters by their similarity.

Departures:
1. The paper gives neither the number of clusters nor the number of principal components: 5 (a setting, 0 chooses by
   silhouette) and 10; k-means++ with 10 restarts. Fewer clients than clusters form as many clusters as clients.
2. A class that a client lacks is a zero in the clustering: at common initial weights, which classes there are is the
   signal.
3. Alg. 1 writes one global extractor; here each cluster has its own, as in Eq. (7) and (8).
4. Eq. (5) compares the classes that both clusters have; no such class is similarity 0, a negative cosine is 0, and a
   cluster's similarity to itself is 1. The weights of Eq. (6) are nearly equal; a softmax and equal ones are settings.
5. Eq. (7) runs over the clusters that have the class, with their weights scaled to sum 1.
6. Eq. (3) is the squared error averaged over the dimensions of the feature, mean over a batch's examples, as in
   FedProto's code (`distance`). As printed, Σ over a batch's classes of Euclidean distances, it draws the non-negative
   features to zero: on CIFAR-10 under the paper's protocol the method then stays at chance. The readings in between and
   the printed one, with 1e-12 under the root, are settings. The text also speaks of pushing other classes away, which
   no equation does.
7. In the first round there are no prototypes to learn against: those of the clustering come from random weights.
8. Means within a cluster weight by examples, as Eq. (1) and as all methods here; the text says that they are
   unweighted (a setting, for both).
9. A cluster that nobody replies for enters Eq. (8) with the extractor that it had, and a class that no reply of its
   cluster holds with its prototype; the paper has all clients take part.
10. A client that was not there for the clustering joins the nearest cluster when it first takes part; the paper leaves
    this open. If that fails, it trains from the mean of all clusters, and its weights are not aggregated.
11. Between rounds a client is tested with its cluster's extractor and its own head; the paper tests after training.
12. The paper does not say which model its global accuracy, GM, is of. `[evaluation] global_models` measures three: the
    mean extractor under the mean of the heads, with the nearest global prototype, and under the initial head.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor

from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.evaluation import Reading
from protofed.api.method import Clients, Method, Uploads
from protofed.api.requests import Objective
from protofed.api.task import ClientId
from protofed.api.views import Observed, Points, Relation
from protofed.methods._shared.cluster_models import BetweenClusters, Description, for_everyone, mean_by_size
from protofed.methods._shared.mixing import entry, stacked
from protofed.methods._shared.models import CLASSIFIER
from protofed.methods.families import OwnWeights, PrototypeUpload
from protofed.nn.networks import matching, without
from protofed.prototypes import class_means
from protofed.prototypes.class_means import Prototypes
from protofed.prototypes.clusters import members_mean, similarity_shares
from protofed.prototypes.kmeans import Partition, no_partition, partitioned
from protofed.tree import Mean, Params, record


@record
class Clusters:
    params: Params  # the extractor that each cluster trains from, entries (J, ...)
    prototypes: Prototypes  # what each cluster learns against, (J, C, D) and (J, C)
    sent: Prototypes  # what each cluster's clients sent, (J, C, D) and (J, C)
    assignment: dict[ClientId, Tensor]  # (), the cluster of each client; −1 where it has none
    partition: Partition


@record
class ClusterMessage:
    params: Params
    prototypes: Prototypes  # (C, D) and (C,)
    is_assigned: Tensor  # (), whether the client has a cluster


@dataclass(frozen=True)
class FedPC(BetweenClusters, Method[Clusters, ClusterMessage, OwnWeights, PrototypeUpload]):
    tags = ("core", "personal", "prototype", "server-side")
    num_clusters: Annotated[int, Ge(0)] = 5
    """J in Eq. (5): the number of clusters; 0 takes the one of 2 to 10 with the best silhouette."""
    pca_dims: Annotated[int, Ge(1)] = 10
    """The number of principal components that clients are clustered by, at most as many as there are clients."""

    private = CLASSIFIER

    # ---- who belongs together

    def init_server(self, server: ServerContext) -> Clusters:
        params = {name: leaf[None] for name, leaf in without(server.initial_params(), CLASSIFIER).items()}
        assignment = {client: torch.tensor(-1) for client in sorted(server.spec.clients)}
        empty = stacked([class_means.no_prototypes(server.num_classes, server.feature_dim)])
        return Clusters(params, empty, empty, assignment, no_partition(empty.mean.numel()))

    def setup(self, state: Clusters, clients: Clients) -> Clusters:
        """Clusters the clients by the prototypes of their initial weights, steps 2 to 6 of Alg. 1."""
        described = self.described(state, clients)
        points = torch.stack(list(described.values()))  # (N, C·D)
        partition, labels = partitioned(points, self.num_clusters, self.pca_dims, clients.server.generator)
        count = len(partition.centres)
        params = {name: leaf.repeat_interleave(count, 0) for name, leaf in state.params.items()}
        empty = stacked([entry(state.prototypes, 0)] * count)
        assignment = {**state.assignment, **dict(zip(described, labels.unbind(), strict=True))}
        return Clusters(params, empty, empty, assignment, partition)

    def round(self, state: Clusters, clients: Clients) -> Clusters:
        """A round, before which clients without a cluster join the nearest."""
        if any(state.assignment[client] < 0 for client in clients.ids):
            joined = {c: state.partition.nearest(p[None])[0] for c, p in self.described(state, clients).items()}
            state = replace(state, assignment={**state.assignment, **joined})
        return super().round(state, clients)

    def described(self, state: Clusters, clients: Clients) -> dict[ClientId, Tensor]:
        """What clients without a cluster are clustered by, (C·D,)."""
        empty = entry(state.sent, 0)
        like = Description(empty.mean, empty.count)
        uploads = clients.run(self.describe, lambda client: self.message_for(state, client), like)
        return {client: upload.mean.flatten() for client, upload in uploads if state.assignment[client] < 0}

    async def describe(
        self, client: ClientContext, message: ClusterMessage, memory: OwnWeights
    ) -> Reply[Description, OwnWeights]:
        """The client's prototypes under the initial weights, Eq. (2); none, and no work, if it has a cluster."""
        if message.is_assigned:
            none = class_means.no_prototypes(*message.prototypes.mean.shape)
            return Reply(Description(none.mean, none.count), memory)
        prototypes = class_means.ownership(await class_means.of_client(client, client.initial_params()))
        return Reply(Description(prototypes.mean, prototypes.count), memory)

    # ---- rounds

    def message_for(self, state: Clusters, client: ClientId) -> ClusterMessage:
        cluster = int(state.assignment.get(client, -1))
        if cluster < 0:
            nothing = class_means.no_prototypes(*state.sent.mean.shape[1:])
            return ClusterMessage(mean_extractor(state), nothing, torch.tensor(False))
        params, prototypes = entry((state.params, state.prototypes), cluster)
        return ClusterMessage(params, prototypes, torch.tensor(True))

    def group(self, state: Clusters, client: ClientId, upload: PrototypeUpload) -> Hashable:
        """The cluster of the client."""
        return int(state.assignment[client])

    def upload_spec(self, state: Clusters, server: ServerContext) -> PrototypeUpload:
        params, prototypes = entry((state.params, state.sent), 0)
        return PrototypeUpload(params, prototypes, torch.tensor(0))

    def aggregate(self, state: Clusters, uploads: Uploads[PrototypeUpload], server: ServerContext) -> Clusters:
        """Means within clusters, steps 12 to 14 of Alg. 1, then between them, Eq. (5) to (8)."""
        count = len(state.partition.centres)
        means, replies = [Mean() for _ in range(count)], [list[tuple[Prototypes, float]]() for _ in range(count)]
        for client, upload in uploads:
            cluster = int(state.assignment[client])
            if cluster >= 0:
                weight = self.weight_of(upload.num_examples)
                means[cluster].add(upload.params, weight)
                replies[cluster].append((upload.prototypes, weight))
        params = [means[j].value() if means[j].weight else entry(state.params, j) for j in range(count)]
        sent = stacked([members_mean(replies[j], entry(state.sent, j)) for j in range(count)])
        mixed, blended = self.between(params, sent)
        return replace(state, params=mixed, prototypes=blended, sent=sent)

    def prototype_sets(self, state: Clusters) -> Mapping[str, Points]:
        return {"cluster prototypes": class_means.points(state.prototypes)}

    def relations(self, state: Clusters, observed: Observed) -> Mapping[str, Relation]:
        """How alike the prototypes are that clients were clustered by, and what clusters take from each other."""
        start = observed.server.initial_params()
        sent = {c: observed.class_means(c, start).mean.flatten().double() for c in observed.ids}
        points, (ids, axes) = torch.stack(list(sent.values())), (list(sent), ("1st component", "2nd component"))
        groups = [int(state.assignment[client]) for client in ids]
        plane = F.pad((points - state.partition.origin) @ state.partition.axes[:2].T, (0, 2))[:, :2]
        cosines = F.normalize(points, dim=-1) @ F.normalize(points, dim=-1).T
        shares = similarity_shares(state.sent, self.rho, self.temperature)  # (J, J), Eq. (6)
        names = [f"cluster {j}" for j in range(len(shares))]
        return {
            "similarity of clients' initial prototypes": Relation(
                cosines, ids, ids, "cosine", groups=groups, layout=plane, axes=axes
            ),
            "what clusters take from clusters": Relation(shares, names, names, "ρ"),
        }

    def init_memory(self, client: ClientContext, message: ClusterMessage) -> OwnWeights:
        return OwnWeights(matching(client.initial_params(), CLASSIFIER))

    def local_weights(self, message: ClusterMessage, memory: OwnWeights) -> Params:
        return {**message.params, **memory.params}

    async def train(
        self, client: ClientContext, message: ClusterMessage, memory: OwnWeights
    ) -> Reply[PrototypeUpload, OwnWeights]:
        start = self.local_weights(message, memory)
        params, prototypes = await class_means.fit_with_prototypes(
            client, Objective(self.loss), start, (message.prototypes,), self.prototype_mode
        )
        means = class_means.ownership(prototypes)
        upload = PrototypeUpload(without(params, CLASSIFIER), means, client.num_examples)
        return Reply(upload, OwnWeights(matching(params, CLASSIFIER)))

    # ---- a model for everyone, in three readings

    def global_models(
        self, state: Clusters, memories: Mapping[ClientId, OwnWeights], server: ServerContext
    ) -> dict[str, Reading]:
        return for_everyone(mean_extractor(state), state.sent, memories, server)


def mean_extractor(state: Clusters) -> Params:
    """The mean of the clusters' extractors by their numbers of clients."""
    count = len(state.partition.centres)
    assigned = torch.stack(list(state.assignment.values()))
    return mean_by_size(state.params, assigned[assigned >= 0].bincount(minlength=count))
