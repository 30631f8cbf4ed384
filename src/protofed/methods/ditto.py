"""Ditto: FedAvg beside which every client trains a model of its own, held near the global one.

Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021.

Sends: weights. Keeps: its own model. Server: mean weighted by the number of examples.

Departures:
1. The own model is held to the weights that the client received, as in the paper; to those that it has just trained of
   them, as in the code base of FedNH, is a setting.
2. The own model trains after the global one has, for the configured epochs or its own; the paper takes the steps of
   both in turn, on the same batches.
3. Both models train with the configured optimiser; the code base of FedNH gives the own one neither momentum nor weight
   decay, which is a setting.
4. A client that takes part for the first time starts its own model from the weights that it receives; until then it
   uses the global model.
5. The penalty covers parameters, not the statistics of BatchNorm, which the paper does not consider.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge
from torch import Tensor

from protofed import tree
from protofed.api.contexts import ClientContext, Reply
from protofed.api.method import NonNegative, SettingErrors
from protofed.api.requests import Objective
from protofed.api.task import TaskSpec
from protofed.data.batches import Batch
from protofed.methods._shared.own_training import OwnOptimizer, own_optimizer, own_optimizer_errors
from protofed.methods.families import OwnModels, OwnWeights, Weights, WeightUpload
from protofed.nn.networks import Model
from protofed.optim.optimizers import Optimizer
from protofed.tree import Params


@dataclass(frozen=True)
class Ditto(OwnModels):
    tags = ("global", "personal")
    proximal_weight: NonNegative = 1.0
    """λ, how strongly the client's own model is held to the global one. The learning rate times it must be below 1."""
    reference: Literal["received", "trained"] = "received"
    """What the own model is held to: the received weights, or what the client has just trained of them."""
    personal_epochs: Annotated[int, Ge(0)] = 0
    """Epochs that the own model trains for; 0: as configured."""
    personal_lr: NonNegative = 0.0
    """The learning rate of the own model; 0: as configured."""
    personal_optimizer: OwnOptimizer = "configured"
    """What the own model trains with: the configured optimiser, or "sgd", without momentum and weight decay."""

    def validate(self, optimizer: Optimizer, batch_size: int, spec: TaskSpec | None) -> SettingErrors:
        return own_optimizer_errors("personal_lr", optimizer, self.personal_lr, self.personal_optimizer)

    async def train(
        self, client: ClientContext, message: Weights, memory: OwnWeights
    ) -> Reply[WeightUpload, OwnWeights]:
        params = await client.fit(Objective(self.loss), params=message.params, context=(message, memory))
        anchor = message.params if self.reference == "received" else params
        personal = await client.fit(
            Objective(self.personal_loss),
            params=memory.params,
            context=(anchor,),
            epochs=self.personal_epochs or client.epochs,
            optimizer=own_optimizer(client.optimizer, self.personal_lr, self.personal_optimizer, client.halvings),
        )
        return Reply(WeightUpload(params, client.num_examples), OwnWeights(personal))

    def personal_loss(self, model: Model, batch: Batch, anchor: Params) -> Tensor:
        """Cross-entropy and half λ times the squared distance to the global model."""
        proximal = tree.squared_distance(model.trainable, anchor)
        return batch.cross_entropy(model.logits(batch.x)) + self.proximal_weight / 2 * proximal
