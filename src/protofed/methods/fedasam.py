"""FedASAM: FedAvg whose clients look for flat minima, and whose server may average the last global models.

Caldarola, Caputo, Ciccone: Improving Generalization in Federated Learning by Seeking Flat Minima, ECCV 2022.

Sends: weights. Keeps: nothing. Server: mean; with `averaging`, in the last part of the run also the running mean of
the global models, which is then the public one.

Departures:
1. The statistics of BatchNorm are those of the first gradient, taken at the weights themselves; the authors' code moves
   them at both.
2. Every global model from the start of the averaging on is averaged, and the clients' learning rate is as configured;
   the paper averages one model per cycle of a cyclic learning rate.
3. The average covers the statistics of BatchNorm; the authors' code leaves those of the first averaged model.
"""

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from annotated_types import Interval
from torch import Tensor

from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import NonNegative, SettingErrors
from protofed.api.task import TaskSpec
from protofed.errors import BadInput
from protofed.methods._shared.mixing import running_average
from protofed.methods.families import PlainSharing, Totals, Weights, WeightUpload
from protofed.optim.optimizers import PLAIN, Asam, Optimizer, Plain
from protofed.tree import Nothing, Params, record


@record
class AveragedWeights(Weights):
    """The global weights, from which training goes on, and the mean of those of the last rounds."""

    average: Params
    count: Tensor  # (), how many global models are in the average


@dataclass(frozen=True)
class FedASAM(PlainSharing[AveragedWeights, Nothing]):
    tags = ("global", "server-side")
    rho: NonNegative = 0.05
    """ρ, the radius of the neighbourhood in which the sharpness is measured. The paper takes 0.7 on CIFAR-10."""
    eta: NonNegative = 0.2
    """η, added to |w| in the scale of each weight; biases are not scaled."""
    averaging: bool = False
    """Whether the server averages the global models of the last rounds, too: the paper's FedASAM + SWA."""
    averaging_start: Annotated[float, Interval(ge=0, le=1)] = 0.75
    """The share of the rounds after which the averaging starts."""

    def validate(self, optimizer: Optimizer, batch_size: int, spec: TaskSpec | None) -> SettingErrors:
        if not isinstance(optimizer, Plain):
            kind = type(optimizer).__name__.lower()
            what = f"FedASAM makes the optimiser sharpness-aware itself: take one of {', '.join(PLAIN)}, not {kind}"
            yield "training.optimizer.name", what

    def init_server(self, server: ServerContext) -> AveragedWeights:
        sharpness_aware(server.optimizer, self.rho, self.eta)  # refuses here what no client could train with
        params = server.initial_params()
        return AveragedWeights(params, params, torch.tensor(0))

    def from_sum(self, state: AveragedWeights, totals: Totals, server: ServerContext) -> AveragedWeights:
        params = super().from_sum(state, totals, server).params
        has_started = self.averaging and server.round + 1 > self.averaging_start * server.num_rounds
        return AveragedWeights(params, *running_average(state.average, state.count, params, has_started))

    def public(self, state: AveragedWeights) -> tuple[Params, Weights] | None:
        return state.average, Weights(state.params)

    async def train(self, client: ClientContext, message: Weights, memory: Nothing) -> Reply[WeightUpload, Nothing]:
        optimizer = sharpness_aware(client.optimizer, self.rho, self.eta)
        return await super().train(replace(client, optimizer=optimizer), message, memory)


def sharpness_aware(base: Optimizer, rho: float, eta: float) -> Asam:
    """The configured optimiser, descending the adaptive sharpness."""
    if not isinstance(base, Plain):
        known = ", ".join(PLAIN)
        raise BadInput(f"FedASAM makes the optimiser sharpness-aware itself: configure one of {known}, not {base}")
    return Asam(base=base, rho=rho, eta=eta)
