"""FedFomo: after training, a client mixes its model with those of others that do better on its data.

Zhang, Sapra, Fidler, Yeung, Alvarez: Personalized Federated Learning with First Order Model Optimization, ICLR 2021.

Sends: weights, and how much each model that it received would help it. Keeps: the model that it uses, which is mixed,
and the one that it trained last. Server: keeps the last model of every client, and for every pair of clients the sum of
what the one's model was worth to the other; sends each client the models worth most to it so far, and some at random.

Departures:
1. A client mixes as soon as all have trained. In the authors' code it mixes when it takes part the next time, and is
   tested then; with all clients in every round the sequence of steps is the same.
2. The validation examples of a client are drawn once, class by class; the authors draw a fifth whatever the classes. A
   client of too few examples for that validates on those that it trains on.
3. The authors' code also offers clients the means of groups of clients that it clusters, and the mean of all. These
   are left out.
4. Any client's last model may be sent; in the authors' code only those of the round before. A model that was never
   trained is represented by the initial weights. A client that is alone is sent its own.
5. Distances are over parameters. The authors' "l2" is the squared distance; here it is the distance, as in the paper.
   Statistics of BatchNorm are averaged with the same weights.
6. A worth that is not finite is 0, so that a model in the same place as the baseline is worth nothing.
7. What is added to the affinity in a round is divided by the sum of its absolute values; in the authors' code by the
   absolute value of the sum, so that a round in which worths cancel outweighs all others.
8. With the trained model as the baseline the rule is that of FL-bench, which takes "l2", adds up worths as they are and
   tests the model as trained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Interval
from torch import Tensor

from protofed import tree
from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import Clients, Method, Uploads
from protofed.api.requests import Objective
from protofed.api.task import ClientId
from protofed.api.views import Observed, Relation
from protofed.data.batches import Data
from protofed.methods._shared.losses import cross_entropy, summed_cross_entropy
from protofed.methods._shared.mixing import entry, stacked, weighted_mean
from protofed.methods._shared.validation import stratified_split
from protofed.methods.families import OwnWeights, Weights
from protofed.seeds import generator
from protofed.tree import Nothing, Params, record

Share = Annotated[float, Interval(ge=0, le=1)]


@record
class Models:
    models: dict[ClientId, Params]  # what each client sent last
    affinity: dict[ClientId, Tensor]  # (N,) for each client, what the models of all were worth to it


@record
class UsedAndTrained(OwnWeights):
    trained: Params  # what became of the used weights in the last training, before they were mixed


@record
class Worth:
    worth: Tensor  # (1 + M,), of the own trained model and of each received one, before clipping


@dataclass(frozen=True)
class FedFomo(Method[Models, Nothing, UsedAndTrained, Weights]):
    tags = ("personal",)
    num_models: Annotated[int, Ge(1)] = 5
    """M, how many models a client is sent, at most those of all others."""
    baseline: Literal["before_training", "trained"] = "before_training"
    """θ_k, what models are compared with and measured from: the client's model before the training of the round, so
    that the trained one is among the candidates, or the trained one, which then counts only if no other is better."""
    distance: Literal["l1", "l2"] = "l1"
    """The norm of the difference between weights that a saving of loss is divided by."""
    validation: Annotated[float, Interval(gt=0, lt=1)] = 0.2
    """The part of a client's examples on which models are compared, and on which it does not train."""
    exploration: Share = 0.3
    """ε, the probability that a model is sent at random, before it falls."""
    exploration_decay: Share = 0.05
    """What ε falls by in each round, the first one included."""

    def init_server(self, server: ServerContext) -> Models:
        clients = sorted(server.spec.clients)
        affinity = dict.fromkeys(clients, torch.zeros(len(clients)))
        return Models(dict.fromkeys(clients, server.initial_params()), affinity)

    def message_for(self, state: Models, client: ClientId) -> Nothing:
        return Nothing()

    def message_spec(self, step: str, state: Models, client: ClientId) -> Nothing | Weights:
        return Weights(next(iter(state.models.values()))) if step == "mix" else Nothing()

    def upload_spec(self, state: Models, server: ServerContext) -> Weights:
        return Weights(next(iter(state.models.values())))

    def aggregate(self, state: Models, uploads: Uploads[Weights], server: ServerContext) -> Models:
        """No aggregation: the server remembers."""
        return replace(state, models={**state.models, **{client: upload.params for client, upload in uploads}})

    def round(self, state: Models, clients: Clients) -> Models:
        """Everyone trains; then everyone is sent models, mixes, and says what they were worth."""
        state = super().round(state, clients)
        sent, models = self.chosen(state.affinity, clients.server), list(state.models.values())
        size = len(next(iter(sent.values())))
        like, affinity = Worth(torch.zeros(1 + size)), dict(state.affinity)
        for client, upload in clients.run(self.mix, lambda c: Weights(stacked([models[k] for k in sent[c]])), like):
            share = normalised(upload.worth)[1:]  # the own model is a candidate always, so what it is worth is not kept
            affinity[client] = affinity[client].index_add(0, torch.tensor(sent[client]), share)
        return replace(state, affinity=affinity)

    def chosen(self, affinity: dict[ClientId, Tensor], server: ServerContext) -> dict[ClientId, list[int]]:
        """Whose models each client is sent in a round, by their places in the order of clients."""
        chance = self.exploration - self.exploration_decay * (server.round + 1)
        size = max(1, min(self.num_models, len(affinity) - 1))
        return {
            client: explored(worth, k, size, chance, server.generator)
            for k, (client, worth) in enumerate(affinity.items())
        }

    def relations(self, state: Models, observed: Observed) -> Mapping[str, Relation]:
        ids = list(state.affinity)
        worth = torch.stack(list(state.affinity.values()))
        return {"what models were worth to clients": Relation(worth, ids, ids, "sum of normalised worths")}

    def init_memory(self, client: ClientContext, message: Nothing) -> UsedAndTrained:
        params = client.initial_params()
        return UsedAndTrained(params, params)

    def local_weights(self, message: Nothing, memory: UsedAndTrained) -> Params:
        return memory.params

    def trained_weights(self, upload: Weights, memory: UsedAndTrained) -> Params:
        return memory.trained

    async def train(
        self, client: ClientContext, message: Nothing, memory: UsedAndTrained
    ) -> Reply[Weights, UsedAndTrained]:
        training, _ = self.split(client)
        params = await client.fit(Objective(cross_entropy), params=memory.params, data=training)
        return Reply(Weights(params), UsedAndTrained(memory.params, params))

    async def mix(
        self, client: ClientContext, message: Weights, memory: UsedAndTrained
    ) -> Reply[Worth, UsedAndTrained]:
        """The mean of the models that are worth more than nothing; the baseline if none is."""
        _, validation = self.split(client)
        baseline = memory.trained if self.baseline == "trained" else memory.params
        received = [entry(message.params, k) for k in range(len(next(iter(message.params.values()))))]
        models = [memory.trained, *received]
        totals = [await client.total(summed_cross_entropy, p, data=validation) for p in (baseline, *models)]
        losses = torch.stack(totals) / len(validation)  # (1 + 1 + M,), of the baseline, the own and the received models
        worth = worths(losses[0], losses[1:], self.distances(models, baseline, client.networks.trainable))
        weights = mixing_weights(worth)
        mixed = weighted_mean(zip(models, weights.tolist(), strict=True)) if weights.any() else baseline
        return Reply(Worth(worth), UsedAndTrained(mixed, memory.trained))

    def split(self, client: ClientContext) -> tuple[Data, Data]:
        """Training and validation examples, the same in every round."""
        return stratified_split(client.data, self.validation, generator(client.seed, "validation", client.id))

    def distances(self, models: Sequence[Params], baseline: Params, names: tuple[str, ...]) -> Tensor:
        """How far the parameters of each model are from the baseline's, (M,)."""
        of = absolute_distance if self.distance == "l1" else tree.squared_distance
        distance = torch.stack([of(tree.select(params, names), baseline) for params in models])
        return distance if self.distance == "l1" else distance.sqrt()


