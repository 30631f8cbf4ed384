"""FedDC: clients learn against their drift from the global weights, and correct their gradients towards everybody's.

Gao, Fu, Li, Chen, Xu, Xu: FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and Correction,
CVPR 2022.

Sends: weights, and the change of its gradient. Keeps: its drift, the sum of all its updates from received to trained
weights, and its mean gradient in the last round. Server: mean of the weights, moved on by the mean drift of all
clients; the mean of all clients' gradients.

Departures:
1. The server adds up the mean drift from the weights that it receives, so that no client sends its drift.
2. The means are weighted by examples, as in all methods here. With `weighting = "uniform"`, as in the authors' code, a
   client of more examples has a weaker penalty and correction instead, by its relative number of examples. Both have
   the optimum of all examples together.
3. The number of steps is the client's own; the authors' code takes the mean client's for all.
4. With momentum, which the authors' code does not use, a gradient moves the weights more than once; the update is
   divided by how often, so that the estimate of the mean gradient has no bias.
5. With α = 0 there is no drift: nothing would hold a client to it, and the server takes the mean alone.
6. Only parameters have drift and gradients; the statistics of BatchNorm, which the paper does not consider, are
   averaged.
7. The authors' code clips the gradient at norm 10; here that is a setting of the optimiser.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import NonNegative, SettingErrors
from protofed.api.task import ClientId, TaskSpec
from protofed.data.batches import Batch
from protofed.methods._shared.control_variates import (
    OWN_GRADIENTS,
    added,
    corrected,
    drift_penalty,
    inner_product,
    mean_gradient,
    needs_sgd,
    updated_drift,
    zeros,
)
from protofed.methods._shared.losses import cross_entropy
from protofed.methods.families import Totals, Weights, WeightSharing, WeightUpload
from protofed.nn.networks import Model
from protofed.optim.optimizers import Optimizer
from protofed.tree import Params, record


@record
class Decoupled(Weights):
    """What the server knows."""

    drift: Params  # of the parameters, the mean over all clients
    gradient: Params  # of the parameters, the mean over all clients
    sizes: dict[ClientId, Tensor]  # (), each client's number of examples, 1 on average


@record
class Guided(Weights):
    """What a client receives."""

    gradient: Params
    size: Tensor  # (), its own


@record
class Decoupling:
    """What a client keeps."""

    drift: Params
    gradient: Params


@record
class GradientUpload(WeightUpload):
    change: Params  # of the client's gradient, times its size


@dataclass(frozen=True)
class FedDC(WeightSharing[Decoupled, Guided, Decoupling, GradientUpload]):
    tags = ("global",)
    penalty_weight: NonNegative = 0.01
    """α: how strongly a client is held to the received weights, less its drift."""
    gradient_correction: bool = True
    """Whether gradients are corrected; without, the penalty is all, and that of FedDyn."""

    needs_fresh_optimizer = OWN_GRADIENTS

    def validate(self, optimizer: Optimizer, batch_size: int, spec: TaskSpec | None) -> SettingErrors:
        return needs_sgd("FedDC", optimizer)

    def init_server(self, server: ServerContext) -> Decoupled:
        params = server.initial_params()
        zero = zeros(params, server.networks.trainable)
        return Decoupled(params, zero, zero, relative_sizes(server.spec, self.is_uniform))

    def message_for(self, state: Decoupled, client: ClientId) -> Guided:
        return Guided(state.params, state.gradient, state.sizes.get(client, torch.tensor(1.0)))

    def public(self, state: Decoupled) -> tuple[Params, Guided] | None:
        return state.params, Guided(state.params, state.gradient, torch.tensor(1.0))

    def upload_spec(self, state: Decoupled, server: ServerContext) -> GradientUpload:
        return GradientUpload(state.params, torch.tensor(0), state.gradient)

    def from_sum(self, state: Decoupled, totals: Totals, server: ServerContext) -> Decoupled:
        mean: GradientUpload = totals["upload"].value()
        share = self.share(totals, server)
        drift = updated_drift(state.drift, mean.params, state.params, share)
        params = corrected(mean.params, drift) if self.penalty_weight else mean.params
        return Decoupled(params, drift, added(state.gradient, mean.change, share), state.sizes)

    def init_memory(self, client: ClientContext, message: Guided) -> Decoupling:
        zero = zeros(message.params, client.networks.trainable)
        return Decoupling(zero, zero)

    async def train(
        self, client: ClientContext, message: Guided, memory: Decoupling
    ) -> Reply[GradientUpload, Decoupling]:
        params = await self.trained(client, message, memory)
        change = {name: torch.zeros_like(leaf) for name, leaf in memory.gradient.items()}
        if self.gradient_correction:
            gradient = mean_gradient(client, message.params, params, "FedDC")
            change = {name: gradient[name] - leaf / message.size for name, leaf in message.gradient.items()}
        sent = {name: leaf * message.size for name, leaf in change.items()}
        upload = GradientUpload(params, client.num_examples, sent)
        drift = updated_drift(memory.drift, params, message.params)
        return Reply(upload, Decoupling(drift, added(memory.gradient, change)))

    def loss(self, model: Model, batch: Batch, message: Guided, memory: Decoupling) -> Tensor:
        """The local objective: cross-entropy, the penalty of the drift, and the correction of the gradient."""
        penalty = drift_penalty(model, message.params, memory.drift) / message.size
        correction = {name: message.gradient[name] / message.size - leaf for name, leaf in memory.gradient.items()}
        towards = self.penalty_weight * penalty + inner_product(correction, model.params)
        return cross_entropy(model, batch) + towards


def relative_sizes(spec: TaskSpec, is_uniform: bool) -> dict[ClientId, Tensor]:
    """Each client's number of examples over the mean client's; 1 for all where the means are weighted."""
    mean = spec.num_examples / len(spec.clients)
    sizes = {client: enrolment.num_examples / mean for client, enrolment in spec.clients.items()}
    return {client: torch.tensor(size if is_uniform else 1.0) for client, size in sizes.items()}
