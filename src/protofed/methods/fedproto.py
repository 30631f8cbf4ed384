"""FedProto: clients share class prototypes and nothing else, so their networks may differ.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang: FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022.

Sends: class prototypes, and which classes it has. Keeps: its whole model. Server: unweighted mean of each class's
prototypes over the clients that own it.

Departures:
1. Prototypes are averaged without weights, as all public code does; Eq. (6) of the paper weights by examples.
2. The distance of Eq. (7) is the squared error averaged over the dimensions of the feature, as in the authors' code.
3. The client's classifier predicts by default; the nearest global prototype is a setting. The authors' code takes the
   nearest among the classes that the client has; here it is the nearest of all known classes.
4. A client's prototypes are the running means of its last epoch by default, as in the authors' code; the paper reads as
   recomputed after training (a setting).
5. A class that no reply of a round holds keeps its prototype.
6. An example whose class has no prototype is not pulled but counts in the mean over the batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import NonNegative
from protofed.api.requests import Objective
from protofed.api.task import ClientId
from protofed.api.views import Points
from protofed.data.batches import Batch
from protofed.methods.families import OwnWeights, Summands, SumMethod, Totals
from protofed.nn.networks import Model
from protofed.prototypes import class_means, contrast
from protofed.prototypes.class_means import PrototypeMode, Prototypes
from protofed.tree import Params


@dataclass(frozen=True)
class FedProto(SumMethod[Prototypes, Prototypes, OwnWeights, Prototypes]):
    tags = ("personal", "prototype", "heterogeneous")
    pull_weight: NonNegative = 1.0
    """λ in Eq. (7): how strongly features are pulled to the prototype of their class."""
    inference: Literal["classifier", "nearest_prototype"] = "classifier"
    """Who predicts: the client's own classifier, or the nearest global prototype."""
    prototype_mode: PrototypeMode = "running"
    """Whether a client's prototypes are the running means of its last epoch or recomputed after training."""

    private = ("*",)

    def init_server(self, server: ServerContext) -> Prototypes:
        return class_means.no_prototypes(server.num_classes, server.feature_dim)

    def message_for(self, state: Prototypes, client: ClientId) -> Prototypes:
        return state

    def upload_spec(self, state: Prototypes, server: ServerContext) -> Prototypes:
        return state

    def summand(self, upload: Prototypes, message: Prototypes) -> Summands:
        return {"prototypes": (class_means.of_owner(upload), 1.0)}

    def from_sum(self, state: Prototypes, totals: Totals, server: ServerContext) -> Prototypes:
        """Global prototypes, Eq. (6) without weights."""
        return class_means.mean_of(totals["prototypes"].total, state)

    def prototype_sets(self, state: Prototypes) -> Mapping[str, Points]:
        return {"global prototypes": class_means.points(state)}

    def init_memory(self, client: ClientContext, message: Prototypes) -> OwnWeights:
        return OwnWeights(client.initial_params())

    def local_weights(self, message: Prototypes, memory: OwnWeights) -> Params:
        return memory.params

    async def train(
        self, client: ClientContext, message: Prototypes, memory: OwnWeights
    ) -> Reply[Prototypes, OwnWeights]:
        params, prototypes = await class_means.fit_with_prototypes(
            client, Objective(self.loss), memory.params, (message,), self.prototype_mode
        )
        return Reply(class_means.ownership(prototypes), OwnWeights(params))

    def loss(self, model: Model, batch: Batch, prototypes: Prototypes) -> Tensor:
        """The local objective, Eq. (7)."""
        z = model.features(batch.x)
        pull = contrast.pull(z, batch.y, prototypes.mean, prototypes.is_known)
        return batch.cross_entropy(model.scores(z)) + self.pull_weight * batch.mean(pull)

    def predict(self, model: Model, x: Tensor, message: Prototypes, memory: OwnWeights | None) -> Tensor:
        """The own classifier, or the nearest prototype."""
        if self.inference == "classifier":
            return model.logits(x)
        return contrast.nearest(model.features(x), message.mean, message.is_known)
