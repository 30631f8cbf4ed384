"""FedOPT: FedAvg whose server takes the mean update of the clients as a gradient for an optimiser of its own.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: Adaptive Federated Optimization, ICLR 2021; with
`server_optimizer = "momentum"` FedAvgM: Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for
Federated Visual Classification, 2019.

Sends: weights. Keeps: nothing. Server: one step of Adam, Yogi, Adagrad or momentum along the mean update, whose moments
it keeps.

Departures:
1. Clients are weighted by their numbers of examples, as in all methods here; the algorithm of the paper prints the
   plain mean.
2. The second moment starts at τ², the least value that the paper allows.
3. The default server rate is 0.03, which learns within a few rounds; the paper tunes it for each task.
4. Moments are those of parameters; the statistics of BatchNorm, which the paper does not consider, are averaged.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Interval
from torch import Tensor

from protofed.api.contexts import ServerContext
from protofed.api.method import Positive
from protofed.methods._shared.control_variates import zeros
from protofed.methods.families import PlainSharing, Totals, Weights
from protofed.tree import Nothing, Params, record

Share = Annotated[float, Interval(ge=0, lt=1)]


@record
class Moments(Weights):
    """The global weights, and what the server's optimiser remembers."""

    first: Params  # of the parameters, m
    second: Params  # of the parameters, v


@dataclass(frozen=True)
class FedOPT(PlainSharing[Moments, Nothing]):
    tags = ("global", "server-side")
    server_optimizer: Literal["adam", "yogi", "adagrad", "momentum"] = "adam"
    """FedAdam, FedYogi and FedAdagrad, or FedAvgM."""
    server_lr: Positive = 0.03
    """η, the server's learning rate. The paper tunes it for each task, between 0.001 and 10."""
    momentum: Share = 0.9
    """β₁: how much of the first moment is kept from round to round. With Adagrad nothing is, as in the paper."""
    second_momentum: Share = 0.99
    """β₂: how much of the second moment is kept from round to round, with Adam and Yogi."""
    adaptivity: Positive = 1e-3
    """τ, added to the root of the second moment: the smaller, the more the sign of an update decides a step."""

    def init_server(self, server: ServerContext) -> Moments:
        params = server.initial_params()
        first = zeros(params, server.networks.trainable)
        return Moments(params, first, {name: leaf + self.adaptivity**2 for name, leaf in first.items()})

    def public(self, state: Moments) -> tuple[Params, Weights] | None:
        return state.params, Weights(state.params)

    def from_sum(self, state: Moments, totals: Totals, server: ServerContext) -> Moments:
        mean: Params = totals["upload"].value().params
        params, first, second = dict(mean), {}, {}
        for name, old in state.first.items():
            weight = state.params[name].double()
            delta = mean[name].double() - weight
            m, v = self.moments(old.double(), state.second[name].double(), delta)
            step = m if self.server_optimizer == "momentum" else m / (v.sqrt() + self.adaptivity)
            params[name] = (weight + self.server_lr * step).to(old.dtype)
            first[name], second[name] = m.to(old.dtype), v.to(old.dtype)
        return Moments(params, first, second)

    def moments(self, m: Tensor, v: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Both moments after a round whose mean update was delta."""
        if self.server_optimizer == "momentum":
            return self.momentum * m + delta, v
        square, kept = delta.square(), self.second_momentum
        if self.server_optimizer == "adagrad":
            v = v + square
        elif self.server_optimizer == "adam":
            v = kept * v + (1 - kept) * square
        else:
            v = v - (1 - kept) * square * torch.sign(v - square)  # never below 0: what is taken away is less than v
        first = 0.0 if self.server_optimizer == "adagrad" else self.momentum
        return first * m + (1 - first) * delta, v
