"""Averaging: the public model is the mean of the global models of the last rounds, whatever method makes them.

Izmailov, Podoprikhin, Garipov, Vetrov, Wilson: Averaging Weights Leads to Wider Optima and Better Generalization, UAI
2018 (SWA), at the server as in Caldarola, Caputo, Ciccone: Improving Generalization in Federated Learning by Seeking
Flat Minima, ECCV 2022.

Sends: what the base method sends. Keeps: what the base method keeps. Server: what the base method does; in the last
part of the run also the running mean of the global models, which is what the public uses.

Departures:
1. Every global model from the start of the averaging on is averaged, and the clients' learning rate is as configured;
   the paper averages one model per cycle of a cyclic learning rate.
2. The average covers the statistics of BatchNorm; the authors' code leaves those of the first averaged model.
3. What is averaged is the base's public model, so that around a base that averages too (FedASAM with its own averaging)
   the result is a mean of means.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from annotated_types import Interval
from torch import Tensor

from protofed.api.contexts import ServerContext
from protofed.api.method import Method
from protofed.methods._shared.mixing import running_average
from protofed.methods._shared.wrappers import StatefulWrapper, published
from protofed.methods.fedavg import FedAvg
from protofed.tree import Params, Tree, record


@record
class Averaged:
    base: Tree  # the server's record of the base method, from which training goes on
    average: Params
    count: Tensor  # (), how many global models are in the average


@dataclass(frozen=True)
class Averaging(StatefulWrapper):
    tags = ("global", "server-side", "wrapper")
    base: Method[Any, Any, Any, Any] = field(default_factory=FedAvg)
    """The method whose global models are averaged."""
    start: Annotated[float, Interval(ge=0, le=1)] = 0.75
    """The share of the rounds after which the averaging starts."""

    def init_server(self, server: ServerContext) -> Averaged:
        base = self.base.init_server(server)
        return Averaged(base, published(self.base, base)[0], torch.tensor(0))

    def with_base(self, state: Averaged, base: Any, server: ServerContext) -> Averaged:
        params, has_started = published(self.base, base)[0], server.round + 1 > self.start * server.num_rounds
        return Averaged(base, *running_average(state.average, state.count, params, has_started))

    def public(self, state: Averaged) -> tuple[Params, Any] | None:
        return state.average, published(self.base, state.base)[1]
