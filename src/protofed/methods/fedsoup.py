"""FedSoup: in the last rounds a client averages its weights with those global models that do well on its own data.

Chen, Jiang, Dou, Zhang, Wu, Chen, Li: FedSoup: Improving Generalization and Personalization in Federated Learning via
Selective Model Interpolation, MICCAI 2023.

Sends: weights. Keeps: its last weights, and the mean of the global models that it has selected. Server: mean weighted
by the number of examples.

Departures:
1. A client selects on a tenth of its examples, on which it does not train, or on all if it has fewer than 100; the
   authors' code selects on the client's test data.
2. The statistics of BatchNorm are averaged with the weights; the authors' code keeps those of the trained model.
3. The further passes of training and selection after the last round in the authors' code are left out.
4. Clients train as configured; the authors take one epoch of Adam.
"""

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from annotated_types import Interval
from torch import Tensor

from protofed import tree
from protofed.api.contexts import ClientContext, Reply
from protofed.api.requests import Objective
from protofed.data.batches import Batch, Data
from protofed.methods._shared.mixing import weighted_mean
from protofed.methods._shared.validation import held_out, num_training
from protofed.methods.families import GlobalModel, Weights, WeightUpload
from protofed.nn.networks import Model
from protofed.tree import Params, record


@record
class Soup:
    params: Params  # the client's own weights, souped in the last rounds
    pool: Params  # the mean of the global models that the client selected
    count: Tensor  # (), how many these are


@dataclass(frozen=True)
class FedSoup(GlobalModel[Soup]):
    tags = ("global", "personal")
    clients_use = "own models"
    start: Annotated[float, Interval(ge=0, le=1)] = 0.75
    """α, the share of the rounds after which clients average."""

    def public_weight(self, num_examples: int) -> float:
        return super().public_weight(num_training(num_examples))

    def init_memory(self, client: ClientContext, message: Weights) -> Soup:
        return Soup(message.params, tree.map(torch.zeros_like, message.params), torch.tensor(0))

    def local_weights(self, message: Weights, memory: Soup) -> Params:
        return memory.params

    async def train(self, client: ClientContext, message: Weights, memory: Soup) -> Reply[WeightUpload, Soup]:
        training, validation = held_out(client)
        client = replace(client, data=training)
        params = await client.fit(Objective(self.loss), params=message.params, context=(message, memory))
        soup = Soup(params, memory.pool, memory.count)
        if client.round + 1 > self.start * client.num_rounds:
            soup = await selected(client, soup, message.params, validation)
        return Reply(WeightUpload(soup.params, client.num_examples), soup)


async def selected(client: ClientContext, trained: Soup, received: Params, validation: Data) -> Soup:
    """The trained weights averaged with the pool; the received ones join the pool if that makes more examples right."""
    count = int(trained.count)
    without = weighted_mean([(trained.params, 1), (trained.pool, count)])
    within = weighted_mean([(trained.params, 1), (received, 1), (trained.pool, count)])
    if await client.total(num_right, within, data=validation) > await client.total(num_right, without, data=validation):
        return Soup(within, weighted_mean([(received, 1), (trained.pool, count)]), trained.count + 1)
    return Soup(without, trained.pool, trained.count)


def num_right(model: Model, batch: Batch) -> Tensor:
    return ((model.logits(batch.x).argmax(-1) == batch.y) * batch.weight).sum()
