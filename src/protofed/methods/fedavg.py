"""FedAvg: clients train the global model, the server averages what they made of it.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized
Data, AISTATS 2017.

Sends: weights. Keeps: nothing. Server: mean weighted by the number of examples.

Departures: none.
"""

from dataclasses import dataclass

from protofed.api.requests import Objective
from protofed.methods._shared.one_step import OneStep
from protofed.methods.families import GlobalModel, Weights
from protofed.prototypes.class_means import ClassSums
from protofed.tree import Nothing, Params, Tree


@dataclass(frozen=True)
class FedAvg(GlobalModel[Nothing], OneStep):
    tags = ("global",)

    def record_loss(self, message: Weights, round: int, num_rounds: int) -> tuple[Objective, tuple[Tree, ...]]:
        return Objective(self.loss), (message, Nothing())

    def after_step(self, state: Weights, params: Params, sums: ClassSums | None) -> Weights:
        return Weights(params)
