"""CCVR: after the last round the server retrains the classifier on features drawn from the classes' Gaussians.

Luo, Chen, Hu, Zhang, Liang, Feng: No Fear of Heterogeneity: Classifier Calibration for Federated Learning with Non-IID
Data, NeurIPS 2021.

Sends: what the base method sends; once, after the last round, the number of examples of each class and the mean and
covariance of their features under the global model. Keeps: what the base method keeps. Server: what the base method
does; at the end a Gaussian for each class, pooled over clients, and a classifier retrained on draws from these.

Departures:
1. Features are what the classifier reads: the output of the part `projection` where there is one. The classifier alone
   is calibrated; features and projection stay.
2. Covariances are divided by n − 1 at the clients and in the pool, so that the pooled one is that of all features
   together; public code divides by n at the clients.
3. The pooled covariance is a sum over clients of covariances and of the squared distances of their means, in float64;
   the paper's differences of squares lose digits.
4. Draws use the symmetric square root of the covariance, with negative eigenvalues, which are rounding, taken as 0: a
   covariance of few examples has not the full rank that other roots need.
5. A class of one example in all has a small isotropic covariance.
6. A class that nobody has is left out of the loss, so that its row of the classifier stays; of no class at all nothing
   is calibrated.
7. Features are fitted as they are; the power transform of the paper is left out, since it would change the model's
   prediction too.
8. When a round is evaluated that is not the last, its model is calibrated for this test alone; what that sends is not
   counted.
9. The paper does not give the schedule of the retraining: 10 epochs of SGD in batches of 64 here, from the classifier
   of the base.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor

from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import Clients, Method, Positive
from protofed.api.requests import Objective
from protofed.api.sums import Summand
from protofed.data.batches import Batch
from protofed.methods._shared.losses import known_cross_entropy
from protofed.methods._shared.models import CLASSIFIER, embedded, server_embedding
from protofed.methods._shared.wrappers import StatefulWrapper, published
from protofed.methods.families import Summands
from protofed.methods.fedavg import FedAvg
from protofed.nn.networks import Model, matching
from protofed.optim.optimizers import Sgd
from protofed.prototypes.gaussians import (
    ClassGaussians,
    class_gaussians,
    moments,
    no_gaussians,
    of_moments,
    pooled,
    virtual_features,
)
from protofed.tree import Params, Tree, record

BATCH = 64


@record
class Calibrated:
    base: Tree  # the server's record of the base method
    classifier: Params  # the base's until the last round, then the retrained one


@dataclass(frozen=True)
class CCVR(StatefulWrapper):
    tags = ("global", "server-side", "wrapper")
    retrains_classifier = True
    base: Method[Any, Any, Any, Any] = field(default_factory=FedAvg)
    """The method whose classifier is calibrated."""
    samples: Annotated[int, Ge(1)] = 100
    """M_c, the number of virtual features of each class. The paper takes 100 on CIFAR-10, 500 on CIFAR-100."""
    epochs: Annotated[int, Ge(1)] = 10
    """Passes of the retraining over the virtual features."""
    rate: Positive = 0.01
    """Learning rate of the retraining."""

    def calibrated(self, base: Any) -> Calibrated:
        """What the server knows when nothing is calibrated yet."""
        return Calibrated(base, matching(published(self.base, base)[0], CLASSIFIER))

    def init_server(self, server: ServerContext) -> Calibrated:
        return self.calibrated(self.base.init_server(server))

    def setup(self, state: Calibrated, clients: Clients) -> Calibrated:
        return self.calibrated(self.base.setup(state.base, clients))

    def with_base(self, state: Calibrated, base: Any, server: ServerContext) -> Calibrated:
        return self.calibrated(base)

    def public(self, state: Calibrated) -> tuple[Params, Any] | None:
        params, message = published(self.base, state.base)
        return {**params, **state.classifier}, message

    def public_variants(self, state: Calibrated) -> Mapping[str, tuple[Params, Any]]:
        params, message = published(self.base, state.base)
        calibrated = {**params, **state.classifier}
        return {"before calibration": (params, message), "after calibration": (calibrated, message)}

    def finish(self, state: Calibrated, clients: Clients) -> Calibrated:
        return self.with_calibration(self.base.finish(state.base, clients), clients)

    def judged(self, state: Calibrated, clients: Clients) -> Calibrated:
        return self.with_calibration(state.base, clients)

    def with_calibration(self, base: Any, clients: Clients) -> Calibrated:
        """The calibration."""
        server = clients.server
        params, _ = published(self.base, base)
        width = server_embedding(server, params, torch.zeros(1, server.feature_dim)).shape[-1]
        like = no_gaussians(server.num_classes, width)
        asked = self.describe, lambda c: replace(self.base.message_for(base, c), params=params), like
        if clients.summing is None:
            gaussians = pooled(clients.run(*asked), like)
        else:
            gaussians = of_moments(clients.summing.summed(*asked, added)["moments"].total)
        if not gaussians.count.any():  # nobody may tell of any class
            return self.calibrated(base)
        objective = Objective(virtual_loss, trains=CLASSIFIER)
        params = server.fit(
            objective,
            params=params,
            data=virtual_features(gaussians, self.samples, server.generator),
            context=(gaussians.count > 0,),
            epochs=self.epochs,
            batch_size=BATCH,
            optimizer=Sgd(lr=self.rate, momentum=0.9),
        )
        return Calibrated(base, matching(params, CLASSIFIER))

    def summand_of(self, step: str) -> Summand:
        return added if step == "describe" else super().summand_of(step)

    async def describe(self, client: ClientContext, message: Any, memory: Any) -> Reply[ClassGaussians, Any]:
        z = await client.map(classified, message.params)
        return Reply(class_gaussians(z, client.data.labels, client.num_classes), memory)


def added(upload: ClassGaussians, message: Any) -> Summands:
    """What a client's Gaussians add to sums, from which the pooled ones can be made."""
    return {"moments": (moments(upload), 1.0)}


def classified(model: Model, batch: Batch) -> Tensor:
    """What the classifier reads."""
    return embedded(model, batch.x)


def virtual_loss(model: Model, batch: Batch, is_known: Tensor) -> Tensor:
    """Cross-entropy of the classifier on features."""
    return batch.mean(known_cross_entropy(model.classifier(batch.x), batch.y, is_known))
