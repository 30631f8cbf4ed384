"""IFCA: several global models; in each round a client trains the one that fits its data best.

Ghosh, Chung, Yin, Ramchandran: An Efficient Framework for Clustered Federated Learning, NeurIPS 2020.

Sends: weights, and which model they were trained from; with restarts also losses, before the first round. Keeps: which
model that was. Server: mean of each model over the clients that chose it.

Departures:
1. Clients send trained weights (the paper's model averaging), not gradients.
2. Clients count by their numbers of examples in the mean of their model, as in all methods here; equally in the paper.
3. A model that no client chose stays as it was.
4. The first model starts from the common initial weights, the others from seeds derived from the run's. The paper's
   restarts are whole runs from different random starts; here several starts are compared before the first round, by the
   loss that clients have with the best model of each, and only one is run. This is much cheaper, and says less: models
   that have not trained differ little.
5. Between rounds a client has the newest version of the model that it chose last; one that has not chosen yet has the
   first. After the last round every client chooses once more.
6. All weights are clustered; the paper also shares the lower layers among all clusters, on FEMNIST.
7. Losses are compared on all of a client's training examples, in evaluation mode and unvaried.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from protofed.api import roles
from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import Clients
from protofed.api.requests import Objective
from protofed.api.roles import Count
from protofed.api.task import ClientId
from protofed.methods._shared.losses import cross_entropy, summed_cross_entropy
from protofed.methods._shared.mixing import entry, stacked
from protofed.methods.families import Averages, Summands, SumMethod, Totals, Weights
from protofed.seeds import derive_seed
from protofed.tree import Nothing, Params, record


@record
class Choice:
    cluster: Tensor  # (), the model that the client trained last


@record
class ClusterUpload:
    params: Annotated[Params, roles.Weights()]
    count: Annotated[Tensor, Count()]  # (K,), the client's examples at the model that it chose, else 0


@record
class LowestLoss:
    loss: Tensor  # (), the mean over the client's examples, of the model that fits them best
    num_examples: Annotated[Tensor, Count()]  # ()


@dataclass(frozen=True)
class IFCA(Averages, SumMethod[Weights, Weights, Choice, ClusterUpload]):
    tags = ("personal",)
    num_clusters: Annotated[int, Ge(1)] = 4
    """k, the number of models. The paper takes 4 for MNIST in four rotations, 2 for CIFAR-10 in two."""

    restarts: Annotated[int, Ge(1)] = 1
    """How many sets of k random models are tried before the first round. The one in which clients have the lowest mean
    loss, each with its best model, is kept."""

    def init_server(self, server: ServerContext) -> Weights:
        return self.initial(server, 0)

    def initial(self, server: ServerContext, restart: int) -> Weights:
        """One set of models; the first begins with the common initial weights."""
        paths = [(restart, k) if restart else (k,) if k else () for k in range(self.num_clusters)]
        seeds = [derive_seed(server.seed, "weights", *path) for path in paths]
        return Weights(stacked([server.networks.init(seed) for seed in seeds]))

    def setup(self, state: Weights, clients: Clients) -> Weights:
        """The set of models that fits the clients best, of those that are tried."""
        if self.restarts == 1:
            return state
        like, replies = LowestLoss(torch.tensor(0.0), torch.tensor(0)), list[dict[ClientId, LowestLoss]]()
        for restart in range(self.restarts):
            message_for = partial(self.message_for, self.initial(clients.server, restart))
            replies.append(dict(clients.run(self.lowest_loss, message_for, like)))
        replied = replies[-1]  # those that failed before are not asked again
        means = [self.mean_loss([tried[client] for client in replied]) for tried in replies]
        return self.initial(clients.server, means.index(min(means)))

    def mean_loss(self, replies: list[LowestLoss]) -> float:
        """Over clients, which count as they do in a model's mean."""
        weights = [self.weight_of(reply.num_examples) for reply in replies]
        return sum(w * r.loss.item() for w, r in zip(weights, replies, strict=True)) / sum(weights)

    def message_for(self, state: Weights, client: ClientId) -> Weights:
        return state

    def upload_spec(self, state: Weights, server: ServerContext) -> ClusterUpload:
        return ClusterUpload(entry(state.params, 0), torch.zeros(self.num_clusters, dtype=torch.int64))

    @property
    def adds_to_one(self) -> bool:
        return True

    def summand(self, upload: ClusterUpload, message: Weights) -> Summands:
        """The client's model in the sum of those that it chose, and at weight 0 in all others."""
        weights = (upload.count > 0) if self.is_uniform else upload.count
        return {str(k): (upload.params, float(weight)) for k, weight in enumerate(weights.tolist())}

    def from_sum(self, state: Weights, totals: Totals, server: ServerContext) -> Weights:
        """The mean of every model over the clients that trained it."""
        means = [totals[str(k)] for k in range(self.num_clusters)]
        return Weights(stacked([m.value() if m.weight else entry(state.params, k) for k, m in enumerate(means)]))

    def group(self, state: Weights, client: ClientId, upload: ClusterUpload) -> Hashable:
        """The model that the client trained."""
        return tuple(upload.count.nonzero().flatten().tolist())

    def finish(self, state: Weights, clients: Clients) -> Weights:
        for _ in clients.run(self.choose, lambda client: self.message_for(state, client), Nothing()):
            pass
        return state

    def init_memory(self, client: ClientContext, message: Weights) -> Choice:
        return Choice(torch.tensor(0))

    def local_weights(self, message: Weights, memory: Choice) -> Params:
        return entry(message.params, int(memory.cluster))

    def trained_weights(self, upload: ClusterUpload, memory: Choice) -> Params:
        return upload.params

    async def losses(self, client: ClientContext, message: Weights) -> Tensor:
        """The summed loss of each model on the client's data, (K,)."""
        models = [entry(message.params, k) for k in range(self.num_clusters)]
        totals = [await client.total(summed_cross_entropy, params) for params in models]
        return torch.stack(totals).nan_to_num(nan=torch.inf)

    async def choose(self, client: ClientContext, message: Weights, memory: Choice) -> Reply[Nothing, Choice]:
        """The model of the lowest loss."""
        return Reply(Nothing(), Choice((await self.losses(client, message)).argmin()))

    async def lowest_loss(self, client: ClientContext, message: Weights, memory: Choice) -> Reply[LowestLoss, Choice]:
        """What the best of these models is worth to the client; nothing is chosen yet."""
        lowest = (await self.losses(client, message)).min() / len(client.data)
        return Reply(LowestLoss(lowest, client.num_examples), memory)

    async def train(self, client: ClientContext, message: Weights, memory: Choice) -> Reply[ClusterUpload, Choice]:
        chosen = (await self.choose(client, message, memory)).memory
        params = await client.fit(Objective(cross_entropy), params=self.local_weights(message, chosen))
        is_chosen = torch.arange(self.num_clusters) == chosen.cluster  # (K,)
        return Reply(ClusterUpload(params, is_chosen * client.num_examples), chosen)
