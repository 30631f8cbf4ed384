"""CFL: one model for all, until clients pull it in different directions; then they part into clusters, again and again.

Sattler, Müller, Samek: Clustered Federated Learning: Model-Agnostic Distributed Multi-Task Optimization Under Privacy
Constraints, IEEE TNNLS 2021. Authors' code: felisat/clustered-federated-learning, `fl_devices.py` and the notebook.

Sends: weights. Keeps: nothing. Server: mean of each cluster's weights; cuts a cluster in two where its mean update is
short and its longest is not.

Departures:
1. Clusters are cut by complete linkage of cosine similarities, as in the authors' code. The paper's bipartition, by
   which the highest similarity across the cut is lowest, is what single linkage gives (a setting).
2. The condition on the gap between clusters is a setting that is off by default; the authors' code has none.
3. A cluster is only cut in a round in which all its clients reply. The paper has all take part, always.
4. Clients count by their numbers of examples in the mean of weights and in that of updates, as in all methods here;
   equally in the authors' code.
5. Updates are those of the parameters. Statistics of BatchNorm, which the paper does not consider, are averaged within
   clusters.
6. The paper leads a new client down the tree of cuts by its update. Here the server has no such tree: a client that it
   has never met is given the model that all had before the first cut.
7. A client uses the model of its cluster. The notebook gives it the best of all models on the way down, by its
   validation examples.
8. What clients send is neither permuted nor encrypted, which the paper shows to be possible.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import Method, NonNegative, Uploads
from protofed.api.requests import Objective
from protofed.api.task import ClientId
from protofed.api.views import Observed, Relation
from protofed.methods._shared.losses import cross_entropy
from protofed.methods._shared.mixing import entry, stacked, weighted_mean
from protofed.methods.families import Averages, Weights, WeightUpload
from protofed.tree import Nothing, Params, record

Linkage = Literal["complete", "single"]


@record
class Clusters:
    params: Params  # (K, …), of each cluster
    cluster: dict[ClientId, Tensor]  # (), whose model the client has
    undivided: Params  # the model that all had before the first cut


@dataclass(frozen=True)
class CFL(Averages, Method[Clusters, Weights, Nothing, WeightUpload]):
    tags = ("personal",)
    stationary_norm: NonNegative = 0.25
    """ε₁: a cluster may be cut when the mean of its clients' updates is shorter. It depends on network and learning
    rate: the paper advises a tenth of the longest mean update seen."""
    progress_norm: NonNegative = 0.5
    """ε₂: and only if the longest update of one of its clients is longer."""
    gap: NonNegative = 0.0
    """γ_max: and only if √((1 − α)/2) is greater, where α is the highest similarity of updates across the cut."""
    first_round: Annotated[int, Ge(0)] = 10
    """Rounds that pass before a cluster may be cut."""
    smallest: Annotated[int, Ge(2)] = 3
    """A cluster of fewer clients is not cut."""
    linkage: Linkage = "complete"
    """How a cut is found: "complete" keeps the least similar clients of a cluster similar, "single" makes the most
    similar clients of different clusters as different as can be."""

    def init_server(self, server: ServerContext) -> Clusters:
        params = server.initial_params()
        return Clusters(stacked([params]), dict.fromkeys(sorted(server.spec.clients), torch.tensor(0)), params)

    def message_for(self, state: Clusters, client: ClientId) -> Weights:
        return Weights(entry(state.params, int(state.cluster[client])) if client in state.cluster else state.undivided)

    def upload_spec(self, state: Clusters, server: ServerContext) -> WeightUpload:
        return WeightUpload(state.undivided, torch.tensor(0))

    def aggregate(self, state: Clusters, uploads: Uploads[WeightUpload], server: ServerContext) -> Clusters:
        """Cuts clusters, and takes the mean of the weights of each that is then there."""
        sent, models, groups = dict(uploads), list[Params](), list[list[ClientId]]()
        for k, members in enumerate(clusters_of(state)):
            before = entry(state.params, k)
            for group in self.cut(members, before, sent, server):
                replied = [(sent[c].params, self.weight_of(sent[c].num_examples)) for c in group if c in sent]
                models.append(weighted_mean(replied) if replied else before)
                groups.append(group)
        cluster = {client: torch.tensor(k) for k, group in enumerate(groups) for client in group}
        undivided = models[0] if len(models) == 1 else state.undivided
        return Clusters(stacked(models), {client: cluster[client] for client in state.cluster}, undivided)

    def cut(
        self, members: list[ClientId], before: Params, sent: Mapping[ClientId, WeightUpload], server: ServerContext
    ) -> list[list[ClientId]]:
        """The cluster, or the two that it parts into."""
        if server.round < self.first_round or len(members) < self.smallest or not all(c in sent for c in members):
            return [members]
        names = server.networks.trainable
        ways = [torch.cat([(sent[c].params[n].double() - before[n]).flatten() for n in names]) for c in members]
        weights = torch.tensor([self.weight_of(sent[c].num_examples) for c in members], dtype=torch.float64)
        updates = torch.stack(ways)  # (n, |θ|)
        mean = weights / weights.sum() @ updates
        if mean.norm() >= self.stationary_norm or updates.norm(dim=-1).max() <= self.progress_norm:
            return [members]
        similarity = cosines(updates)
        is_second = bipartition(similarity, self.linkage)
        across = similarity[is_second][:, ~is_second].max()
        if self.gap and ((1 - across) / 2).clamp(min=0).sqrt() <= self.gap:
            return [members]
        sides = list(zip(members, is_second.tolist(), strict=True))
        return [[client for client, second in sides if second is half] for half in (False, True)]

    def relations(self, state: Clusters, observed: Observed) -> Mapping[str, Relation]:
        ids, cluster = list(state.cluster), torch.stack(list(state.cluster.values()))
        together = (cluster[:, None] == cluster).float()
        return {"clusters": Relation(together, ids, ids, "1 for clients of one model", groups=cluster.tolist())}

    def local_weights(self, message: Weights, memory: Nothing) -> Params:
        return message.params

    async def train(self, client: ClientContext, message: Weights, memory: Nothing) -> Reply[WeightUpload, Nothing]:
        params = await client.fit(Objective(cross_entropy), params=message.params)
        return Reply(WeightUpload(params, client.num_examples), memory)


def clusters_of(state: Clusters) -> list[list[ClientId]]:
    """The clients of each cluster."""
    count = len(next(iter(state.params.values())))
    return [[client for client, own in state.cluster.items() if own == k] for k in range(count)]


def cosines(updates: Tensor) -> Tensor:
    """The similarity of each two updates, (n, n). An update of length 0 is like no other."""
    direction = updates / updates.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    similarity: Tensor = direction @ direction.T
    return similarity


def bipartition(similarity: Tensor, method: Linkage) -> Tensor:
    """Which clients the second of two clusters has, (n,): the first one has the first client."""
    from scipy.cluster.hierarchy import cut_tree, linkage  # slow imports that few runs need
    from scipy.spatial.distance import squareform

    distance = (1 - similarity).clamp(min=0).fill_diagonal_(0)
    tree = linkage(squareform(distance.cpu().numpy(), checks=False), method)
    return torch.from_numpy(cut_tree(tree, n_clusters=[2])[:, 0] != 0)
