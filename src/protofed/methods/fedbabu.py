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
from protofed.api.method import Clients, NonNegative, SettingErrors
from protofed.api.requests import Objective
from protofed.api.task import TaskSpec
from protofed.methods._shared.models import CLASSIFIER
from protofed.methods._shared.own_training import OwnOptimizer, own_optimizer, own_optimizer_errors
from protofed.methods.families import GlobalModel, OwnWeights, Totals, Weights, WeightUpload
from protofed.nn.networks import without
from protofed.optim.optimizers import Optimizer
from protofed.tree import Nothing, Params


@dataclass(frozen=True)
class FedBABU(GlobalModel[OwnWeights]):
    tags = ("global", "personal")
    clients_use = "own models"
    has_plain_classifier = False
    fine_tuning_epochs: Annotated[int, Ge(1)] = 5
    """τ_f, passes of a client over its data in which it fine-tunes the model."""
    fine_tuned: Literal["all", "body", "classifier"] = "all"
    """What is fine-tuned: all layers, or those of the body or the classifier alone."""
    fine_tuning_lr: NonNegative = 0.0
    """The learning rate of the fine-tuning; 0: as configured."""
    fine_tuning_optimizer: OwnOptimizer = "configured"
    """What fine-tunes: the configured optimiser, or "sgd", without momentum and weight decay."""

    def validate(self, optimizer: Optimizer, batch_size: int, spec: TaskSpec | None) -> SettingErrors:
        return own_optimizer_errors("fine_tuning_lr", optimizer, self.fine_tuning_lr, self.fine_tuning_optimizer)

    def upload_spec(self, state: Weights, server: ServerContext) -> WeightUpload:
        return WeightUpload(without(state.params, CLASSIFIER), torch.tensor(0))

    def from_sum(self, state: Weights, totals: Totals, server: ServerContext) -> Weights:
        """The mean body under the head that all began with."""
        return replace(state, params={**state.params, **totals["upload"].value().params})

    def init_memory(self, client: ClientContext, message: Weights) -> OwnWeights:
        return OwnWeights(message.params)

    def local_weights(self, message: Weights, memory: OwnWeights) -> Params:
        return memory.params

    async def train(
        self, client: ClientContext, message: Weights, memory: OwnWeights
    ) -> Reply[WeightUpload, OwnWeights]:
        body = Objective(self.loss, freezes=CLASSIFIER)
        params = await client.fit(body, params=message.params, context=(message, memory))
        fine_tuned = await self.fine_tune(client, message, memory)
        return Reply(WeightUpload(without(params, CLASSIFIER), client.num_examples), fine_tuned.memory)

    async def fine_tune(
        self, client: ClientContext, message: Weights, memory: OwnWeights
    ) -> Reply[Nothing, OwnWeights]:
        """The client's own model, from the one that it received."""
        params = await client.fit(
            Objective(
                self.loss,
                trains=CLASSIFIER if self.fine_tuned == "classifier" else ("*",),
                freezes=CLASSIFIER if self.fine_tuned == "body" else (),
            ),
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
