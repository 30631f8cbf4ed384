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

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge
from torch import Tensor

from protofed.data import Batch
from protofed.method import Local, Objective, Reply
from protofed.methods.families import OwnWeights, Weights, WeightSharing, WeightUpload
from protofed.networks import Model, Patterns, matching, without
from protofed.tree import Params

HEAD: Patterns = ("classifier.*",)


@dataclass(frozen=True)
class FedRep(WeightSharing[OwnWeights]):
    tags = ("personal",)
    head_epochs: Annotated[int, Ge(1)] = 10
    """τ in Alg. 1: epochs that the head trains for before the body does."""

    private = HEAD

    def init_memory(self, local: Local, message: Weights) -> OwnWeights:
        return OwnWeights(matching(local.initial_params(), HEAD))

    def local_weights(self, message: Weights, memory: OwnWeights) -> Params:
        return {**message.params, **memory.params}

    def remember(self, params: Params, memory: OwnWeights) -> OwnWeights:
        return OwnWeights(matching(params, HEAD))

    async def train(self, local: Local, message: Weights, memory: OwnWeights) -> Reply[WeightUpload, OwnWeights]:
        """The client's update of Alg. 1: the head, then the body."""
        params = self.local_weights(message, memory)
        params = await local.fit(
            Objective(self.loss, trains=HEAD), params=params, context=(message, memory), epochs=self.head_epochs
        )
        params = await local.fit(Objective(self.loss, freezes=HEAD), params=params, context=(message, memory))
        return Reply(WeightUpload(without(params, HEAD), local.num_examples), self.remember(params, memory))

    def loss(self, model: Model, batch: Batch, message: Weights, memory: OwnWeights) -> Tensor:
        return batch.cross_entropy(model.logits(batch.x))
