"""FedNova: FedAvg that averages the clients' mean gradients, so that clients with more steps do not count more.

Wang, Liu, Liang, Joshi, Poor: Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization,
NeurIPS 2020.

Sends: weights, and how many gradients its way is made of. Keeps: nothing. Server: mean of the normalised ways, weighted
by the number of examples, and as many steps along it as clients took on average.

Departures:
1. The paper leaves the effective number of steps open; it is the mean of the clients' ‖a‖₁ weighted by examples, as in
   the authors' code. When all clients take equally many steps, the method is FedAvg but for rounding.
2. Every client trains for the configured number of epochs, so that numbers of steps differ as numbers of examples do;
   the paper also lets the epochs differ.
3. Nesterov's momentum has the vector a that follows from its steps. Weight decay and clipping are part of the gradient.
4. The paper's variants with a proximal term, with variance reduction and with momentum at the server are left out.
5. The statistics of BatchNorm, which the paper does not consider, are averaged.
"""

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import SettingErrors, Uploads
from protofed.api.task import TaskSpec
from protofed.data.batches import Batch
from protofed.errors import BadInput
from protofed.methods.families import GlobalModel, Weights, WeightUpload
from protofed.nn.networks import Model
from protofed.optim.optimizers import Optimizer, Sgd
from protofed.tree import Mean, Nothing, record


@record
class NormalisedUpload(WeightUpload):
    steps: Tensor  # (), float64, ‖a‖₁: how many gradients the way from the received weights is made of


@dataclass(frozen=True)
class FedNova(GlobalModel[Nothing]):
    tags = ("global",)

    def validate(self, optimizer: Optimizer, batch_size: int, spec: TaskSpec | None) -> SettingErrors:
        return needs_sgd("FedNova", optimizer)

    def init_server(self, server: ServerContext) -> Weights:
        return super().init_server(server)

    def upload_spec(self, state: Weights, server: ServerContext) -> NormalisedUpload:
        return NormalisedUpload(state.params, torch.tensor(0), torch.tensor(0.0, dtype=torch.float64))

    def aggregate(self, state: Weights, uploads: Uploads[WeightUpload], server: ServerContext) -> Weights:
        names = server.networks.trainable
        weights, steps, direction = Mean(), Mean(), Mean()
        for _, upload in uploads:
            assert isinstance(upload, NormalisedUpload)
            weight = upload.num_examples.item()
            weights.add(upload.params, weight)
            steps.add(upload.steps, weight)
            direction.add(
                {n: (upload.params[n].double() - state.params[n]) / upload.steps.clamp(min=1) for n in names}, weight
            )
        way = {name: steps.value() * leaf for name, leaf in direction.value().items()}
        new = {name: (state.params[name] + leaf).to(state.params[name].dtype) for name, leaf in way.items()}
        return Weights({**weights.value(), **new})

    async def train(self, client: ClientContext, message: Weights, memory: Nothing) -> Reply[WeightUpload, Nothing]:
        reply = await super().train(client, message, memory)
        steps = torch.tensor(num_gradients(client, "FedNova"), dtype=torch.float64)
        return Reply(NormalisedUpload(reply.upload.params, reply.upload.num_examples, steps), memory)

    def loss(self, model: Model, batch: Batch, message: Weights, memory: Nothing) -> Tensor:
        return batch.cross_entropy(model.logits(batch.x))


def needs_sgd(method: str, optimizer: Optimizer) -> SettingErrors:
    """The objection to any other optimiser: the way that it goes must be a sum of gradients in known proportions."""
    if not isinstance(optimizer, Sgd):
        kind = type(optimizer).__name__.lower()
        yield "training.optimizer.name", f"{method} is defined for clients that train with sgd, not {kind}: take sgd"


def plain(optimizer: Optimizer, method: str) -> Sgd:
    """The optimiser, if the way that it goes is a sum of gradients in known proportions."""
    if not isinstance(optimizer, Sgd):
        raise BadInput(f"{method} is defined for clients that train with sgd: configure it, not {optimizer}")
    return optimizer


def num_gradients(client: ClientContext, method: str) -> float:
    """‖a‖₁: how many gradients the way of a client is made of, its number of steps if there is no momentum.

    With momentum ρ the gradient that is followed by k − 1 others is taken 1 + ρ + … + ρᵏ⁻¹ times.
    """
    sgd = plain(client.optimizer, method)
    steps = client.epochs * ceil(len(client.data) / client.batch_size)
    return sum((1 - sgd.momentum ** (k + sgd.nesterov)) / (1 - sgd.momentum) for k in range(1, steps + 1))
