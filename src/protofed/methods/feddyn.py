"""FedDyn: clients and server remember how far each client has drifted, so that all of them come to rest at one optimum.

Acar, Zhao, Matas, Mattina, Whatmough, Saligrama: Federated Learning Based on Dynamic Regularization, ICLR 2021.

Sends: weights. Keeps: its drift, the sum of all ways that it has gone from received to trained weights. Server: mean of
the weights, moved on by the mean drift of all clients.

Departures:
1. The drift is kept in place of the paper's gradients: the client's is −1/α times its linear term, the server's −1/α
   times h. The client's loss differs by a constant, the weights are the same, and nothing is divided by α.
2. With α = 0, where h/α is 0/0, the server takes the mean alone: then the method is FedAvg.
3. Clients count the same in both means, as in the paper; weighting by examples is a setting. The authors' code divides
   α by a client's relative number of examples, which aims at the same weighted optimum.
4. Only parameters have a drift; the statistics of BatchNorm, which the paper does not consider, are averaged.
5. The authors' code clips the gradient at norm 10; here that is a setting of the optimiser.
"""

from dataclasses import dataclass
from typing import TypeVar, cast

from torch import Tensor

from protofed import tree
from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import NonNegative, Uploads
from protofed.api.task import ClientId
from protofed.data.batches import Batch
from protofed.methods.families import GlobalModel, Weighting, Weights, WeightUpload
from protofed.nn.networks import Model
from protofed.tree import Mean, Params, record

Upload = TypeVar("Upload", bound=WeightUpload)


@record
class Drifting(Weights):
    """The global weights, and how far clients have drifted from them on average."""

    drift: Params  # of the parameters


@record
class Drift:
    drift: Params  # of the parameters


@dataclass(frozen=True)
class FedDyn(GlobalModel[Drift]):
    tags = ("global",)
    penalty_weight: NonNegative = 0.01
    """α: how strongly a client is held to the received weights, less its drift. At 0 the method is FedAvg."""
    weighting: Weighting = "uniform"
    """Whether clients count the same, or by their numbers of examples."""

    def init_server(self, server: ServerContext) -> Drifting:
        params = super().init_server(server).params
        return Drifting(params, zeros(params, server.networks.trainable))

    def message_for(self, state: Weights, client: ClientId) -> Weights:
        return Weights(state.params)

    def aggregate(self, state: Weights, uploads: Uploads[WeightUpload], server: ServerContext) -> Drifting:
        upload, share = mean_upload(uploads, self.weighting, server)
        previous = cast(Drifting, state)
        drift = moved(previous.drift, upload.params, state.params, share)
        return Drifting(corrected(upload.params, drift) if self.penalty_weight else upload.params, drift)

    def init_memory(self, client: ClientContext, message: Weights) -> Drift:
        return Drift(zeros(message.params, client.networks.trainable))

    async def train(self, client: ClientContext, message: Weights, memory: Drift) -> Reply[WeightUpload, Drift]:
        reply = await super().train(client, message, memory)
        return Reply(reply.upload, Drift(moved(memory.drift, reply.upload.params, message.params)))

    def loss(self, model: Model, batch: Batch, message: Weights, memory: Drift) -> Tensor:
        """The local objective: cross-entropy and the dynamic regulariser."""
        penalty = drift_penalty(model, message.params, memory.drift)
        return batch.cross_entropy(model.logits(batch.x)) + self.penalty_weight * penalty


def drift_penalty(model: Model, received: Params, drift: Params) -> Tensor:
    """½ ‖w + drift − received‖² over the parameters."""
    anchor = {name: received[name] - leaf for name, leaf in drift.items()}
    return tree.squared_distance(model.trainable, anchor) / 2


def moved(drift: Params, end: Params, start: Params, share: float = 1.0) -> Params:
    """The drift after another way from `start` to `end`, of which `share` counts."""
    return {name: leaf + share * (end[name] - start[name]) for name, leaf in drift.items()}


def corrected(mean: Params, drift: Params) -> Params:
    """The mean of the clients' weights, moved on by their mean drift."""
    return {**mean, **{name: mean[name] + leaf for name, leaf in drift.items()}}


def zeros(params: Params, names: tuple[str, ...]) -> Params:
    return {name: params[name].new_zeros(params[name].shape) for name in names}


def mean_upload(uploads: Uploads[Upload], weighting: Weighting, server: ServerContext) -> tuple[Upload, float]:
    """The mean of the uploads, and which share of the weight of all clients is behind it."""
    is_uniform = weighting == "uniform"
    mean, total = Mean(), 0.0
    for _, upload in uploads:
        weight = 1.0 if is_uniform else upload.num_examples.item()
        mean.add(upload, weight)
        total += weight
    return mean.value(), total / (len(server.spec.clients) if is_uniform else server.spec.num_examples)
