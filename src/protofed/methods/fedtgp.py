"""FedTGP: clients share class prototypes, and the server trains global ones from them that keep classes apart.

Zhang, Liu, Hua, Cao: FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning for Data
and Model Heterogeneity in Federated Learning, AAAI 2024.

Sends: class prototypes, and which classes it has. Keeps: its whole model. Server: trains a vector for each class, and a
small network that makes the global prototypes of them, on the clients' prototypes.

Written from the authors' code, `flcore/servers/servertgp.py` and `flcore/clients/clienttgp.py` of
github.com/TsingZ0/FedTGP.

Departures:
1. The margin is the largest of the distances from each class's mean prototype to the nearest other one, as in the
   authors' code, or the threshold if that is smaller.
2. The server's rate is a setting of its own; in the authors' code it is that of the clients, 0.01.
3. A class that no client has sent yet has no global prototype, though the server trains one, which keeps others away
   from where it lies.
4. Distances are at least 1e-6, where the root has a finite slope.
5. The nearest global prototype predicts, as in the authors' code; the client's classifier is a setting, and predicts
   until there are prototypes.
6. An example whose class has no prototype is not pulled but counts in the mean over the batch, as in the authors' code.
7. The pull weighs 3 by default; the authors' code has 10, which learns slowly on small tasks. It is a mean over the
   dimensions, so that each of a few features is pulled harder than each of the authors' 512.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor

from protofed import tree
from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import Method, NonNegative, Positive, Uploads
from protofed.api.requests import Objective
from protofed.api.task import ClientId
from protofed.api.views import Points
from protofed.data.batches import Batch
from protofed.methods.families import OwnWeights
from protofed.nn.networks import Model
from protofed.nn.precision import product
from protofed.prototypes import class_means, contrast
from protofed.prototypes.class_means import Prototypes
from protofed.tree import Params, record

SMALLEST_DISTANCE = 1e-6


@record
class Trained:
    generator: Params  # what makes the global prototypes: an embedding of each class and two linear layers
    prototypes: Prototypes


@dataclass(frozen=True)
class FedTGP(Method[Trained, Prototypes, OwnWeights, Prototypes]):
    tags = ("personal", "prototype", "heterogeneous", "server-side")
    pull_weight: NonNegative = 3.0
    """λ, how strongly features are pulled to the global prototype of their class."""
    margin_threshold: NonNegative = 100.0
    """τ, the largest margin."""
    server_epochs: Annotated[int, Ge(1)] = 100
    """S, passes of the server over the clients' prototypes in a round."""
    server_batch: Annotated[int, Ge(1)] = 10
    """Client prototypes in a step of the server."""
    server_rate: Positive = 0.01
    """The server's learning rate."""
    inference: Literal["nearest_prototype", "classifier"] = "nearest_prototype"
    """Who predicts: the nearest global prototype, or the client's own classifier."""

    private = ("*",)

    # ---- the server's half

    def init_server(self, server: ServerContext) -> Trained:
        prototypes = class_means.no_prototypes(server.num_classes, server.feature_dim)
        return Trained(initial_generator(server.num_classes, server.feature_dim, server.generator), prototypes)

    def message_for(self, state: Trained, client: ClientId) -> Prototypes:
        return state.prototypes

    def upload_spec(self, state: Trained, server: ServerContext) -> Prototypes:
        return state.prototypes

    def aggregate(self, state: Trained, uploads: Uploads[Prototypes], server: ServerContext) -> Trained:
        """Global prototypes, trained by adaptive-margin contrast (servertgp.py, receive_protos and update_TGP)."""
        sent = dict(uploads)
        prototypes, device = [sent[client] for client in sorted(sent)], state.prototypes.count.device
        with torch.device("cpu"):  # a few prototypes are quicker there than the launches that a GPU would take
            weights = tree.map(Tensor.cpu, state.generator)
            trained = self.trained(weights, tree.map(Tensor.cpu, prototypes), server.generator)
            mean = generated(trained).detach()
            owners = torch.stack([p.is_known.cpu() for p in prototypes]).sum(0).to(state.prototypes.count.dtype)
            count = torch.where(owners > 0, owners, state.prototypes.count.cpu())
            known = Prototypes(torch.where(count[:, None] > 0, mean, 0.0), count)
        return tree.map(lambda leaf: leaf.to(device), Trained(trained, known))

    def trained(self, weights: Params, sent: list[Prototypes], draws: torch.Generator) -> Params:
        """The generator after the server's training."""
        z = torch.cat([p.mean[p.is_known] for p in sent])  # (M, D)
        y = torch.cat([p.is_known.nonzero().flatten() for p in sent])  # (M,)
        margin = min(largest_gap(sent), self.margin_threshold)
        for _ in range(self.server_epochs):
            for rows in torch.split(torch.randperm(len(y), generator=draws), self.server_batch):
                weights = {name: leaf.detach().requires_grad_() for name, leaf in weights.items()}
                loss = margin_contrast(z[rows], y[rows], generated(weights), margin)
                slopes = torch.autograd.grad(loss, list(weights.values()))
                weights = {
                    name: leaf.detach() - self.server_rate * slope
                    for (name, leaf), slope in zip(weights.items(), slopes, strict=True)
                }
        return weights

    def prototype_sets(self, state: Trained) -> Mapping[str, Points]:
        return {"global prototypes": class_means.points(state.prototypes)}

    # ---- the client's half

    def init_memory(self, client: ClientContext, message: Prototypes) -> OwnWeights:
        return OwnWeights(client.initial_params())

    def local_weights(self, message: Prototypes, memory: OwnWeights) -> Params:
        return memory.params

    async def train(
        self, client: ClientContext, message: Prototypes, memory: OwnWeights
    ) -> Reply[Prototypes, OwnWeights]:
        params = await client.fit(Objective(self.loss), params=memory.params, context=(message,))
        means = await class_means.of_client(client, params)
        return Reply(class_means.ownership(means), OwnWeights(params))

    def loss(self, model: Model, batch: Batch, prototypes: Prototypes) -> Tensor:
        """The local objective: cross-entropy, and the squared error to the class's prototype (clienttgp.py, train)."""
        z = model.features(batch.x)
        pull = contrast.pull(z, batch.y, prototypes.mean, prototypes.is_known)
        return batch.cross_entropy(model.scores(z)) + self.pull_weight * batch.mean(pull)

    def predict(self, model: Model, x: Tensor, message: Prototypes, memory: OwnWeights | None) -> Tensor:
        """The nearest prototype, or the own classifier."""
        z = model.features(x)
        scores = model.scores(z)
        if self.inference == "classifier":
            return scores
        nearest = contrast.nearest(z, message.mean, message.is_known)
        return torch.where(message.is_known.any(), nearest, scores)


