"""A method of your own, named in experiment.toml: FedAvg whose clients also keep their features small."""

from dataclasses import dataclass

from torch import Tensor

from protofed import Batch, Model
from protofed.api.method import NonNegative
from protofed.methods.families import GlobalModel, Weights
from protofed.tree import Nothing


@dataclass(frozen=True)
class FedSmall(GlobalModel[Nothing]):
    feature_decay: NonNegative = 0.01
    """Weight of the mean squared feature in the loss."""

    def loss(self, model: Model, batch: Batch, message: Weights, memory: Nothing) -> Tensor:
        z = model.features(batch.x)
        decay = self.feature_decay * batch.mean(z.square().mean(-1))
        return batch.cross_entropy(model.scores(z)) + decay
