"""FedProx: FedAvg whose clients are held near the weights they received.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks, MLSys 2020.

Sends: weights. Keeps: nothing. Server: mean weighted by the number of examples.

Departures:
1. Every client trains for the configured number of epochs; the paper's variable amounts of local work (γ-inexact
   solutions) are not simulated.
2. The penalty covers parameters, not the statistics of BatchNorm, which the paper does not consider.
"""

from dataclasses import dataclass

from torch import Tensor

from protofed import tree
from protofed.api.method import NonNegative
from protofed.api.private import PrivateClient
from protofed.api.requests import Objective
from protofed.data.batches import Batch
from protofed.methods._shared.losses import cross_entropy
from protofed.methods.families import GlobalModel, Weights
from protofed.nn.networks import Model
from protofed.tree import Nothing, Params


@dataclass(frozen=True)
class FedProx(GlobalModel[Nothing]):
    tags = ("global",)
    proximal_weight: NonNegative = 0.01
    """μ in Eq. (2): how strongly a client is held to the received weights."""

    def loss(self, model: Model, batch: Batch, message: Weights, memory: Nothing) -> Tensor:
        """The local objective, Eq. (2)."""
        return cross_entropy(model, batch) + self.penalty(model, message, memory)

    def penalty(self, model: Model, message: Weights, memory: Nothing) -> Tensor:
        """The proximal term."""
        return self.proximal_weight / 2 * tree.squared_distance(model.trainable, message.params)

    async def trained_privately(self, client: PrivateClient, message: Weights, memory: Nothing) -> Params:
        context = (message, memory)
        return await client.fit(Objective(cross_entropy), params=message.params, context=context, penalty=self.penalty)
