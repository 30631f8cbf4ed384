"""FedAvg-FT: FedAvg, after which every client fine-tunes the global model on its own data and keeps the result.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized
Data, AISTATS 2017, with the fine-tuning that papers on personalisation compare against.

Sends: weights. Keeps: the global model as it fine-tuned it; nothing of that is sent. Server: mean weighted by the
number of examples.

Departures:
1. A client fine-tunes the global model that it received in every round that it takes part in, so that personal accuracy
   can be followed, and all clients fine-tune the final one after the last round.
2. All layers are fine-tuned; the head alone, as in the authors' code of FedRep, is a setting. Statistics of BatchNorm
   move in both.
3. Papers differ in the number of epochs of fine-tuning; 10 here.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from protofed.api.contexts import ClientContext, Reply
from protofed.api.method import Clients, NonNegative, SettingErrors
from protofed.api.requests import Objective
from protofed.api.task import TaskSpec
from protofed.methods._shared.models import CLASSIFIER
from protofed.methods._shared.own_training import OwnOptimizer, own_optimizer, own_optimizer_errors
from protofed.methods.families import GlobalModel, OwnWeights, Weights, WeightUpload
from protofed.optim.optimizers import Optimizer
from protofed.tree import Nothing, Params


@dataclass(frozen=True)
class FedAvgFT(GlobalModel[OwnWeights]):
    tags = ("global", "personal")
    clients_use = "own models"
    fine_tuning_epochs: Annotated[int, Ge(1)] = 10
    """Passes of a client over its data in which it fine-tunes the global model."""
    fine_tuned: Literal["all", "classifier"] = "all"
    """The layers that are fine-tuned."""
    fine_tuning_lr: NonNegative = 0.0
    """The learning rate of the fine-tuning; 0: as configured."""
    fine_tuning_optimizer: OwnOptimizer = "configured"
    """What fine-tunes: the configured optimiser, or "sgd", without momentum and weight decay."""

    def validate(self, optimizer: Optimizer, batch_size: int, spec: TaskSpec | None) -> SettingErrors:
        return own_optimizer_errors("fine_tuning_lr", optimizer, self.fine_tuning_lr, self.fine_tuning_optimizer)

    def init_memory(self, client: ClientContext, message: Weights) -> OwnWeights:
        return OwnWeights(message.params)

    def local_weights(self, message: Weights, memory: OwnWeights) -> Params:
        return memory.params

    async def train(
        self, client: ClientContext, message: Weights, memory: OwnWeights
    ) -> Reply[WeightUpload, OwnWeights]:
        params = await client.fit(Objective(self.loss), params=message.params, context=(message, memory))
        fine_tuned = await self.fine_tune(client, message, memory)
        return Reply(WeightUpload(params, client.num_examples), fine_tuned.memory)

    async def fine_tune(
        self, client: ClientContext, message: Weights, memory: OwnWeights
    ) -> Reply[Nothing, OwnWeights]:
        params = await client.fit(
            Objective(self.loss, trains=("*",) if self.fine_tuned == "all" else CLASSIFIER),
            params=message.params,
            context=(message, memory),
            epochs=self.fine_tuning_epochs,
            optimizer=own_optimizer(client.optimizer, self.fine_tuning_lr, self.fine_tuning_optimizer, client.halvings),
        )
        return Reply(Nothing(), OwnWeights(params))

    def finish(self, state: Weights, clients: Clients) -> Weights:
        for _ in clients.run(self.fine_tune, lambda client: self.message_for(state, client), Nothing()):
            pass
        return state
