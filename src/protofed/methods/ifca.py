"""IFCA: several global models; in each round a client trains the one that fits its data best.

Ghosh, Chung, Yin, Ramchandran: An Efficient Framework for Clustered Federated Learning, NeurIPS 2020.

Sends: weights, and which model they were trained from. Keeps: which model that was. Server: mean of each model over
the clients that chose it.

Departures:
1. Clients send trained weights (the paper's model averaging), not gradients.
2. Clients count by their numbers of examples in the mean of their model, as in all methods here; equally in the paper.
3. A model that no client chose stays as it was.
4. The first model starts from the common initial weights, the others from seeds derived from the run's; the paper asks
   for different random starts, and in some experiments for several restarts.
5. Between rounds a client has the newest version of the model that it chose last; one that has not chosen yet has the
   first. After the last round every client chooses once more.
6. All weights are clustered; the paper also shares the lower layers among all clusters, on FEMNIST.
7. Losses are compared on all of a client's training examples, in evaluation mode and unvaried.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import Clients, Method, Uploads
from protofed.api.requests import Objective
from protofed.api.roles import Count
from protofed.api.task import ClientId
from protofed.methods._shared.losses import cross_entropy, summed_cross_entropy
from protofed.methods._shared.mixing import entry, stacked
from protofed.methods.families import Averages, Weights
from protofed.seeds import derive_seed
from protofed.tree import Mean, Nothing, Params, record


@record
class Choice:
    cluster: Tensor  # (), the model that the client trained last


@record
class ClusterUpload:
    params: Params
    count: Annotated[Tensor, Count()]  # (K,), the client's examples at the model that it chose, else 0


@dataclass(frozen=True)
class IFCA(Averages, Method[Weights, Weights, Choice, ClusterUpload]):
    tags = ("personal",)
    num_clusters: Annotated[int, Ge(1)] = 4
    """k, the number of models. The paper takes 4 for MNIST in four rotations, 2 for CIFAR-10 in two."""

    def init_server(self, server: ServerContext) -> Weights:
        seeds = [derive_seed(server.seed, "weights", k) for k in range(1, self.num_clusters)]
        models = [server.initial_params(), *(server.networks.init(seed) for seed in seeds)]
        return Weights(stacked(models))

    def message_for(self, state: Weights, client: ClientId) -> Weights:
        return state

    def upload_spec(self, state: Weights, server: ServerContext) -> ClusterUpload:
        return ClusterUpload(entry(state.params, 0), torch.zeros(self.num_clusters, dtype=torch.int64))

    def aggregate(self, state: Weights, uploads: Uploads[ClusterUpload], server: ServerContext) -> Weights:
        """The mean of every model over the clients that trained it."""
        means: dict[int, Mean] = {}
        for _, upload in uploads:
            for k, count in enumerate(upload.count.tolist()):
                if count:
                    means.setdefault(k, Mean()).add(upload.params, 1 if self.is_uniform else count)
        clusters = range(self.num_clusters)
        return Weights(stacked([means[k].value() if k in means else entry(state.params, k) for k in clusters]))

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

    async def choose(self, client: ClientContext, message: Weights, memory: Choice) -> Reply[Nothing, Choice]:
        """The model of the lowest loss on the client's data."""
        models = [entry(message.params, k) for k in range(self.num_clusters)]
        losses = torch.stack([await client.total(summed_cross_entropy, params) for params in models])  # (K,)
        return Reply(Nothing(), Choice(losses.nan_to_num(nan=torch.inf).argmin()))

    async def train(self, client: ClientContext, message: Weights, memory: Choice) -> Reply[ClusterUpload, Choice]:
        chosen = (await self.choose(client, message, memory)).memory
        params = await client.fit(Objective(cross_entropy), params=self.local_weights(message, chosen))
        is_chosen = torch.arange(self.num_clusters) == chosen.cluster  # (K,)
        return Reply(ClusterUpload(params, is_chosen * client.num_examples), chosen)
