"""FedADMM: clients solve their part of one constrained problem, and send how far weights and multipliers have moved.

Gong, Li, Freris: FedADMM: A Robust Federated Deep Learning Framework with Adaptivity to System Heterogeneity, ICDE
2022. Authors' code: YonghaiGong/FedADMM, `update.py` and `federated_main.py`.

Sends: weights, moved on by what its multiplier asks for. Keeps: its trained weights and its multiplier. Server: moves
towards the mean of what clients send, as far as the share of clients that replied.

Departures:
1. The multiplier is kept divided by the penalty (ADMM in scaled form): u = y/ρ. The client's loss differs from the
   augmented Lagrangian by a constant, and nothing is divided by ρ.
2. A client sends the received weights plus the paper's message Δ, so that the server's step of size 1 is a mean.
3. Δ is measured from the client's weights of its last round, as in the paper's algorithm, which are the initial ones
   before its first. The authors' code measures it from the received weights, so that Δ is twice the client's way,
   whatever the multiplier is (a setting).
4. The server's step size is by default the share of clients that replied, with which the global weights stay the mean
   over all clients of weights plus scaled multiplier. The authors' code takes 1, and ½ from round 60 on (a setting; it
   does not change in a run).
5. Clients begin to train from the received weights, as in the authors' code; from their own is a setting.
6. Clients count by their numbers of examples in the mean, as in all methods here; equally in the authors' code.
7. Clients train for the configured number of epochs. The authors' code draws it for each client and round, which
   `training.slow_share` does here.
8. Only parameters have a multiplier; the statistics of BatchNorm, which the paper does not consider, are averaged.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from protofed import tree
from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import NonNegative
from protofed.api.requests import Objective
from protofed.data.batches import Batch
from protofed.methods._shared.control_variates import drift_penalty, updated_drift, zeros
from protofed.methods._shared.losses import cross_entropy
from protofed.methods.families import OwnWeights, PlainSharing, Totals, Weights, WeightUpload
from protofed.nn.networks import Model
from protofed.tree import Params, record

Origin = Literal["own", "received"]


@record
class Primal(OwnWeights):
    """What a client keeps, of the parameters alone."""

    multiplier: Params  # u = y/ρ


@dataclass(frozen=True)
class FedADMM(PlainSharing[Weights, Primal]):
    tags = ("global",)
    penalty_weight: NonNegative = 0.01
    """ρ: how strongly a client is held to the received weights, less its scaled multiplier. At 0 there is no
    multiplier, clients send what they trained, and if all take part the method is FedAvg."""
    server_lr: NonNegative = 0.0
    """η, how far the server goes towards the mean of what clients send; 0: the share of clients that replied."""
    starts_from: Origin = "received"
    """Which weights a client's training begins from: those it received, or its own of its last round."""
    measured_from: Origin = "own"
    """What the change of a client's weights is measured from: its own weights of its last round, as in the paper, or
    the received ones, as in the authors' code."""

    def init_server(self, server: ServerContext) -> Weights:
        return Weights(server.initial_params())

    def public(self, state: Weights) -> tuple[Params, Weights] | None:
        return state.params, state

    def from_sum(self, state: Weights, totals: Totals, server: ServerContext) -> Weights:
        """θ ← θ + η · mean of Δ."""
        mean: Params = totals["upload"].value().params
        share = self.server_lr or self.share(totals, server)
        moved = {name: torch.lerp(state.params[name], mean[name], share) for name in server.networks.trainable}
        return Weights({**mean, **moved})

    def init_memory(self, client: ClientContext, message: Weights) -> Primal:
        names = client.networks.trainable
        return Primal(tree.select(client.initial_params(), names), zeros(message.params, names))

    async def train(self, client: ClientContext, message: Weights, memory: Primal) -> Reply[WeightUpload, Primal]:
        start = message.params if self.starts_from == "received" else {**message.params, **memory.params}
        params = await client.fit(Objective(self.loss), params=start, context=(message, memory))
        own = tree.select(params, client.networks.trainable)
        if not self.penalty_weight:
            return Reply(WeightUpload(params, client.num_examples), Primal(own, memory.multiplier))
        origin = memory.params if self.measured_from == "own" else message.params
        # θ + Δ = θ + (w⁺ − w) + (u⁺ − u), where u⁺ − u = w⁺ − θ.
        moved = {name: 2 * leaf - origin[name] for name, leaf in own.items()}
        multiplier = updated_drift(memory.multiplier, own, message.params)
        return Reply(WeightUpload({**params, **moved}, client.num_examples), Primal(own, multiplier))

    def trained_weights(self, upload: WeightUpload, memory: Primal) -> Params:
        return {**upload.params, **memory.params}

    def loss(self, model: Model, batch: Batch, message: Weights, memory: Primal) -> Tensor:
        """The augmented Lagrangian, of which the multiplier's term is ρ⟨u, w − θ⟩, up to a constant."""
        penalty = drift_penalty(model, message.params, memory.multiplier)
        return cross_entropy(model, batch) + self.penalty_weight * penalty