def initial_generator(num_classes: int, dim: int, draws: torch.Generator) -> Params:
    """An embedding of standard normal numbers and two linear layers D → D, drawn as torch draws them."""
    bound = dim**-0.5

    def uniform(*shape: int) -> Tensor:
        drawn = torch.rand(*shape, generator=draws)
        return drawn.mul(2 * bound).sub(bound)

    return {
        "embedding": torch.randn(num_classes, dim, generator=draws),
        "middle.weight": uniform(dim, dim),
        "middle.bias": uniform(dim),
        "last.weight": uniform(dim, dim),
        "last.bias": uniform(dim),
    }


def generated(weights: Params) -> Tensor:
    """The global prototypes, (C, D)."""
    hidden = F.linear(weights["embedding"], weights["middle.weight"], weights["middle.bias"]).relu()
    made: Tensor = F.linear(hidden, weights["last.weight"], weights["last.bias"])
    return made


def largest_gap(sent: Iterable[Prototypes]) -> float:
    """Over the classes, the largest distance of a class's mean prototype to the nearest other; without a limit if there
    are not two classes."""
    prototypes = list(sent)
    sums = class_means.summed(map(class_means.of_owner, prototypes))
    mean = class_means.mean_of(sums, tree.map(torch.zeros_like, prototypes[0]))
    known = mean.mean[mean.is_known].double()
    if len(known) < 2:
        return inf
    apart = (known[:, None] - known).norm(dim=-1)
    return float(apart.fill_diagonal_(inf).amin(-1).max())


def margin_contrast(z: Tensor, y: Tensor, prototypes: Tensor, margin: float) -> Tensor:
    """−log softmax of the negative distances to the global prototypes, the own one a margin further away, ()."""
    squares = z.square().sum(-1, keepdim=True) - 2 * product(z, prototypes.T) + prototypes.square().sum(-1)
    distance = squares.clamp(min=SMALLEST_DISTANCE**2).sqrt()  # (B, C)
    is_own = torch.arange(len(prototypes)) == y[:, None]
    return F.cross_entropy(-(distance + margin * is_own), y)
