"""FedEM: several models shared by all, which every client weighs for itself and for each of its examples.

Marfoq, Neglia, Bellet, Kameni, Vidal: Federated Multi-Task Learning under a Mixture of Distributions, NeurIPS 2021.
Authors' code: omarfoq/FedEM, `client.py` (MixtureClient) and `learners_ensemble.py`.

Sends: the weights of all components. Keeps: how much it weighs each component. Server: mean of every component,
weighted by the number of examples.

Departures:
1. The components are parts of one network and train together, on the same batches; in the authors' code one after
   another, each on batches in an order of its own. Where gradients are clipped, it is those of all together.
2. Components start from different weights, drawn one after another from the run's seed. The first is the initial
   network of every other method.
3. The E-step sees all of a client's training examples, in evaluation mode and unvaried.
4. A client that has not taken part weighs all components equally, as does one that the server has never met. The paper
   and the authors' code let such a client take an E-step first.
5. A client's weights are those of its last E-step, which came before its last training, as in the paper. The components
   that it is tested with are newer.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor

from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.requests import Objective
from protofed.api.task import ClientId, TaskSpec
from protofed.data.batches import Batch, Data
from protofed.methods.families import PlainSharing, Weights, WeightUpload
from protofed.nn.networks import Model, Parts
from protofed.tree import Params, record


@record
class Mixture:
    weight: Tensor  # (M,), π of the client, sums to 1


@dataclass(frozen=True)
class FedEM(PlainSharing[Weights, Mixture]):
    tags = ("personal",)
    num_components: Annotated[int, Ge(1)] = 3
    """M, how many models are mixed. With 1 it trains as FedAvg does."""

    has_plain_classifier = False

    def networks(self, spec: TaskSpec, client: ClientId) -> Parts:
        """The task's network, and more like it: the parts of component m > 0 end in m."""
        components = [spec.model(client) for _ in range(self.num_components)]
        return {named(part, m): module for m, parts in enumerate(components) for part, module in parts.items()}

    def init_server(self, server: ServerContext) -> Weights:
        return Weights(server.initial_params())

    def init_memory(self, client: ClientContext, message: Weights) -> Mixture:
        return Mixture(torch.full((self.num_components,), 1 / self.num_components))

    def local_weights(self, message: Weights, memory: Mixture) -> Params:
        return message.params

    async def train(self, client: ClientContext, message: Weights, memory: Mixture) -> Reply[WeightUpload, Mixture]:
        losses = await client.map(self.losses, message.params)  # (n, M)
        responsibility = responsibilities(losses, memory.weight)
        context = responsibility, places(client.data)
        params = await client.fit(Objective(self.weighted_loss), params=message.params, context=context)
        return Reply(WeightUpload(params, client.num_examples), Mixture(responsibility.mean(0)))

    def scores(self, model: Model, x: Tensor) -> Tensor:
        """Of the classes by each component, (M, B, C)."""
        return torch.stack([scores_of(model, m, x) for m in range(self.num_components)])

    def losses(self, model: Model, batch: Batch) -> Tensor:
        """Cross-entropy of each example by each component, (B, M)."""
        return torch.stack(
            [F.cross_entropy(scores, batch.y, reduction="none") for scores in self.scores(model, batch.x)], -1
        )

    def weighted_loss(self, model: Model, batch: Batch, responsibility: Tensor, place: Tensor) -> Tensor:
        """The M-step: the sum of the components' losses, each example by how much the component is responsible."""
        return batch.mean((responsibility[place[batch.index]] * self.losses(model, batch)).sum(-1))

    def predict(self, model: Model, x: Tensor, message: Weights, memory: Mixture | None) -> Tensor:
        """log Σ π_m p_m."""
        weight = torch.full((self.num_components,), 1.0, device=x.device) if memory is None else memory.weight
        return (self.scores(model, x).log_softmax(-1) + weight.log()[:, None, None]).logsumexp(0)


def named(part: str, component: int) -> str:
    return f"{part}_{component}" if component else part


def scores_of(model: Model, component: int, x: Tensor) -> Tensor:
    """What one component says, (B, C)."""
    z = getattr(model, named("features", component))(x)
    if "projection" in model.networks.parts:
        z = getattr(model, named("projection", component))(z)
    scores: Tensor = getattr(model, named("classifier", component))(z)
    return scores


def responsibilities(losses: Tensor, weight: Tensor) -> Tensor:
    """The E-step: q(m) ∝ π_m exp(−loss), for each example, (n, M)."""
    return (weight.log() - losses).softmax(-1)


def places(data: Data) -> Tensor:
    """Which of a client's examples stands in each row of the store, (N,)."""
    place = torch.zeros(len(data.x), dtype=torch.int64)
    place[data.index] = torch.arange(len(data))
    return place
