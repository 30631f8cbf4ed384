"""kNN-Per: FedAvg, and every client lets the nearest of its own examples speak beside the global model.

Marfoq, Neglia, Kameni, Vidal: Personalized Federated Learning through Local Memorization, ICML 2022. Authors' code:
omarfoq/knn-per, `client.py` (KNNPerClient) and `datastore.py`.

Sends: weights. Keeps: features and classes of its examples under the last global model, and how much they count.
Server: mean weighted by the number of examples.

Departures:
1. Neighbours count by the exponential of the negative squared distance over the number of dimensions, as in the
   authors' code, with a scale as a setting; the paper prints the exponential of the negative distance.
2. Features are what the classifier reads: the output of the projection where the network has one.
3. λ is one setting for all clients. With `validation` above 0 each client chooses its own, as in the paper: the one of
   0, 0.1, …, 1 with the highest accuracy on examples that are held out and not trained on; of equals the lowest. The
   authors' script tries 101 values and writes down all.
4. A client remembers after the last round. When an earlier round is evaluated it remembers for that alone; the model
   that it has just trained is judged with features of that model.
5. Until a client has remembered, it predicts with the global model. So does one that the server has never met, until it
   is evaluated.
6. Fine-tuning before a test descends the cross-entropy of the network alone.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Interval
from torch import Tensor

from protofed.api.contexts import ClientContext, Reply
from protofed.api.evaluation import Evaluation
from protofed.api.method import Clients, Positive
from protofed.api.requests import Objective
from protofed.data.batches import Batch, Data
from protofed.methods._shared.models import embedded
from protofed.methods._shared.validation import stratified_split
from protofed.methods.families import GlobalModel, Weights
from protofed.nn.networks import Model
from protofed.nn.precision import product
from protofed.seeds import generator
from protofed.tree import Nothing, Params, Ragged, record

FAR = 1e30
"""The squared distance of a row that holds no example."""
SMALLEST = 1e-30


@record
class Memorised:
    """What a client remembers of its examples; a row of class −1 holds none."""

    z: Annotated[Tensor, Ragged(fill=0)]  # (n, P)
    label: Annotated[Tensor, Ragged(fill=-1)]  # (n,)
    mixing: Tensor  # (), λ


@dataclass(frozen=True)
class KnnPer(GlobalModel[Memorised]):
    tags = ("personal",)
    clients_use = "own models"
    neighbours: Annotated[int, Ge(1)] = 10
    """k, how many of the nearest examples speak. The authors' scripts take 7 for CIFAR-10, and 1 to 10 to compare."""
    mixing_weight: Annotated[float, Interval(ge=0, le=1)] = 0.5
    """λ, how much the neighbours count; the rest is the global model's."""
    scale: Positive = 1.0
    """What squared distances are divided by, beside the number of dimensions. Lower values let the nearest decide."""
    capacity: Annotated[int, Ge(0)] = 0
    """How many examples a client remembers at most, drawn at random; 0: all."""
    validation: Annotated[float, Interval(ge=0, lt=1)] = 0.0
    """The part of a client's examples that it does not train on and by which it chooses its own λ; 0: λ is the same for
    all."""

    def init_memory(self, client: ClientContext, message: Weights) -> Memorised:
        first = client.transform.clean(client.data.inputs(client.data.index[:1]))
        with torch.no_grad():
            z = embedded(client.networks.model(message.params), first)
        return Memorised(torch.zeros_like(z), torch.full((1,), -1), torch.tensor(self.mixing_weight))

    async def trained(self, client: ClientContext, message: Weights, memory: Memorised) -> Params:
        training, _ = self.split(client)
        return await client.fit(Objective(self.loss), params=message.params, context=(message, memory), data=training)

    def finish(self, state: Weights, clients: Clients) -> Weights:
        for _ in clients.run(self.memorise, lambda client: self.message_for(state, client), Nothing()):
            pass
        return state

    async def memorise(self, client: ClientContext, message: Weights, memory: Memorised) -> Reply[Nothing, Memorised]:
        return Reply(Nothing(), await self.memorised(client, message.params))

    async def evaluate(self, client: ClientContext, params: Params, message: Weights, memory: Memorised) -> Evaluation:
        return await super().evaluate(client, params, message, await self.memorised(client, params))

    async def memorised(self, client: ClientContext, params: Params) -> Memorised:
        """Features and classes of the client's examples under these weights, and its λ."""
        training, held = self.split(client)
        if 0 < self.capacity < len(training):
            order = torch.randperm(len(training), generator=generator(client.seed, "capacity", client.id))
            training = training.rows(order[: self.capacity].sort().values)
        z = await client.map(features, params, data=training)
        memory = Memorised(z, training.labels, torch.tensor(self.mixing_weight))
        if not len(held):
            return memory
        local, shared = await client.map(self.opinions, params, (memory,), data=held)
        return Memorised(z, training.labels, best_mixing(local, shared, held.labels))

    def split(self, client: ClientContext) -> tuple[Data, Data]:
        """Examples to train on and to remember, and those that λ is chosen by, the same in every round."""
        if not self.validation:
            return client.data, client.data.rows(torch.zeros(0, dtype=torch.int64))
        return stratified_split(client.data, self.validation, generator(client.seed, "validation", client.id))

    def opinions(self, model: Model, batch: Batch, memory: Memorised) -> tuple[Tensor, Tensor]:
        """Probabilities of the classes, (B, C), by the neighbours and by the network."""
        z = embedded(model, batch.x)
        shared = model.classifier(z).softmax(-1)
        return neighbour_shares(z, memory, self.neighbours, self.scale, shared.shape[-1]), shared

    def predict(self, model: Model, x: Tensor, message: Weights, memory: Memorised | None) -> Tensor:
        """log(λ p_neighbours + (1 − λ) p_network)."""
        z = embedded(model, x)
        scores = model.classifier(z)
        if memory is None:
            return scores
        local = neighbour_shares(z, memory, self.neighbours, self.scale, scores.shape[-1])
        mixing = memory.mixing * (memory.label >= 0).any()
        return (mixing * local + (1 - mixing) * scores.softmax(-1)).clamp(min=SMALLEST).log()

    def prediction_loss(self, model: Model, batch: Batch, message: Weights, memory: Memorised) -> Tensor:
        return batch.cross_entropy(model.logits(batch.x))


def features(model: Model, batch: Batch) -> Tensor:
    return embedded(model, batch.x)


def neighbour_shares(z: Tensor, memory: Memorised, count: int, scale: float, num_classes: int) -> Tensor:
    """What the nearest remembered examples say of the classes, (B, C): the sums over a class are of exp(−d²/(P·scale)),
    divided by that over all neighbours."""
    squares = z.square().sum(-1)[:, None] + memory.z.square().sum(-1) - 2 * product(z, memory.z.T)  # (B, n)
    distance = torch.where(memory.label >= 0, squares.clamp(min=0), FAR)
    nearest = distance.topk(min(count, len(memory.label)), largest=False)  # (B, k)
    weight = (-nearest.values / (z.shape[-1] * scale)).softmax(-1)
    is_of_class = memory.label[nearest.indices][..., None] == torch.arange(num_classes, device=z.device)  # (B, k, C)
    return (weight[..., None] * is_of_class).sum(1)


def best_mixing(local: Tensor, shared: Tensor, y: Tensor) -> Tensor:
    """The λ of the highest accuracy; of equals the lowest."""
    tenths = torch.arange(11, device=y.device) / 10
    right = [((1 - share) * shared + share * local).argmax(-1).eq(y).sum() for share in tenths]
    return tenths[torch.stack(right).argmax()]
