"""Clients that fine-tune the global model and use what comes of it."""

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from annotated_types import Ge

from protofed.api.contexts import ClientContext, Reply
from protofed.api.method import Clients, NonNegative, SettingErrors
from protofed.api.requests import Objective
from protofed.api.task import TaskSpec
from protofed.methods._shared.own_training import OwnOptimizer, own_optimizer, own_optimizer_errors
from protofed.methods.families import OwnModels, OwnWeights, Weights
from protofed.optim.optimizers import Optimizer
from protofed.tree import Nothing


@dataclass(frozen=True)
class FineTunedModels(OwnModels):
    fine_tuning_epochs: Annotated[int, Ge(1)] = 10
    """Passes of a client over its data in which it fine-tunes the global model."""
    fine_tuning_lr: NonNegative = 0.0
    """The learning rate of the fine-tuning; 0: as configured."""
    fine_tuning_optimizer: OwnOptimizer = "configured"
    """What fine-tunes: the configured optimiser, or "sgd", without momentum and weight decay."""

    @abstractmethod
    def fine_tuning(self) -> Objective:
        """The loss of the fine-tuning, and the layers that it trains."""

    def validate(self, optimizer: Optimizer, batch_size: int, spec: TaskSpec | None) -> SettingErrors:
        return own_optimizer_errors("fine_tuning_lr", optimizer, self.fine_tuning_lr, self.fine_tuning_optimizer)

    async def fine_tune(
        self, client: ClientContext, message: Weights, memory: OwnWeights
    ) -> Reply[Nothing, OwnWeights]:
        """The client's own model, from the one that it received."""
        params = await client.fit(
            self.fine_tuning(),
            params=message.params,
            context=(message, memory),
            epochs=self.fine_tuning_epochs,
            optimizer=own_optimizer(client.optimizer, self.fine_tuning_lr, self.fine_tuning_optimizer, client.halvings),
        )
        return Reply(Nothing(), OwnWeights(params))

    def finish(self, state: Weights, clients: Clients) -> Weights:
        for _ in clients.run(self.fine_tune, partial(self.message_for, state), Nothing()):
            pass
        return state
