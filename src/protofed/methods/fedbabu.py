"""FedBABU: clients train the body under a head that never changes; each fine-tunes the model for itself at the end.

Oh, Kim, Yun: FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR 2022.

Sends: the weights of everything but the classifier. Keeps: the model that it fine-tuned; nothing of that is sent.
Server: mean weighted by the number of examples; the classifier stays as it was drawn.

Departures:
1. The classifier is one part of the network. The authors' code (`main_fed.py` and `models/Update.py` of
   jhoon-oh/FedBABU) gives it the learning rate 0, which is the same; momentum and weight decay leave it alone here too.
2. The classifier travels down with the body, though it never changes, so that a client needs nothing else.
3. A client fine-tunes the model that it received in every round that it takes part in, so that personal accuracy can
   be followed, and all clients fine-tune the final one after the last round; the authors fine-tune once, at the end.
4. Clients count by their numbers of examples in the mean, as in all methods here; equally in the authors' code.
5. The learning rate is as configured; the authors divide it by 10 after half and after three quarters of the rounds.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from annotated_types import Ge

from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.requests import Objective
from protofed.methods._shared.fine_tuning import FineTunedModels
from protofed.methods._shared.models import CLASSIFIER
from protofed.methods.families import OwnWeights, Totals, Weights, WeightUpload
from protofed.nn.networks import without


@dataclass(frozen=True)
class FedBABU(FineTunedModels):
    tags = ("global", "personal")
    has_plain_classifier = False
    fine_tuning_epochs: Annotated[int, Ge(1)] = 5
    """τ_f, passes of a client over its data in which it fine-tunes the model."""
    fine_tuned: Literal["all", "body", "classifier"] = "all"
    """What is fine-tuned: all layers, or those of the body or the classifier alone."""

    def upload_spec(self, state: Weights, server: ServerContext) -> WeightUpload:
        return WeightUpload(without(state.params, CLASSIFIER), torch.tensor(0))

    def from_sum(self, state: Weights, totals: Totals, server: ServerContext) -> Weights:
        """The mean body under the head that all began with."""
        return replace(state, params={**state.params, **totals["upload"].value().params})

    async def train(
        self, client: ClientContext, message: Weights, memory: OwnWeights
    ) -> Reply[WeightUpload, OwnWeights]:
        body = Objective(self.loss, freezes=CLASSIFIER)
        params = await client.fit(body, params=message.params, context=(message, memory))
        fine_tuned = await self.fine_tune(client, message, memory)
        return Reply(WeightUpload(without(params, CLASSIFIER), client.num_examples), fine_tuned.memory)

    def fine_tuning(self) -> Objective:
        return Objective(
            self.loss,
            trains=CLASSIFIER if self.fine_tuned == "classifier" else ("*",),
            freezes=CLASSIFIER if self.fine_tuned == "body" else (),
        )
