"""Models of clusters of clients, as in FedPC: what clients descend, what clusters take from each other, and a model for
everyone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from torch import Tensor

from protofed.api.contexts import ServerContext
from protofed.api.evaluation import Reading
from protofed.api.method import NonNegative, Positive
from protofed.api.roles import Count, Prototype
from protofed.api.task import ClientId
from protofed.data.batches import Batch
from protofed.methods._shared.global_models import by_nearest, initial_head, with_heads
from protofed.methods._shared.mixing import entry, stacked, weighted_mean
from protofed.methods.families import Averages, OwnWeights
from protofed.nn.networks import Model
from protofed.prototypes import class_means, contrast
from protofed.prototypes.class_means import PrototypeMode, Prototypes
from protofed.prototypes.clusters import Rho, blended_prototypes, similarity_shares
from protofed.tree import Params, record

Distance = Literal["norm", "square", "mean_square", "mean_square_examples"]


@record
class Description:
    """What decides a client's own cluster, and nothing else."""

    mean: Annotated[Tensor, Prototype(is_shared=False)]  # (C, D), zero where the class is absent
    count: Annotated[Tensor, Count()]  # (C,), 1 where the client has the class, else 0


@dataclass(frozen=True, kw_only=True)
class BetweenClusters(Averages):
    """What clients descend, and what clusters take from each other, whoever finds the clusters."""

    cross_entropy_weight: NonNegative = 0.5
    """α in Eq. (4)."""
    pull_weight: NonNegative = 0.5
    """γ in Eq. (4): how strongly features are pulled to the prototypes of the cluster."""
    distance: Distance = "mean_square_examples"
    """Distance in Eq. (3), from a batch to the prototypes of its classes. `norm`: Σ over the batch's classes of
    ‖mean − prototype‖, as printed. `square`: Σ of its square. `mean_square`: Σ of its square divided by the number of
    dimensions. `mean_square_examples`: that of each example instead of the class's mean, mean over the batch."""
    rho: Rho = "cosine"
    """ρ in Eq. (6): cosines divided by their sum, their softmax, or equal shares."""
    temperature: Positive = 0.1
    """The temperature of the softmax, if ρ is one; not in the paper."""
    prototype_mode: PrototypeMode = "recomputed"
    """Whether a client's prototypes, Eq. (2), are recomputed after training or the running means of its last epoch."""

    def loss(self, model: Model, batch: Batch, prototypes: Prototypes) -> Tensor:
        """The local objective, Eq. (4)."""
        z = model.features(batch.x)
        cross_entropy = batch.cross_entropy(model.scores(z))
        pull = prototype_distance(z, batch, prototypes, self.distance)
        return self.cross_entropy_weight * cross_entropy + self.pull_weight * pull

    def between(self, params: Sequence[Params], sent: Prototypes) -> tuple[Params, Prototypes]:
        """What each cluster takes from all by their similarity, Eq. (6) to (8), entries (J, ...)."""
        shares = similarity_shares(sent, self.rho, self.temperature)
        mixed = stacked([weighted_mean(zip(params, row, strict=True)) for row in shares.tolist()])  # Eq. (8)
        return mixed, blended_prototypes(sent, shares)


def prototype_distance(z: Tensor, batch: Batch, prototypes: Prototypes, distance: Distance) -> Tensor:
    """L_p in Eq. (3), in one of its readings."""
    if distance == "mean_square_examples":
        return batch.mean(contrast.pull(z, batch.y, prototypes.mean, prototypes.is_known))
    batch_means = class_means.class_sums(z, batch.y, batch.weight, len(prototypes.count)).prototypes()
    squares = (batch_means.mean - prototypes.mean.detach()).square()  # (C, D)
    of_classes = squares.mean(-1) if distance == "mean_square" else squares.sum(-1)
    if distance == "norm":
        of_classes = (of_classes + 1e-12).sqrt()
    return (of_classes * (batch_means.is_known & prototypes.is_known)).sum()


def for_everyone(
    extractor: Params, sent: Prototypes, memories: Mapping[ClientId, OwnWeights], server: ServerContext
) -> dict[str, Reading]:
    """The three readings of a model for everyone, of the mean extractor and what clusters have sent."""
    prototypes = global_prototypes(sent)
    nearest = Reading({**extractor, **initial_head(server)}, by_nearest, (prototypes,))
    found = {"nearest_prototype": nearest} if prototypes.is_known.any() else {}
    return {**found, **with_heads(extractor, memories, server)}


def mean_by_size(params: Params, sizes: Tensor) -> Params:
    """The mean of the clusters' extractors (J, ...) by numbers of clients (J,), of all alike if there are none."""
    weights = sizes.tolist() if sizes.any() else [1.0] * len(sizes)
    return weighted_mean((entry(params, j), weight) for j, weight in enumerate(weights))


def global_prototypes(sent: Prototypes) -> Prototypes:
    """The mean of the clusters' prototypes (J, C, D) by what is behind them."""
    weights = sent.count.double()  # (J, C)
    count = sent.count.sum(0)
    mean = (weights[..., None] * sent.mean.double()).sum(0) / count.clamp(min=1)[:, None]
    return Prototypes(mean.to(sent.mean.dtype), count)
