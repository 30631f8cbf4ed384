"""SCAFFOLD: clients correct every gradient by how their mean gradient differed from everybody's in the last round.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for Federated Learning,
ICML 2020.

Sends: weights, and the change of its control variate. Keeps: its control variate, an estimate of its mean gradient.
Server: mean of the weights; the mean of all clients' control variates.

Departures:
1. A client's new control variate is the mean of the gradients of its steps (the paper's option II). With momentum,
   which the paper does not use, a gradient moves the weights more than once; the way is divided by how often, so that
   the estimate has no bias.
2. Weight decay and clipping are part of the gradient that is estimated.
3. Clients count the same in both means, as in the paper; weighting by examples is a setting.
4. Only parameters have control variates; the statistics of BatchNorm, which the paper does not consider, are averaged.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import Positive, SettingErrors, Uploads
from protofed.api.task import TaskSpec
from protofed.data.batches import Batch
from protofed.methods.families import GlobalModel, Weighting, Weights, WeightUpload
from protofed.methods.feddyn import mean_upload, zeros
from protofed.methods.fednova import needs_sgd, num_gradients, plain
from protofed.nn.networks import Model
from protofed.optim.optimizers import Optimizer
from protofed.tree import Params, record


@record
class Controlled(Weights):
    """What the server knows and sends: the global weights, and the mean of all clients' control variates."""

    control: Params  # of the parameters


@record
class ControlVariate:
    control: Params  # of the parameters


@record
class ControlledUpload(WeightUpload):
    change: Params  # of the client's control variate


@dataclass(frozen=True)
class Scaffold(GlobalModel[ControlVariate]):
    tags = ("global",)
    server_lr: Positive = 1.0
    """η_g, the global step size: how far the server goes towards the mean of the clients' weights."""
    weighting: Weighting = "uniform"
    """Whether clients count the same, or by their numbers of examples."""

    def validate(self, optimizer: Optimizer, batch_size: int, spec: TaskSpec | None) -> SettingErrors:
        return needs_sgd("SCAFFOLD", optimizer)

    def init_server(self, server: ServerContext) -> Controlled:
        params = super().init_server(server).params
        return Controlled(params, zeros(params, server.networks.trainable))

    def upload_spec(self, state: Weights, server: ServerContext) -> ControlledUpload:
        return ControlledUpload(state.params, torch.tensor(0), cast(Controlled, state).control)

    def aggregate(self, state: Weights, uploads: Uploads[WeightUpload], server: ServerContext) -> Controlled:
        mean, share = mean_upload(cast(Uploads[ControlledUpload], uploads), self.weighting, server)
        previous = cast(Controlled, state).control
        control = {name: leaf + share * mean.change[name] for name, leaf in previous.items()}
        stepped = {name: torch.lerp(state.params[name], mean.params[name], self.server_lr) for name in control}
        return Controlled({**mean.params, **stepped}, control)

    def init_memory(self, client: ClientContext, message: Weights) -> ControlVariate:
        return ControlVariate(zeros(message.params, client.networks.trainable))

    async def train(
        self, client: ClientContext, message: Weights, memory: ControlVariate
    ) -> Reply[WeightUpload, ControlVariate]:
        reply = await super().train(client, message, memory)
        known = cast(Controlled, message).control
        slope = mean_gradient(client, message.params, reply.upload.params, "SCAFFOLD")
        change = {name: slope[name] - leaf for name, leaf in known.items()}
        upload = ControlledUpload(reply.upload.params, reply.upload.num_examples, change)
        return Reply(upload, ControlVariate({name: leaf + change[name] for name, leaf in memory.control.items()}))

    def loss(self, model: Model, batch: Batch, message: Weights, memory: ControlVariate) -> Tensor:
        """Cross-entropy and a linear term, whose gradient is the correction c − cᵢ."""
        known = cast(Controlled, message).control
        correction = {name: known[name] - leaf for name, leaf in memory.control.items()}
        return batch.cross_entropy(model.logits(batch.x)) + inner_product(correction, model.params)


def mean_gradient(client: ClientContext, start: Params, end: Params, method: str) -> Params:
    """The mean of the gradients that led a client from `start` to `end`."""
    scale = plain(client.optimizer, method).for_round(client.round).lr * num_gradients(client, method)
    return {name: (start[name] - end[name]) / scale for name in client.networks.trainable}


def inner_product(a: Params, b: Params) -> Tensor:
    """Σ ⟨a_i, b_i⟩ over the entries of `a`."""
    return torch.stack([(leaf * b[name]).sum() for name, leaf in a.items()]).sum()
