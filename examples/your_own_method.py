"""A method of your own: FedAvg whose clients also keep their features small. Nothing to register."""

from dataclasses import dataclass

from torch import Tensor

import protofed
from protofed import Batch, Model
from protofed.methods.families import GlobalModel, Weights
from protofed.tree import Nothing


@dataclass(frozen=True)
class FedSmall(GlobalModel[Nothing]):
    feature_decay: float = 0.01
    """How strongly features are drawn to zero."""

    def loss(self, model: Model, batch: Batch, message: Weights, memory: Nothing) -> Tensor:
        z = model.features(batch.x)
        decay = self.feature_decay * batch.mean(z.square().mean(-1))
        return batch.cross_entropy(model.scores(z)) + decay


if __name__ == "__main__":
    result = protofed.run(FedSmall(feature_decay=0.05), "minidigits", rounds=2, epochs=1)
    for domain, accuracy in result.accuracy("last").items():
        print(f"{domain:8} {100 * accuracy:.1f} %")
    print(f"average  {100 * result.metrics('last')['average']:.1f} %")
