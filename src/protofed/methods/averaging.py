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

from protofed.method import Central, Uploads
from protofed.methods.families import Enclosing, GlobalModel, Weights
from protofed.methods.fedavg import FedAvg
from protofed.tree import Mean, Params, record


@record
class Averaged:
    base: Weights  # the server's record of the base method, from which training goes on
    average: Params
    count: Tensor  # (), how many global models are in the average


@dataclass(frozen=True)
class Averaging(Enclosing):
    tags = ("global", "server-side", "wrapper")
    base: GlobalModel[Any] = field(default_factory=FedAvg)
    """The method whose global models are averaged."""
    start: Annotated[float, Interval(ge=0, le=1)] = 0.75
    """The share of the rounds after which the averaging starts."""

    def init_server(self, central: Central) -> Averaged:
        base = self.base.init_server(central)
        return Averaged(base, self.published(base)[0], torch.tensor(0))

    def aggregate(self, server: Averaged, uploads: Uploads[Any], central: Central) -> Averaged:
        base = self.base.aggregate(server.base, uploads, central)
        params, is_late = self.published(base)[0], central.round + 1 > self.start * central.num_rounds
        return Averaged(base, *averaged(server.average, server.count, params, is_late))

    def public(self, server: Averaged) -> tuple[Params, Any] | None:
        return server.average, self.published(server.base)[1]


def averaged(average: Params, count: Tensor, params: Params, is_late: bool) -> tuple[Params, Tensor]:
    """The mean of `count` models and one more, and how many it is of; before its time the average is the last model."""
    if not is_late:
        return params, count
    mean = Mean()
    mean.add(average, int(count))
    mean.add(params)
    return mean.value(), count + 1
