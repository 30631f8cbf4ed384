"""FedDyn: clients and server remember how far each client has drifted, so that all of them come to rest at one optimum.

Acar, Zhao, Matas, Mattina, Whatmough, Saligrama: Federated Learning Based on Dynamic Regularization, ICLR 2021.

Sends: weights. Keeps: its drift, the sum of all its updates from received to trained weights. Server: mean of
the weights, moved on by the mean drift of all clients.

Departures:
1. The drift is kept in place of the paper's gradients: the client's is −1/α times its linear term, the server's −1/α
   times h. The client's loss differs by a constant, the weights are the same, and nothing is divided by α.
2. With α = 0, where h/α is 0/0, the server takes the mean alone: then the method is FedAvg.
3. Clients count by their numbers of examples in both means, as in all methods here; equally in the paper. The
   authors' code divides α by a client's relative number of examples, which aims at the same weighted optimum.
4. Only parameters have a drift; the statistics of BatchNorm, which the paper does not consider, are averaged.
5. The authors' code clips the gradient at norm 10; here that is a setting of the optimiser.
"""

from dataclasses import dataclass

from torch import Tensor

from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import NonNegative
from protofed.api.private import PrivateClient
from protofed.api.requests import Objective
from protofed.data.batches import Batch
from protofed.methods._shared.control_variates import corrected, drift_penalty, updated_drift, zeros
from protofed.methods._shared.losses import cross_entropy
from protofed.methods.families import PlainSharing, Totals, Weights, WeightUpload
from protofed.nn.networks import Model
from protofed.tree import Params, record


@record
class Drifting(Weights):
    """The global weights, and how far clients have drifted from them on average."""

    drift: Params  # of the parameters


@record
class Drift:
    drift: Params  # of the parameters


@dataclass(frozen=True)
class FedDyn(PlainSharing[Drifting, Drift]):
    tags = ("global",)
    penalty_weight: NonNegative = 0.01
    """α: how strongly a client is held to the received weights, less its drift. At 0 the method is FedAvg."""

    def init_server(self, server: ServerContext) -> Drifting:
        params = server.initial_params()
        return Drifting(params, zeros(params, server.networks.trainable))

    def public(self, state: Drifting) -> tuple[Params, Weights] | None:
        return state.params, Weights(state.params)

    def from_sum(self, state: Drifting, totals: Totals, server: ServerContext) -> Drifting:
        mean: Params = totals["upload"].value().params
        drift = updated_drift(state.drift, mean, state.params, self.share(totals, server))
        return Drifting(corrected(mean, drift) if self.penalty_weight else mean, drift)

    def init_memory(self, client: ClientContext, message: Weights) -> Drift:
        return Drift(zeros(message.params, client.networks.trainable))

    async def train(self, client: ClientContext, message: Weights, memory: Drift) -> Reply[WeightUpload, Drift]:
        reply = await super().train(client, message, memory)
        return Reply(reply.upload, Drift(updated_drift(memory.drift, reply.upload.params, message.params)))

    async def train_privately(
        self, client: PrivateClient, message: Weights, memory: Drift
    ) -> Reply[WeightUpload, Drift]:
        reply = await super().train_privately(client, message, memory)
        return Reply(reply.upload, Drift(client.post(updated_drift, memory.drift, reply.upload.params, message.params)))

    def loss(self, model: Model, batch: Batch, message: Weights, memory: Drift) -> Tensor:
        """The local objective: cross-entropy and the dynamic regulariser."""
        return cross_entropy(model, batch) + self.penalty(model, message, memory)

    def penalty(self, model: Model, message: Weights, memory: Drift) -> Tensor:
        """The dynamic regulariser."""
        return self.penalty_weight * drift_penalty(model, message.params, memory.drift)

    async def trained_privately(self, client: PrivateClient, message: Weights, memory: Drift) -> Params:
        context = (message, memory)
        return await client.fit(Objective(cross_entropy), params=message.params, context=context, penalty=self.penalty)
