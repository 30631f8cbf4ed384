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
from typing import Literal

from protofed.api.contexts import ClientContext, Reply
from protofed.api.requests import Objective
from protofed.methods._shared.fine_tuning import FineTunedModels
from protofed.methods._shared.models import CLASSIFIER
from protofed.methods.families import OwnWeights, Weights, WeightUpload


@dataclass(frozen=True)
class FedAvgFT(FineTunedModels):
    tags = ("global", "personal")
    fine_tuned: Literal["all", "classifier"] = "all"
    """The layers that are fine-tuned."""

    async def train(
        self, client: ClientContext, message: Weights, memory: OwnWeights
    ) -> Reply[WeightUpload, OwnWeights]:
        params = await client.fit(Objective(self.loss), params=message.params, context=(message, memory))
        fine_tuned = await self.fine_tune(client, message, memory)
        return Reply(WeightUpload(params, client.num_examples), fine_tuned.memory)

    def fine_tuning(self) -> Objective:
        return Objective(self.loss, trains=("*",) if self.fine_tuned == "all" else CLASSIFIER)
