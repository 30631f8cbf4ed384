"""FedGH: clients of different networks share one header, which the server trains on their class means.

Yi, Wang, Liu, Shi, Yu: FedGH: Heterogeneous Federated Learning with Generalized Global Header, ACM MM 2023.

Sends: class means of features, and which classes it has. Keeps: its whole model. Server: trains the header on the
clients' class means, and sends it to all.

Departures:
1. The header is trained by an optimiser of its own; the authors' code steps the optimiser of the last client instead,
   so that its global header never leaves its first weights.
2. The header is all that lies behind the features: the classifier, and the part `projection` where there is one.
3. Class means are over all examples of the class, in evaluation mode; the authors' code averages means of batches.
4. The server goes through the class means in a drawn order, one at a time as in the paper; larger batches and further
   passes are settings. A header with BatchNorm needs larger ones, and has the statistics of class means then.
5. A client predicts with the header that it trained, as in the authors' code; with the one that the server sends now is
   a setting.
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import Method, Positive, SettingErrors, Uploads
from protofed.api.requests import Objective
from protofed.api.task import ClientId, TaskSpec
from protofed.data.batches import Batch, Data
from protofed.methods._shared.losses import cross_entropy
from protofed.methods._shared.models import HEAD, needs_two_rows
from protofed.methods.families import OwnWeights, Weights
from protofed.nn.networks import Model, matching
from protofed.optim.optimizers import Optimizer, Sgd
from protofed.prototypes import class_means
from protofed.prototypes.class_means import Prototypes
from protofed.tree import Params


@dataclass(frozen=True)
class FedGH(Method[Weights, Weights, OwnWeights, Prototypes]):
    tags = ("personal", "prototype", "heterogeneous", "server-side")
    header_rate: Positive = 0.01
    """η_ω, the server's learning rate."""
    header_epochs: Annotated[int, Ge(1)] = 1
    """Passes of the server over the class means in a round."""
    header_batch: Annotated[int, Ge(1)] = 1
    """Class means in a step of the server."""
    inference: Literal["trained", "global"] = "trained"
    """Whose header a client predicts with: the one that it trained last, or the one that the server sends now."""

    private = ("*",)

    def validate(self, optimizer: Optimizer, batch_size: int, spec: TaskSpec | None) -> SettingErrors:
        if spec is None or self.header_batch > 1:
            return
        if needs_two_rows(spec, partial(self.networks, spec, min(spec.clients)), behind_features=True):
            yield "header_batch", "the header has BatchNorm, which needs two class means in a step: set it to 2 or more"

    def init_server(self, server: ServerContext) -> Weights:
        return Weights(matching(server.initial_params(), HEAD))

    def message_for(self, state: Weights, client: ClientId) -> Weights:
        return state

    def upload_spec(self, state: Weights, server: ServerContext) -> Prototypes:
        return class_means.no_prototypes(server.num_classes, server.feature_dim)

    def aggregate(self, state: Weights, uploads: Uploads[Prototypes], server: ServerContext) -> Weights:
        """The header, trained on the class means of the round."""
        params = server.fit(
            Objective(header_loss, trains=HEAD),
            params={**server.initial_params(), **state.params},
            data=pairs(dict(uploads)),
            epochs=self.header_epochs,
            batch_size=self.header_batch,
            optimizer=Sgd(lr=self.header_rate),
        )
        return Weights(matching(params, HEAD))

    def init_memory(self, client: ClientContext, message: Weights) -> OwnWeights:
        return OwnWeights({**client.initial_params(), **message.params})

    def local_weights(self, message: Weights, memory: OwnWeights) -> Params:
        return memory.params if self.inference == "trained" else {**memory.params, **message.params}

    def trained_weights(self, upload: Prototypes, memory: OwnWeights) -> Params:
        return memory.params

    async def train(self, client: ClientContext, message: Weights, memory: OwnWeights) -> Reply[Prototypes, OwnWeights]:
        start = {**memory.params, **message.params}
        params = await client.fit(Objective(cross_entropy), params=start)
        means = class_means.ownership(await class_means.of_client(client, params))
        return Reply(means, OwnWeights(params))


def header_loss(model: Model, batch: Batch) -> Tensor:
    """Cross-entropy of what lies behind the features."""
    return batch.cross_entropy(model.scores(batch.x))


def pairs(means: dict[ClientId, Prototypes]) -> Data:
    """Class means and their classes, client by client in canonical order."""
    clients = [means[client] for client in sorted(means)]
    label = [p.is_known.nonzero().flatten() for p in clients]
    return Data.of(torch.cat([p.mean[y] for p, y in zip(clients, label, strict=True)]), torch.cat(label))
