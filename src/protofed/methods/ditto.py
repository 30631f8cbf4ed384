"""Ditto: FedAvg beside which every client trains a model of its own, held near the global one.

Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021.

Sends: weights. Keeps: its own model. Server: mean weighted by the number of examples.

Departures:
1. The own model is held to the weights that the client received, as in the paper; to those that it has just trained of
   them, as in the code base of FedNH, is a setting.
2. The own model trains for the configured epochs after the global one has; the paper takes the steps of both in turn,
   on the same batches.
3. Both models train with the configured optimiser; the code base of FedNH gives the own one no momentum.
4. A client that takes part for the first time starts its own model from the weights that it receives; until then it
   uses the global model.
5. The penalty covers parameters, not the statistics of BatchNorm, which the paper does not consider.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from protofed import tree
from protofed.api.contexts import ClientContext, Reply
from protofed.api.method import NonNegative
from protofed.api.requests import Objective
from protofed.data.batches import Batch
from protofed.methods.families import GlobalModel, OwnWeights, Weights, WeightUpload
from protofed.nn.networks import Model
from protofed.tree import Params


@dataclass(frozen=True)
class Ditto(GlobalModel[OwnWeights]):
    tags = ("global", "personal")
    clients_use = "own models"
    proximal_weight: NonNegative = 1.0
    """λ, how strongly the client's own model is held to the global one. The learning rate times it must be below 1."""
    reference: Literal["received", "trained"] = "received"
    """What the own model is held to: the received weights, or what the client has just trained of them."""

    def init_memory(self, client: ClientContext, message: Weights) -> OwnWeights:
        return OwnWeights(message.params)

    def local_weights(self, message: Weights, memory: OwnWeights) -> Params:
        return memory.params

    async def train(
        self, client: ClientContext, message: Weights, memory: OwnWeights
    ) -> Reply[WeightUpload, OwnWeights]:
        params = await client.fit(Objective(self.loss), params=message.params, context=(message, memory))
        anchor = message.params if self.reference == "received" else params
        personal = await client.fit(Objective(self.personal_loss), params=memory.params, context=(anchor,))
        return Reply(WeightUpload(params, client.num_examples), OwnWeights(personal))

    def personal_loss(self, model: Model, batch: Batch, anchor: Params) -> Tensor:
        """Cross-entropy and half λ times the squared distance to the global model."""
        proximal = tree.squared_distance(model.trainable, anchor)
        return batch.cross_entropy(model.logits(batch.x)) + self.proximal_weight / 2 * proximal
