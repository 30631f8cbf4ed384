"""FedRep: clients share the body of the network and keep their own head, which they train first.

Collins, Hassani, Mokhtari, Shakkottai: Exploiting Shared Representations for Personalized Federated Learning,
ICML 2021.

Sends: the weights of everything but the classifier. Keeps: its classifier. Server: mean weighted by the number of
examples.

Departures:
1. The body trains for the configured number of local epochs (the paper: one, and more on CIFAR-100).
2. Between rounds a client is tested with the server's body and its own head; some code tests the body that it trained.
3. While the head trains, the statistics of BatchNorm in the body move, as in the authors' code.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.evaluation import Reading
from protofed.api.method import NonNegative, SettingErrors
from protofed.api.requests import Objective
from protofed.api.task import ClientId, TaskSpec
from protofed.methods._shared.global_models import with_heads
from protofed.methods._shared.models import CLASSIFIER
from protofed.methods._shared.own_training import OwnOptimizer, own_optimizer, own_optimizer_errors
from protofed.methods.families import OwnWeights, PartSharing, Weights, WeightUpload
from protofed.nn.networks import without
from protofed.optim.optimizers import Optimizer


@dataclass(frozen=True)
class FedRep(PartSharing):
    tags = ("personal",)
    head_epochs: Annotated[int, Ge(1)] = 10
    """τ in Alg. 1: epochs that the head trains for before the body does."""
    head_lr: NonNegative = 0.0
    """The learning rate of the head; 0: as configured."""
    head_optimizer: OwnOptimizer = "configured"
    """What the head trains with: the configured optimiser, or "sgd", without momentum and weight decay."""

    private = CLASSIFIER

    def validate(self, optimizer: Optimizer, batch_size: int, spec: TaskSpec | None) -> SettingErrors:
        return own_optimizer_errors("head_lr", optimizer, self.head_lr, self.head_optimizer)

    async def train(
        self, client: ClientContext, message: Weights, memory: OwnWeights
    ) -> Reply[WeightUpload, OwnWeights]:
        """The client's update of Alg. 1: the head, then the body."""
        params = self.local_weights(message, memory)
        params = await client.fit(
            Objective(self.loss, trains=CLASSIFIER),
            params=params,
            context=(message, memory),
            epochs=self.head_epochs,
            optimizer=own_optimizer(client.optimizer, self.head_lr, self.head_optimizer, client.halvings),
        )
        params = await client.fit(Objective(self.loss, freezes=CLASSIFIER), params=params, context=(message, memory))
        return Reply(WeightUpload(without(params, CLASSIFIER), client.num_examples), self.remember(params, memory))

    def global_models(
        self, state: Weights, memories: Mapping[ClientId, OwnWeights], server: ServerContext
    ) -> dict[str, Reading]:
        return with_heads(state.params, memories, server)
