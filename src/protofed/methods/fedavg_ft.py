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
from protofed.api.method import Clients
from protofed.api.requests import Objective
from protofed.methods._shared.models import CLASSIFIER
from protofed.methods.families import GlobalModel, OwnWeights, Weights, WeightUpload
from protofed.tree import Nothing, Params


@dataclass(frozen=True)
class FedAvgFT(GlobalModel[OwnWeights]):
    tags = ("global", "personal")
    clients_use = "own models"
    fine_tuning_epochs: Annotated[int, Ge(1)] = 10
    """Passes of a client over its data in which it fine-tunes the global model."""
    fine_tuned: Literal["all", "classifier"] = "all"
    """The layers that are fine-tuned."""

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
        objective = Objective(self.loss, trains=("*",) if self.fine_tuned == "all" else CLASSIFIER)
        epochs = self.fine_tuning_epochs
        params = await client.fit(objective, params=message.params, context=(message, memory), epochs=epochs)
        return Reply(Nothing(), OwnWeights(params))

    def finish(self, state: Weights, clients: Clients) -> Weights:
        for _ in clients.run(self.fine_tune, lambda client: self.message_for(state, client), Nothing()):
            pass
        return state