def absolute_distance(a: Params, b: Params) -> Tensor:
    """Σ |a − b| over the entries of `a`."""
    return torch.stack([(leaf - b[name]).abs().sum() for name, leaf in a.items()]).sum()


def worths(baseline_loss: Tensor, losses: Tensor, distance: Tensor) -> Tensor:
    """How much lower each model's loss is than the baseline's, by how far the model is away, (M,)."""
    worth = (baseline_loss - losses) / distance
    return torch.where(worth.isfinite(), worth, 0.0)


def mixing_weights(worth: Tensor) -> Tensor:
    """What is worth more than nothing, scaled to sum 1; all 0 if nothing is, (M,)."""
    positive = worth.double().clamp(min=0)
    total = positive.sum()
    return positive / total if total > 0 else positive


def normalised(worth: Tensor) -> Tensor:
    """The worths of a round, negative ones too, by the sum of their sizes: what is added to the affinity, (M,)."""
    return worth / worth.abs().sum().clamp(min=1e-9)


def explored(worth: Tensor, client: int, size: int, chance: float, draws: torch.Generator) -> list[int]:
    """The places of the models worth most; each may be one by chance instead. Among equals chance decides."""
    order = torch.randperm(len(worth), generator=draws)
    order = order[order != client] if len(order) > 1 else order
    by_worth = order[worth[order].sort(descending=True, stable=True).indices].tolist()
    by_chance = order[torch.randperm(len(order), generator=draws)].tolist()
    found: list[int] = []
    for is_random in (torch.rand(size, generator=draws) < chance).tolist():
        found.append(next(k for k in (by_chance if is_random else by_worth) if k not in found))
    return found
