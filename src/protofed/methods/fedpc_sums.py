"""FedPC for secure sums: clients find their clusters together, and the server reads sums over clients alone.

Liu, Wang, Liu, Ma: Personalized federated learning method based on prototype clustering mechanism, Journal on
Communications, 2025 (in Chinese). The paper encrypts prototypes; here nobody but the client sees them.

Sends: the weights of everything but the classifier, class prototypes, and which classes it has, added to the sums of
its cluster; before the first round, in several exchanges, a random projection of the prototypes of the initial weights,
added to the sums of the nearest centres. Keeps: its classifier, and the prototypes of the initial weights. Server:
moves the centres; in each round the mean of each cluster's weights and prototypes, then for each cluster a mean over
all clusters by their similarity.

Departures:
1. All of FedPC from the third on. Clients are clustered by a public random projection of their prototypes, not by
   principal components, which no sum has; by Lloyd's algorithm from several random starts in so many steps.
2. A cluster of fewer clients than `least_clients` is dissolved: its clients join the nearest of the others.
3. The server does not know who belongs to a cluster, so every client is sent the extractors and prototypes of all.
4. Behind a cluster's prototypes are the weights of its clients, by examples or alike, not their number.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from protofed import tree
from protofed.api import roles
from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.evaluation import Reading
from protofed.api.method import Clients
from protofed.api.requests import Objective
from protofed.api.roles import Count
from protofed.api.sums import Summand
from protofed.api.task import ClientId
from protofed.api.views import Points
from protofed.methods._shared.cluster_models import BetweenClusters, Description, for_everyone, mean_by_size
from protofed.methods._shared.mixing import entry, stacked
from protofed.methods._shared.models import CLASSIFIER
from protofed.methods._shared.sums import sums_over
from protofed.methods.families import OwnWeights, Summands, SumMethod, Totals
from protofed.nn.networks import matching, without
from protofed.prototypes import class_means
from protofed.prototypes.class_means import ClassSums, Prototypes
from protofed.prototypes.kmeans_sums import ClusterSums, added, first_centres, lloyd, memberships, moved, projection
from protofed.tree import Params, record


@record
class ClusterModels:
    """What every client is sent in a round."""

    params: Params  # the extractor that each cluster trains from, entries (J, ...)
    prototypes: Prototypes  # what each cluster learns against, (J, C, D) and (J, C)
    centres: Tensor  # (J, K), in the projection
    sizes: Tensor  # (J,), the clients that were nearest to each centre when clusters were found; 0 before


@record
class Known:
    """What the server knows."""

    public: ClusterModels
    sent: Prototypes  # what each cluster's clients sent, (J, C, D) and (J, C)


@record
class Places:
    """What every client is sent in a step of k-means by sums."""

    centres: Tensor  # (S, J, 1, K)
    nothing: Prototypes  # (C, D) and (C,)


@record
class Joined:
    """What a client says in it."""

    described: Description
    member: Annotated[Tensor, Count(of_examples=False)]  # (S, J, 1), 1 at the nearest centre


@record
class Member(OwnWeights):
    initial: Prototypes  # of the initial weights, (C, D) and (C,)


@record
class MemberUpload:
    params: Annotated[Params, roles.Weights()]
    prototypes: Prototypes
    num_examples: Annotated[Tensor, Count()]  # (J,), the client's examples at its cluster, else 0


@record
class Added:
    """What a client adds to its cluster."""

    params: Params
    prototypes: ClassSums


@dataclass(frozen=True)
class FedPCSums(BetweenClusters, SumMethod[Known, ClusterModels, Member, MemberUpload]):
    tags = ("personal", "prototype", "server-side")
    num_clusters: Annotated[int, Ge(1)] = 5
    """J in Eq. (5): the most clusters that there are."""
    projection_dims: Annotated[int, Ge(1)] = 32
    """The number of random directions that clients are clustered by."""
    starts: Annotated[int, Ge(1)] = 10
    """So many random starts are made side by side, and the tightest partition is kept. Each tells the server more."""
    lloyd_steps: Annotated[int, Ge(1)] = 6
    """Exchanges in which centres move, before the first round."""
    least_clients: Annotated[int, Ge(1)] = 3
    """A cluster of fewer clients is dissolved when clusters are found."""

    private = CLASSIFIER

    # ---- who belongs together

    def init_server(self, server: ServerContext) -> Known:
        params = {name: leaf[None] for name, leaf in without(server.initial_params(), CLASSIFIER).items()}
        empty = stacked([class_means.no_prototypes(server.num_classes, server.feature_dim)])
        return Known(ClusterModels(params, empty, torch.zeros(1, self.projection_dims), torch.zeros(1)), empty)

    def setup(self, state: Known, clients: Clients) -> Known:
        """Clusters the clients by the prototypes of their initial weights, steps 2 to 6 of Alg. 1."""
        exchange = self.exchange(state, clients)
        everybody = torch.zeros(1, 1, 1, self.projection_dims, dtype=torch.float64)
        mean = moved(everybody, exchange(everybody))[0, 0]
        start = first_centres(mean, self.num_clusters, self.starts, clients.server.generator)
        centres, sizes = self.large_ones(lloyd(exchange, start, self.lloyd_steps).centres[:, 0], exchange)
        params = {name: leaf.repeat_interleave(len(centres), 0) for name, leaf in state.public.params.items()}
        empty = stacked([entry(state.sent, 0)] * len(centres))
        return Known(ClusterModels(params, empty, centres.float(), sizes), empty)

    def large_ones(self, centres: Tensor, exchange: Callable[[Tensor], ClusterSums]) -> tuple[Tensor, Tensor]:
        """The centres (J, K) that enough clients are nearest to, or one, and how many these are, (J,)."""
        sizes = exchange(centres[None, :, None]).count[0, :, 0]
        is_large = sizes >= self.least_clients  # guard: clusters-of-enough-clients
        if is_large.all():
            return centres, sizes
        if not is_large.any():
            is_large = torch.arange(len(centres)) == sizes.argmax()
        return centres[is_large], exchange(centres[None, is_large, None]).count[0, :, 0]

    def exchange(self, state: Known, clients: Clients) -> Callable[[Tensor], ClusterSums]:
        """A step of k-means by sums."""
        nothing = entry(state.sent, 0)

        def step(centres: Tensor) -> ClusterSums:
            message = Places(centres.to(nothing.mean.dtype), nothing)
            like = Joined(Description(nothing.mean, nothing.count), torch.zeros(centres.shape[:3]))
            sums: ClusterSums = sums_over(clients, self.join, lambda _: message, like, self.joined)["points"].total
            return tree.map(lambda leaf: leaf.to(centres.device), sums)

        return step

    async def join(self, client: ClientContext, message: Places, memory: Member) -> Reply[Joined, Member]:
        """Which centres the client's prototypes under the initial weights, Eq. (2), are nearest to."""
        memory = await self.described(client, memory)
        member = memberships(self.point(memory.initial)[None], message.centres)
        return Reply(Joined(Description(memory.initial.mean, memory.initial.count), member), memory)

    def joined(self, upload: Joined, message: Places) -> Summands:
        """The projected prototypes, in the sums of the nearest centres."""
        point = self.point(Prototypes(upload.described.mean, upload.described.count))
        return {"points": (added(point[None], point.new_ones(1), upload.member), 1.0)}

    def summand_of(self, step: str) -> Summand:
        return self.joined if step == "join" else super().summand_of(step)

    async def described(self, client: ClientContext, memory: Member) -> Member:
        """The memory of a client that knows where it belongs."""
        if memory.initial.is_known.any():
            return memory
        initial = class_means.ownership(await class_means.of_client(client, client.initial_params()))
        return replace(memory, initial=initial)

    def point(self, initial: Prototypes) -> Tensor:
        """What a client is clustered by, (K,)."""
        flat = initial.mean.flatten().double()
        return (projection(0, len(flat), self.projection_dims) @ flat).to(initial.mean)

    def cluster(self, message: ClusterModels, initial: Prototypes) -> int:
        """The cluster that a client belongs to."""
        return int(memberships(self.point(initial)[None], message.centres[None, :, None]).argmax())

    # ---- rounds

    def message_for(self, state: Known, client: ClientId) -> ClusterModels:
        return state.public

    def message_spec(self, step: str, state: Known, client: ClientId) -> ClusterModels | Places:
        return Places(state.public.centres, entry(state.sent, 0)) if step == "join" else state.public

    def upload_spec(self, state: Known, server: ServerContext) -> MemberUpload:
        params, prototypes = entry((state.public.params, state.sent), 0)
        return MemberUpload(params, prototypes, torch.zeros(len(state.public.centres), dtype=torch.int64))

    @property
    def adds_to_one(self) -> bool:
        return True

    def summand(self, upload: MemberUpload, message: ClusterModels) -> Summands:
        """The client's weights and prototypes in the sums of its cluster, and at weight 0 in all others."""
        weights = (upload.num_examples > 0) if self.is_uniform else upload.num_examples
        own = Added(upload.params, class_means.of_owner(upload.prototypes))
        return {str(j): (own, float(weight)) for j, weight in enumerate(weights.tolist())}

    def from_sum(self, state: Known, totals: Totals, server: ServerContext) -> Known:
        """Means within clusters, steps 12 to 14 of Alg. 1, then between them, Eq. (5) to (8)."""
        public, params, sent = state.public, [], []
        for j in range(len(public.centres)):
            total, before = totals[str(j)], entry((public.params, state.sent), j)
            params.append(total.value().params if total.weight else before[0])
            sent.append(class_means.mean_of(total.total.prototypes, before[1]))
        mixed, blended = self.between(params, stacked(sent))
        return Known(replace(public, params=mixed, prototypes=blended), stacked(sent))

    def init_memory(self, client: ClientContext, message: ClusterModels | Places) -> Member:
        nothing = message.nothing if isinstance(message, Places) else entry(message.prototypes, 0)
        return Member(matching(client.initial_params(), CLASSIFIER), tree.map(torch.zeros_like, nothing))

    def local_weights(self, message: ClusterModels, memory: Member) -> Params:
        """Its cluster's extractor, or the mean of all if the client has not yet taken part, and its own head."""
        if not memory.initial.is_known.any():
            return {**mean_by_size(message.params, message.sizes), **memory.params}
        return {**entry(message.params, self.cluster(message, memory.initial)), **memory.params}

    def trained_weights(self, upload: MemberUpload, memory: Member) -> Params:
        return {**upload.params, **memory.params}

    async def train(self, client: ClientContext, message: ClusterModels, memory: Member) -> Reply[MemberUpload, Member]:
        memory = await self.described(client, memory)
        cluster = self.cluster(message, memory.initial)
        start, known = self.local_weights(message, memory), entry(message.prototypes, cluster)
        params, prototypes = await class_means.fit_with_prototypes(
            client, Objective(self.loss), start, (known,), self.prototype_mode
        )
        count = (torch.arange(len(message.centres)) == cluster) * client.num_examples
        upload = MemberUpload(without(params, CLASSIFIER), class_means.ownership(prototypes), count)
        return Reply(upload, replace(memory, params=matching(params, CLASSIFIER)))

    # ---- what is shown, and a model for everyone

    def prototype_sets(self, state: Known) -> Mapping[str, Points]:
        return {"cluster prototypes": class_means.points(state.public.prototypes)}

    def global_models(
        self, state: Known, memories: Mapping[ClientId, Member], server: ServerContext
    ) -> dict[str, Reading]:
        extractor = mean_by_size(state.public.params, state.public.sizes)
        return for_everyone(extractor, state.sent, memories, server)
