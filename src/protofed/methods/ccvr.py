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
6. A class that nobody has is left out of the loss, so that its row of the classifier stays.
7. Features are fitted as they are; the power transform of the paper is left out, since it would change the model's
   prediction too.
8. The paper does not give the schedule of the retraining: 10 epochs of SGD in batches of 64 here, from the classifier
   of the base.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor

from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import Clients, Method, Positive, Uploads
from protofed.api.requests import Objective
from protofed.api.roles import Count, Prototype
from protofed.data.batches import Batch, Data
from protofed.methods._shared.losses import known_cross_entropy
from protofed.methods._shared.models import CLASSIFIER, embedded, server_embedding
from protofed.methods.families import StatefulWrapper, published
from protofed.methods.fedavg import FedAvg
from protofed.nn.networks import Model, matching
from protofed.optim.optimizers import Sgd
from protofed.tree import Params, Tree, record

BATCH = 64
LONE_VARIANCE = 1e-3
"""Of each dimension, for a class of which there is one example."""


@record
class ClassGaussians:
    count: Annotated[Tensor, Count()]  # (C,), examples of each class; 0 marks an absent class
    mean: Annotated[Tensor, Prototype()]  # (C, P)
    covariance: Tensor  # (C, P, P), divided by count − 1; zero where the count is at most 1


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

    def aggregate(self, state: Calibrated, uploads: Uploads[Any], server: ServerContext) -> Calibrated:
        return self.calibrated(self.base.aggregate(state.base, uploads, server))

    def public(self, state: Calibrated) -> tuple[Params, Any] | None:
        params, message = published(self.base, state.base)
        return {**params, **state.classifier}, message

    def finish(self, state: Calibrated, clients: Clients) -> Calibrated:
        """The calibration."""
        base, server = self.base.finish(state.base, clients), clients.server
        params, _ = published(self.base, base)
        width = server_embedding(server, params, torch.zeros(1, server.feature_dim)).shape[-1]
        like = no_gaussians(server.num_classes, width)
        uploads = clients.run(self.describe, lambda c: replace(self.base.message_for(base, c), params=params), like)
        known = pooled(uploads, like)
        objective = Objective(virtual_loss, trains=CLASSIFIER)
        params = server.fit(
            objective,
            params=params,
            data=virtual_features(known, self.samples, server.generator),
            context=(known.count > 0,),
            epochs=self.epochs,
            batch_size=BATCH,
            optimizer=Sgd(lr=self.rate, momentum=0.9),
        )
        return Calibrated(base, matching(params, CLASSIFIER))

    async def describe(self, client: ClientContext, message: Any, memory: Any) -> Reply[ClassGaussians, Any]:
        z = await client.map(classified, message.params)
        return Reply(class_gaussians(z, client.data.labels, client.num_classes), memory)


def classified(model: Model, batch: Batch) -> Tensor:
    """What the classifier reads."""
    return embedded(model, batch.x)


def virtual_loss(model: Model, batch: Batch, is_known: Tensor) -> Tensor:
    """Cross-entropy of the classifier on features."""
    return batch.mean(known_cross_entropy(model.classifier(batch.x), batch.y, is_known))


def no_gaussians(num_classes: int, width: int) -> ClassGaussians:
    square = torch.zeros(num_classes, width, width)
    return ClassGaussians(torch.zeros(num_classes), torch.zeros(num_classes, width), square)


def class_gaussians(z: Tensor, y: Tensor, num_classes: int) -> ClassGaussians:
    """Count, mean and covariance of the features (n, P) of each class."""
    found = no_gaussians(num_classes, z.shape[-1])
    for c in y.bincount(minlength=num_classes).nonzero().flatten().tolist():
        own = z[y == c].double()
        apart = own - own.mean(0)
        found.count[c] = len(own)
        found.mean[c] = own.mean(0)
        found.covariance[c] = apart.T @ apart / max(len(own) - 1, 1)
    return found


def pooled(uploads: Uploads[ClassGaussians], like: ClassGaussians) -> ClassGaussians:
    """Count, mean and covariance of the features of all clients together, in float64."""
    count, mean, scatter = like.count.double(), like.mean.double(), like.covariance.double()
    for _, own in uploads:
        added, total = own.count.double(), (count + own.count).clamp(min=1)
        way = (own.mean.double() - mean) * (added > 0)[:, None]  # (C, P), from the mean so far to the client's
        between = (count * added / total)[:, None, None] * way[:, :, None] * way[:, None, :]
        scatter = scatter + (added - 1).clamp(min=0)[:, None, None] * own.covariance.double() + between
        mean = mean + (added / total)[:, None] * way
        count = count + added
    return ClassGaussians(count, mean, scatter / (count - 1).clamp(min=1)[:, None, None])


def virtual_features(known: ClassGaussians, samples: int, draws: torch.Generator) -> Data:
    """Features drawn from the Gaussian of every class that there is."""
    features, labels = [], []
    for c in (known.count > 0).nonzero().flatten().tolist():
        covariance = known.covariance[c]
        if known.count[c] == 1:
            covariance = LONE_VARIANCE * torch.eye(len(covariance), dtype=covariance.dtype)
        normal = torch.randn(samples, len(covariance), dtype=covariance.dtype, generator=draws)
        features.append(known.mean[c] + normal @ square_root(covariance))
        labels.append(torch.full((samples,), c))
    return Data.of(torch.cat(features).float(), torch.cat(labels))


def square_root(covariance: Tensor) -> Tensor:
    """The symmetric root: it does not depend on the choice of eigenvectors, and small changes change it little."""
    values, vectors = torch.linalg.eigh(covariance)
    root: Tensor = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    return root
