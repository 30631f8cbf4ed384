"""FedFomo: a client is sent other clients' models and starts from a mean of those that do better on its data.

Zhang, Sapra, Fidler, Yeung, Alvarez: Personalized Federated Learning with First Order Model Optimization, ICLR 2021.

Sends: weights, and how much each model that it received would help it. Keeps: its own model. Server: keeps the last
model of every client, and for every pair of clients the sum of what the one's model was worth to the other; sends each
client the models worth most to it so far, and some at random.

Departures:
1. The validation examples of a client are drawn once, class by class; public code takes the last fifth. A client of too
   few examples for that validates on those that it trains on.
2. A client's own model is not among those it is sent (its weight would be 0), unless it is the only client.
3. A model that was never sent is represented by the initial weights. In the first round all are equal, and nothing is
   mixed.
4. Each place of a message goes to a model drawn at random with a probability that falls from 0.3 by 0.05 in each round;
   among models worth the same chance decides. Both are readings of the paper's ε-greedy exploration.
5. Distances are over parameters, with 1e-5 added; statistics of BatchNorm are averaged with the same weights.
6. A weight that is not finite is 0.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Interval
from torch import Tensor

from protofed import tree
from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import Method, Uploads
from protofed.api.requests import Objective
from protofed.api.task import ClientId
from protofed.methods._shared.losses import cross_entropy, summed_cross_entropy
from protofed.methods._shared.mixing import entry, stacked, weighted_mean
from protofed.methods._shared.validation import stratified_split
from protofed.methods.families import OwnWeights, Weights
from protofed.seeds import generator
from protofed.tree import Params, record

Share = Annotated[float, Interval(ge=0, le=1)]


@record
class Models:
    models: dict[ClientId, Params]  # what each client sent last
    affinity: dict[ClientId, Tensor]  # (N,) for each client, what the models of all were worth to it
    sent: dict[ClientId, Tensor]  # (M,) for each client, whose models it is sent next, by their place in the order


@record
class WorthUpload:
    params: Params
    worth: Tensor  # (M,), of each model received, before clipping


@dataclass(frozen=True)
class FedFomo(Method[Models, Weights, OwnWeights, WorthUpload]):
    tags = ("personal",)
    num_models: Annotated[int, Ge(1)] = 5
    """M, how many models a client is sent, at most those of all others."""
    validation: Annotated[float, Interval(gt=0, lt=1)] = 0.2
    """The part of a client's examples on which models are compared, and on which it does not train."""
    exploration: Share = 0.3
    """ε, the probability that a model is sent at random, in the first round."""
    exploration_decay: Share = 0.05
    """What ε falls by in each round."""

    def init_server(self, server: ServerContext) -> Models:
        clients, params = sorted(server.spec.clients), server.initial_params()
        affinity = dict.fromkeys(clients, torch.zeros(len(clients)))
        return Models(dict.fromkeys(clients, params), affinity, self.chosen(affinity, 0, server))

    def chosen(self, affinity: dict[ClientId, Tensor], round: int, server: ServerContext) -> dict[ClientId, Tensor]:
        """Whose models each client is sent in a round."""
        chance = max(0.0, self.exploration - self.exploration_decay * round)
        size = max(1, min(self.num_models, len(affinity) - 1))
        return {
            client: explored(worth, k, size, chance, server.generator)
            for k, (client, worth) in enumerate(affinity.items())
        }

    def message_for(self, state: Models, client: ClientId) -> Weights:
        models = list(state.models.values())
        return Weights(stacked([models[k] for k in state.sent[client].tolist()]))

    def upload_spec(self, state: Models, server: ServerContext) -> WorthUpload:
        size = len(next(iter(state.sent.values())))
        return WorthUpload(next(iter(state.models.values())), torch.zeros(size))

    def aggregate(self, state: Models, uploads: Uploads[WorthUpload], server: ServerContext) -> Models:
        """No aggregation: the server remembers."""
        models, affinity = dict(state.models), dict(state.affinity)
        for client, upload in uploads:
            models[client] = upload.params
            affinity[client] = affinity[client].index_add(0, state.sent[client], upload.worth)
        return Models(models, affinity, self.chosen(affinity, server.round + 1, server))

    def init_memory(self, client: ClientContext, message: Weights) -> OwnWeights:
        return OwnWeights(client.initial_params())

    def local_weights(self, message: Weights, memory: OwnWeights) -> Params:
        return memory.params

    async def train(
        self, client: ClientContext, message: Weights, memory: OwnWeights
    ) -> Reply[WorthUpload, OwnWeights]:
        draws = generator(client.seed, "validation", client.id)
        training, validation = stratified_split(client.data, self.validation, draws)
        models = [entry(message.params, k) for k in range(len(next(iter(message.params.values()))))]
        totals = [await client.total(summed_cross_entropy, p, data=validation) for p in (memory.params, *models)]
        losses = torch.stack(totals) / len(validation)  # (1 + M,), of its own model first
        distance = torch.stack([distance_of(params, memory.params, client.networks.trainable) for params in models])
        worth = worths(losses[0], losses[1:], distance)
        weights = mixing_weights(worth)
        start = weighted_mean(zip(models, weights.tolist(), strict=True)) if weights.any() else memory.params
        params = await client.fit(Objective(cross_entropy), params=start, data=training)
        return Reply(WorthUpload(params, worth), OwnWeights(params))


def distance_of(a: Params, b: Params, names: tuple[str, ...]) -> Tensor:
    return tree.squared_distance(tree.select(a, names), b).sqrt()


def worths(own_loss: Tensor, losses: Tensor, distance: Tensor) -> Tensor:
    """How much lower each model's loss is than the own one's, by how far the model is away, (M,)."""
    worth = (own_loss - losses) / (distance + 1e-5)
    return torch.where(worth.isfinite(), worth, 0.0)


def mixing_weights(worth: Tensor) -> Tensor:
    """What is worth more than nothing, scaled to sum 1; all 0 if nothing is, (M,)."""
    positive = worth.double().clamp(min=0)
    total = positive.sum()
    return positive / total if total > 0 else positive


def explored(worth: Tensor, client: int, size: int, chance: float, draws: torch.Generator) -> Tensor:
    """The places of the models worth most, (size,), some of them replaced by chance."""
    order = torch.randperm(len(worth), generator=draws)
    order = order[order != client] if len(order) > 1 else order
    num_random = int((torch.rand(size, generator=draws) < chance).sum())
    best = order[worth[order].sort(descending=True, stable=True).indices]
    kept = best[: size - num_random]
    others = order[~torch.isin(order, kept)]  # still in random order
    return torch.cat([kept, others[:num_random]])
