"""FedGen: the server trains a generator of features on the clients' classifiers, and clients learn from its features.

Zhu, Hong, Zhou: Data-Free Knowledge Distillation for Heterogeneous Federated Learning, ICML 2021.

Sends: weights, and its number of examples of each class. Keeps: nothing. Server: mean weighted by the number of
examples; trains the generator so that the clients' classifiers agree on the classes of what it makes.

Departures:
1. Features are what the classifier reads: the output of the part `projection` where there is one. The classifiers are
   all that the generator sees of the clients' models.
2. The loss of the generator is that of the authors' code (`serverpFedGen.py` of zhuangdizhu/FedGen): the cross-entropy
   of each client's classifier, weighted by its share of the examples of the class. The paper takes that of the mean of
   the classifiers' scores. The code's term against the server's own model has the weight 0 there, and is left out.
3. Noise is normal, as in the paper; uniform between 0 and 1 in the authors' code, whose comment says normal.
4. Classes are drawn evenly from those that the clients of the last round have, as in the authors' code; in the paper as
   frequent as they are.
5. Clients descend the paper's loss and a divergence from the scores of generated features of the same class, which the
   authors' code adds. The weights of both terms fall from round to round as in that code. It leaves them out after 20
   local epochs of a round; here they stay.
6. A step makes as many features as the batch has examples.
7. The generator's optimiser begins anew in each round, and its learning rate stays; in the authors' code it goes on,
   and the rate falls by 2 % in each round.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Ge, Interval
from torch import Tensor, nn

from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import NonNegative, Positive, Uploads
from protofed.api.requests import Objective
from protofed.api.roles import Count
from protofed.api.task import ClientId, TaskSpec
from protofed.data.batches import Batch, Data
from protofed.methods._shared.mixing import entry, stacked
from protofed.methods._shared.models import CLASSIFIER, embedding_dim
from protofed.methods.families import PublicWeights, Weights, WeightUpload
from protofed.nn.networks import Model, Parts, Patterns, matching, without
from protofed.optim.optimizers import Adam
from protofed.tree import Mean, Nothing, Params, record

GENERATOR: Patterns = ("generator.*",)
NOISE = 32


@record
class WithGenerator(Weights):
    generator: Params
    is_known: Tensor  # (C,), bool, the classes that the generator was last trained on; none before the first round


@record
class CountingUpload(WeightUpload):
    count: Annotated[Tensor, Count()]  # (C,), examples of each class


class Generator(nn.Module):
    """What a classifier may read of an example of a class, made of noise."""

    def __init__(self, num_classes: int, hidden: int, dim: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.layers = nn.Sequential(
            nn.Linear(NOISE + num_classes, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, dim)
        )

    def forward(self, noise: Tensor, y: Tensor) -> Tensor:
        is_class = torch.arange(self.num_classes, device=y.device) == y[:, None]  # (B, C)
        features: Tensor = self.layers(torch.cat([noise, is_class.to(noise.dtype)], dim=-1))
        return features


@dataclass(frozen=True)
class FedGen(PublicWeights[WithGenerator, Nothing, CountingUpload]):
    tags = ("global", "server-side")
    has_plain_classifier = False
    generated_weight: NonNegative = 1.0
    """α, the weight of the cross-entropy of generated features. The authors' code has 10."""
    agreement_weight: NonNegative = 1.0
    """β, the weight of the divergence from the scores of generated features of the same class. The authors' code has
    10, and 1 on EMNIST."""
    decay: Annotated[float, Interval(ge=0, le=1)] = 0.98
    """What both weights are multiplied by from round to round."""
    diversity_weight: NonNegative = 1.0
    """η, how strongly generated features are kept apart."""
    generator_steps: Annotated[int, Ge(1)] = 50
    """Steps of the generator in a round."""
    generator_batch: Annotated[int, Ge(2)] = 32
    """Features that the generator makes in a step of its own."""
    generator_lr: Positive = 3e-4
    """The learning rate of the generator, which is trained by Adam."""
    hidden: Annotated[int, Ge(1)] = 256
    """The size of the generator's hidden layer."""

    def networks(self, spec: TaskSpec, client: ClientId) -> Parts:
        parts = spec.model(client)
        return {**parts, "generator": Generator(spec.num_classes, self.hidden, embedding_dim(spec, parts))}

    def init_server(self, server: ServerContext) -> WithGenerator:
        params, none = server.initial_params(), torch.zeros(server.num_classes, dtype=torch.bool)
        return WithGenerator(without(params, GENERATOR), matching(params, GENERATOR), none)

    def upload_spec(self, state: WithGenerator, server: ServerContext) -> CountingUpload:
        return CountingUpload(state.params, torch.tensor(0), torch.zeros(server.num_classes, dtype=torch.int64))

    def aggregate(self, state: WithGenerator, uploads: Uploads[CountingUpload], server: ServerContext) -> WithGenerator:
        """Algorithm 1 at the server: the mean of the weights, and the generator trained on all classifiers."""
        mean, classifiers, counts = Mean(), [], []
        for _, upload in uploads:
            mean.add(upload.params, self.weight_of(upload.num_examples))
            classifiers.append(matching(upload.params, CLASSIFIER))
            counts.append(upload.count)
        params, count = mean.value(), torch.stack(counts).double()  # (K, C)
        is_known, share = count.sum(0) > 0, (count / count.sum(0).clamp(min=1)).float()
        if not is_known.any():  # nobody may tell of any class
            return WithGenerator(params, state.generator, state.is_known)
        trained = server.fit(
            Objective(self.generator_loss, trains=GENERATOR),
            params={**params, **state.generator},
            data=self.requests(is_known, server.generator),
            context=(stacked(classifiers), share),
            batch_size=self.generator_batch,
            optimizer=Adam(lr=self.generator_lr, weight_decay=0.01),
        )
        return WithGenerator(params, matching(trained, GENERATOR), is_known)

    def requests(self, is_known: Tensor, draws: torch.Generator) -> Data:
        """Noise and classes for a round of the generator."""
        size, known = self.generator_steps * self.generator_batch, is_known.nonzero().flatten()
        y = known[torch.randint(len(known), (size,), generator=draws)]
        return Data.of(torch.randn(size, NOISE, generator=draws), y)

    def generator_loss(self, model: Model, batch: Batch, classifiers: Params, share: Tensor) -> Tensor:
        """The cross-entropy of the clients' classifiers on what the generator makes, and how alike that is."""
        z = model.generator(batch.x, batch.y)  # (B, P)
        losses = [batch.mean(self.diversity_weight * likeness(batch.x, z))]
        for k, weight in enumerate(share):
            scores = model.frozen({**model.params, **entry(classifiers, k)}).classifier(z)
            losses.append(batch.mean(weight[batch.y] * F.cross_entropy(scores, batch.y, reduction="none")))
        return torch.stack(losses).sum()

    def local_weights(self, message: WithGenerator, memory: Nothing) -> Params:
        return {**message.params, **message.generator}

    def trained_weights(self, upload: CountingUpload, memory: Nothing) -> Params:
        return upload.params

    async def train(
        self, client: ClientContext, message: WithGenerator, memory: Nothing
    ) -> Reply[CountingUpload, Nothing]:
        strength = self.decay**client.round * message.is_known.any().float()  # (), 0 before the generator has learnt
        params = await client.fit(
            Objective(self.local_loss, freezes=GENERATOR),
            params=self.local_weights(message, memory),
            context=(message.is_known, strength),
        )
        count = client.data.labels.bincount(minlength=client.num_classes)
        return Reply(CountingUpload(without(params, GENERATOR), client.num_examples, count), memory)

    def local_loss(self, model: Model, batch: Batch, is_known: Tensor, strength: Tensor) -> Tensor:
        """Cross-entropy of the examples and of generated features, and the divergence of the examples' scores from
        those of generated features of their classes."""
        scores = model.classifier(model.embedding(model.features(batch.x)))  # (B, C)
        draws = batch.normal(len(batch.y), 2 * NOISE + len(is_known))
        noise, other_noise, chance = draws[:, :NOISE], draws[:, NOISE : 2 * NOISE], draws[:, 2 * NOISE :]
        y = torch.where(is_known, chance, -torch.inf).argmax(-1)  # (B,), any known class alike
        frozen = model.frozen(model.params)
        generated = F.cross_entropy(model.classifier(frozen.generator(other_noise, y)), y, reduction="none")
        target = frozen.classifier(frozen.generator(noise, batch.y)).log_softmax(-1).detach()
        divergence = (target.exp() * (target - scores.log_softmax(-1))).sum(-1)
        terms = self.generated_weight * generated + self.agreement_weight * divergence
        return batch.cross_entropy(scores) + strength * batch.mean(terms)


def likeness(noise: Tensor, z: Tensor) -> Tensor:
    """exp of minus the mean over pairs of the distances of noise times those of features: small if all differ, ()."""
    noise_distance = (noise[:, None] - noise).square().mean(-1)  # (B, B)
    distance = (z[:, None] - z).abs().mean(-1)
    return (-(noise_distance * distance).mean()).exp()
