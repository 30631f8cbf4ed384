"""FedNova: FedAvg that averages the clients' mean gradients, so that clients with more steps do not count more.

Wang, Liu, Liang, Joshi, Poor: Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization,
NeurIPS 2020.

Sends: weights, and its effective number of local steps. Keeps: nothing. Server: mean of the normalised updates,
weighted by the number of examples, and as many steps along it as clients took on average.

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

import torch
from torch import Tensor

from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import SettingErrors
from protofed.api.task import TaskSpec
from protofed.methods._shared.control_variates import effective_steps, needs_sgd
from protofed.methods.families import PublicWeights, Summands, Totals, Weights, WeightUpload
from protofed.optim.optimizers import Optimizer
from protofed.tree import Nothing, record


@record
class NormalisedUpload(WeightUpload):
    steps: Tensor  # (), float64, ‖a‖₁, the effective number of local steps


@dataclass(frozen=True)
class FedNova(PublicWeights[Weights, Nothing, NormalisedUpload]):
    tags = ("global",)

    def validate(self, optimizer: Optimizer, batch_size: int, spec: TaskSpec | None) -> SettingErrors:
        return needs_sgd("FedNova", optimizer)

    def init_server(self, server: ServerContext) -> Weights:
        return Weights(server.initial_params())

    def upload_spec(self, state: Weights, server: ServerContext) -> NormalisedUpload:
        return NormalisedUpload(state.params, torch.tensor(0), torch.tensor(0.0, dtype=torch.float64))

    def summand(self, upload: NormalisedUpload, message: Weights) -> Summands:
        """The upload, and its update divided by the effective number of steps."""
        steps = upload.steps.clamp(min=1)
        direction = {name: (leaf.double() - message.params[name]) / steps for name, leaf in upload.params.items()}
        return {**super().summand(upload, message), "direction": (direction, self.weight_of(upload.num_examples))}

    def from_sum(self, state: Weights, totals: Totals, server: ServerContext) -> Weights:
        mean: NormalisedUpload = totals["upload"].value()
        direction = totals["direction"].value()
        delta = {name: mean.steps * direction[name] for name in server.networks.trainable}
        stepped = {name: (state.params[name] + leaf).to(state.params[name].dtype) for name, leaf in delta.items()}
        return Weights({**mean.params, **stepped})

    async def train(self, client: ClientContext, message: Weights, memory: Nothing) -> Reply[NormalisedUpload, Nothing]:
        params = await self.trained(client, message, memory)
        steps = torch.tensor(effective_steps(client, "FedNova"), dtype=torch.float64)
        return Reply(NormalisedUpload(params, client.num_examples, steps), memory)
