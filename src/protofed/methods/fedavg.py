"""FedAvg: clients train the global model, the server averages what they made of it.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized
Data, AISTATS 2017.

Sends: weights. Keeps: nothing. Server: mean weighted by the number of examples.

Departures: none.
"""

from dataclasses import dataclass

from torch import Tensor

from protofed.data.batches import Batch
from protofed.methods.families import GlobalModel, Weights
from protofed.nn.networks import Model
from protofed.tree import Nothing


@dataclass(frozen=True)
class FedAvg(GlobalModel[Nothing]):
    tags = ("global",)

    def loss(self, model: Model, batch: Batch, message: Weights, memory: Nothing) -> Tensor:
        return batch.cross_entropy(model.logits(batch.x))
