"""FedASAM: FedAvg whose clients look for flat minima, and whose server averages the last global models.

Caldarola, Caputo, Ciccone: Improving Generalization in Federated Learning by Seeking Flat Minima, ECCV 2022.

Sends: weights. Keeps: nothing. Server: mean weighted by the number of examples; in the last part of the run also the
running mean of the global models, which is what the public uses.

Departures:
1. The statistics of BatchNorm are those of the first gradient, taken at the weights themselves; the authors' code moves
   them at both.
2. Every global model from the start of the averaging on is averaged, and the clients' learning rate is as configured;
   the paper averages one model per cycle of a cyclic learning rate.
3. The average covers the statistics of BatchNorm; the authors' code leaves those of the first averaged model.
"""

from dataclasses import dataclass, replace
from typing import Annotated, cast

import torch
from annotated_types import Interval
from torch import Tensor

from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import NonNegative, SettingErrors, Uploads
from protofed.api.task import ClientId, TaskSpec
from protofed.data.batches import Batch
from protofed.errors import BadInput
from protofed.methods.averaging import averaged
from protofed.methods.families import GlobalModel, Weights, WeightUpload
from protofed.nn.networks import Model
from protofed.optim.optimizers import Adam, Asam, Optimizer, Sgd
from protofed.tree import Nothing, Params, record


@record
class Averaged(Weights):
    """The global weights, from which training goes on, and the mean of those of the last rounds."""

    average: Params
    count: Tensor  # (), how many global models are in the average


@dataclass(frozen=True)
class FedASAM(GlobalModel[Nothing]):
    tags = ("global", "server-side")
    rho: NonNegative = 0.7
    """ρ, the radius of the neighbourhood in which the sharpness is measured."""
    eta: NonNegative = 0.2
    """η, added to |w| in the scale of each weight; biases are not scaled."""
    averaging: bool = True
    """Whether the server averages the global models of the last rounds (SWA)."""
    averaging_start: Annotated[float, Interval(ge=0, le=1)] = 0.75
    """The share of the rounds after which the averaging starts."""

    def validate(self, optimizer: Optimizer, batch_size: int, spec: TaskSpec | None) -> SettingErrors:
        if not isinstance(optimizer, Sgd | Adam):
            kind = type(optimizer).__name__.lower()
            what = f"FedASAM makes the optimiser sharpness-aware itself: take sgd or adam, not {kind}"
            yield "training.optimizer.name", what

    def init_server(self, server: ServerContext) -> Averaged:
        sharpness_aware(server.optimizer, self.rho, self.eta)  # refuses here what no client could train with
        params = super().init_server(server).params
        return Averaged(params, params, torch.tensor(0))

    def message_for(self, state: Weights, client: ClientId) -> Weights:
        return Weights(state.params)

    def aggregate(self, state: Weights, uploads: Uploads[WeightUpload], server: ServerContext) -> Averaged:
        previous = cast(Averaged, state)
        params = super().aggregate(state, uploads, server).params
        is_late = self.averaging and server.round + 1 > self.averaging_start * server.num_rounds
        return Averaged(params, *averaged(previous.average, previous.count, params, is_late))

    def public(self, state: Weights) -> tuple[Params, Weights] | None:
        return cast(Averaged, state).average, Weights(state.params)

    async def train(self, client: ClientContext, message: Weights, memory: Nothing) -> Reply[WeightUpload, Nothing]:
        optimizer = sharpness_aware(client.optimizer, self.rho, self.eta)
        return await super().train(replace(client, optimizer=optimizer), message, memory)

    def loss(self, model: Model, batch: Batch, message: Weights, memory: Nothing) -> Tensor:
        return batch.cross_entropy(model.logits(batch.x))


def sharpness_aware(base: Optimizer, rho: float, eta: float) -> Asam:
    """The configured optimiser, descending the adaptive sharpness."""
    if not isinstance(base, Sgd | Adam):
        raise BadInput(f"FedASAM makes the optimiser sharpness-aware itself: configure sgd or adam, not {base}")
    return Asam(base=base, rho=rho, eta=eta)
