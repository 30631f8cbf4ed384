"""FedHKD: clients share class means of features and of soft predictions, and learn from everybody's.

Chen, Wang, Vikalo: The Best of Both Worlds: Accurate Global and Personalized Models through Federated Learning with
Data-Free Hyper-Knowledge Distillation, ICLR 2023.

Sends: weights, the class means of its features and of its soft predictions, and how many examples are behind each.
Keeps: nothing. Server: mean of the weights by the number of examples; mean of each class's hyper-knowledge by the
number of its examples.

Written from the authors' code, `Client/ClientFedHKD.py` and `Server/ServerFedHKD.py` of
github.com/CityChan/Federated-Hyper-Knowledge-Distillation. Where that differs from the paper, what the paper has is
taken from `src/client/fedhkd.py` and `src/server/fedhkd.py` of github.com/KarhouTam/FL-bench, which are not the
authors', and from the first issue of github.com/zerocpp/fedhkd.

Departures:
1. Both distances are Euclidean by default, as the paper is said to have them. The authors' code has, for soft
   predictions, the Kullback-Leibler divergence over the number of classes, and for features the mean squared error
   (settings).
2. The server averages hyper-knowledge by the number of examples, as FL-bench does; in the authors' code the last client
   that has a class overwrites the others.
3. The noise on a class mean has a set deviation, drawn for every class, and is off by default; the authors' code draws
   one vector for all classes. Its size says nothing of a privacy budget.
4. A class whose share of the client's examples is below the threshold is not sent, as in FL-bench. It is 0 by default,
   and the authors' code has none.
5. A class that no reply of a round holds keeps its hyper-knowledge.
6. An example whose class has no hyper-knowledge is not pulled but counts in the mean over the batch.
7. Gradients are not clipped, unless the optimiser is configured to; the authors' code clips them at norm 1.1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Interval
from torch import Tensor

from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import NonNegative, Positive
from protofed.api.requests import Objective
from protofed.api.roles import Count, Prototype
from protofed.api.roles import Weights as WeightsRole
from protofed.api.task import ClientId
from protofed.api.views import Points
from protofed.data.batches import Batch
from protofed.methods._shared.models import own_statistics
from protofed.methods.families import Averages, Summands, SumMethod, Totals
from protofed.nn.networks import Model
from protofed.prototypes import class_means, contrast
from protofed.prototypes.class_means import ClassSums, Prototypes
from protofed.seeds import generator
from protofed.tree import Nothing, Params, record


@record
class Knowledge:
    """Hyper-knowledge: class means of features and of soft predictions."""

    mean: Annotated[Tensor, Prototype()]  # (C, D)
    prediction: Annotated[Tensor, Prototype()]  # (C, C)
    count: Annotated[Tensor, Count()]  # (C,), examples behind each; 0 marks an absent class

    @property
    def of_features(self) -> Prototypes:
        return Prototypes(self.mean, self.count)

    @property
    def of_predictions(self) -> Prototypes:
        return Prototypes(self.prediction, self.count)


@record
class State:
    params: Params
    knowledge: Knowledge


@record
class Upload:
    params: Annotated[Params, WeightsRole()]
    knowledge: Knowledge
    num_examples: Annotated[Tensor, Count()]  # ()


@dataclass(frozen=True)
class FedHKD(Averages, SumMethod[State, State, Nothing, Upload]):
    tags = ("global", "prototype")
    prediction_weight: NonNegative = 0.05
    """λ, the weight of the distance of soft predictions."""
    feature_weight: NonNegative = 0.05
    """γ, the weight of the distance of features."""
    temperature: Positive = 0.5
    """T, by which scores are divided in soft predictions."""
    prediction_distance: Literal["norm", "divergence"] = "norm"
    """Between soft predictions: the Euclidean distance, or the Kullback-Leibler divergence by the number of classes, as
    in the authors' code."""
    feature_distance: Literal["norm", "mean_square"] = "norm"
    """Between features: the Euclidean distance, or the mean squared error, as in the authors' code."""
    noise: NonNegative = 0.0
    """σ, the deviation of the Gaussian noise on the class means of features that a client sends."""
    threshold: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """ν: a class with a smaller share of the client's examples is not sent."""

    # ---- the server's half

    def init_server(self, server: ServerContext) -> State:
        return State(server.initial_params(), no_knowledge(server.num_classes, server.feature_dim))

    def message_for(self, state: State, client: ClientId) -> State:
        return state

    def public(self, state: State) -> tuple[Params, State] | None:
        return state.params, state

    def upload_spec(self, state: State, server: ServerContext) -> Upload:
        return Upload(state.params, state.knowledge, torch.tensor(0))

    def summand(self, upload: Upload, message: State) -> Summands:
        return {
            "params": (upload.params, self.weight_of(upload.num_examples)),
            "features": (class_means.by_count(upload.knowledge.of_features), 1.0),
            "predictions": (class_means.by_count(upload.knowledge.of_predictions), 1.0),
        }

    def from_sum(self, state: State, totals: Totals, server: ServerContext) -> State:
        """The mean weights, and the mean hyper-knowledge of each class over its examples."""
        features = class_means.mean_of(totals["features"].total, state.knowledge.of_features)
        predictions = class_means.mean_of(totals["predictions"].total, state.knowledge.of_predictions)
        return State(totals["params"].value(), Knowledge(features.mean, predictions.mean, features.count))

    def prototype_sets(self, state: State) -> Mapping[str, Points]:
        return {"global class means": class_means.points(state.knowledge.of_features)}

    # ---- the client's half

    def local_weights(self, message: State, memory: Nothing) -> Params:
        return message.params

    async def train(self, client: ClientContext, message: State, memory: Nothing) -> Reply[Upload, Nothing]:
        params = await client.fit(Objective(self.loss), params=message.params, context=(message.knowledge,))
        statistic = KnowledgeSums(client.num_classes, self.temperature)
        features, predictions = await client.total(statistic, params)
        knowledge = self.shown(features, predictions, generator(client.step_seed, "noise"))
        return Reply(Upload(params, knowledge, client.num_examples), memory)

    def shown(self, features: ClassSums, predictions: ClassSums, draws: torch.Generator) -> Knowledge:
        """The hyper-knowledge that a client sends: its class means, those of features with noise, without the classes
        of which it has few examples (ClientFedHKD.py, local_knowledge_aggregation)."""
        count = features.count
        is_sent = (count > 0) & (count >= self.threshold * count.sum())
        noise = torch.randn(features.total.shape, generator=draws).to(count.device) * self.noise
        mean = torch.where(is_sent[:, None], features.prototypes().mean + noise, 0.0)
        prediction = torch.where(is_sent[:, None], predictions.prototypes().mean, 0.0)
        return Knowledge(mean, prediction, count * is_sent)

    def loss(self, model: Model, batch: Batch, knowledge: Knowledge) -> Tensor:
        """The local objective: cross-entropy, what the classifier says of the global class means against the global
        soft predictions, and the distance of features to their class mean (ClientFedHKD.py, update_weights_HKD)."""
        z = model.features(batch.x)
        of_predictions = self.prediction_term(own_statistics(model).scores(knowledge.mean), knowledge)
        of_features = self.feature_term(z, batch.y, knowledge)
        terms = self.prediction_weight * of_predictions + self.feature_weight * batch.mean(of_features)
        return batch.cross_entropy(model.scores(z)) + terms

    def prediction_term(self, scores: Tensor, knowledge: Knowledge) -> Tensor:
        """The mean distance over the known classes, of scores (C, C) to soft predictions, ()."""
        target, is_known = knowledge.prediction.detach(), knowledge.count > 0
        if self.prediction_distance == "norm":
            distance = (torch.softmax(scores / self.temperature, -1) - target).norm(dim=-1)
        else:
            told = torch.log_softmax(scores / self.temperature, -1)
            distance = (torch.xlogy(target, target) - target * told).mean(-1)
        mean: Tensor = (distance * is_known).sum() / is_known.sum().clamp(min=1)
        return mean

    def feature_term(self, z: Tensor, y: Tensor, knowledge: Knowledge) -> Tensor:
        """The distance of each feature vector to the global mean of its class, (B,)."""
        if self.feature_distance == "mean_square":
            return contrast.pull(z, y, knowledge.mean, knowledge.count > 0)
        distance: Tensor = (z - knowledge.mean.detach()[y]).norm(dim=-1)
        return distance * (knowledge.count > 0)[y]


def no_knowledge(num_classes: int, dim: int) -> Knowledge:
    return Knowledge(torch.zeros(num_classes, dim), torch.zeros(num_classes, num_classes), torch.zeros(num_classes))


@dataclass(frozen=True)
class KnowledgeSums:
    """Sums over each class of the features, and of the soft predictions."""

    num_classes: int
    temperature: float

    def __call__(self, model: Model, batch: Batch) -> tuple[ClassSums, ClassSums]:
        z = model.features(batch.x)
        predictions = torch.softmax(model.scores(z) / self.temperature, -1)
        of_features = class_means.class_sums(z, batch.y, batch.weight, self.num_classes)
        return of_features, class_means.class_sums(predictions, batch.y, batch.weight, self.num_classes)
