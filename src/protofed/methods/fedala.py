"""FedALA: a client starts a round from a mixture, learnt weight by weight, of the global head and its own.

Zhang, Hua, Wang, Song, Xue, Ma, Guan: FedALA: Adaptive Local Aggregation for Personalized Federated Learning,
AAAI 2023.

Sends: weights. Keeps: the weights it trained last, and how much of the global ones enters each weight of the mixture.
Server: mean weighted by the number of examples.

Departures:
1. The mixture covers the classifier, as with the defaults of the authors' code, all layers, or so many of the last ones
   (settings). A layer is what has parameters of its own, one of normalisation too; the paper counts a ResNet by blocks,
   and the authors' code counts single tensors.
2. When a client learns the mixing for the first time, it passes over the drawn examples until the standard deviation of
   the last ten losses is below the threshold, as in the authors' code, but no more than 100 times, which that code does
   not limit.
3. The loss after a pass is that of the mixture on all drawn examples, in evaluation mode; the authors' code takes that
   of the last batch.
4. Statistics of BatchNorm are the global ones, and what they become while the mixing is learnt is forgotten.
5. A client that has not trained before has nothing to mix and starts from the global weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import pstdev
from typing import Annotated, Literal, Self

import torch
from annotated_types import Ge, Interval
from torch import Tensor

from protofed import tree
from protofed.api.contexts import ClientContext, Reply
from protofed.api.method import NonNegative
from protofed.api.requests import Objective
from protofed.api.views import Observed, Relation
from protofed.data.batches import Batch, Data
from protofed.methods._shared.losses import summed_cross_entropy
from protofed.methods._shared.models import CLASSIFIER
from protofed.methods.families import GlobalModel, Weights, WeightUpload
from protofed.nn.networks import Model, Patterns, matching
from protofed.optim.optimizers import Gradient
from protofed.seeds import generator
from protofed.tree import Nothing, Params, record

WINDOW = 10
MOST_PASSES = 100
PARTS_ABOVE = {"projection": 1, "classifier": 2}
"""The parts that lie above the features, in their order."""


@record
class Mixing:
    params: Params  # the weights that the client trained last
    shares: Params  # for each weight that is mixed, how much of the global one enters, in [0, 1]
    num_trained: Tensor  # (), how often the client has trained


@dataclass(frozen=True)
class Bounded:
    """Gradient descent that never leaves [0, 1]."""

    lr: float

    def for_round(self, round: int) -> Self:
        return self

    def init(self, params: Params) -> Nothing:
        return Nothing()

    def step(self, gradient: Gradient, params: Params, state: Nothing) -> tuple[Params, Nothing]:
        slope = gradient(params)
        return {name: (leaf - self.lr * slope[name]).clamp(0, 1) for name, leaf in params.items()}, state


@dataclass(frozen=True)
class FedALA(GlobalModel[Mixing]):
    tags = ("global", "personal")
    clients_use = "own models"
    mixing_rate: NonNegative = 1.0
    """η, the learning rate of the mixing. At 0 the mixture is the global model, and the method is FedAvg."""
    mixing_data: Annotated[float, Interval(gt=0, le=1)] = 0.8
    """s, the part of its examples, drawn anew in each round, from which a client learns the mixing."""
    mixed: Literal["classifier", "all"] = "classifier"
    """The layers that are mixed; the others are the global ones."""
    threshold: NonNegative = 0.1
    """The standard deviation of the losses below which the mixing is learnt, when it is learnt for the first time."""
    mixed_layers: Annotated[int, Ge(0)] = 0
    """p, how many layers are mixed, counted from the top; 0: those that `mixed` names."""

    def init_memory(self, client: ClientContext, message: Weights) -> Mixing:
        trainable = client.networks.trainable
        patterns = CLASSIFIER if self.mixed == "classifier" else ("*",)
        names = last_layers(trainable, self.mixed_layers) if self.mixed_layers else patterns
        mixed = matching(tree.select(message.params, trainable), names)
        return Mixing(message.params, tree.map(torch.ones_like, mixed), torch.tensor(0))

    def relations(self, state: Weights, observed: Observed) -> Mapping[str, Relation]:
        """How much of the global model enters what clients start from, mean over the weights of a tensor."""
        shares = {client: observed.memory(client).shares for client in observed.ids}
        if not shares:
            return {}
        names = list(next(iter(shares.values())))
        values = torch.stack([torch.stack([own[name].mean() for name in names]) for own in shares.values()])
        return {"how much of the global model clients take": Relation(values, list(shares), names, "share", "tensor")}

    def starting_weights(self, message: Weights, memory: Mixing) -> Params:
        """By the shares that were learnt last."""
        return {**message.params, **mixture(message, memory, memory.shares)}

    def local_weights(self, message: Weights, memory: Mixing) -> Params:
        return memory.params

    async def train(self, client: ClientContext, message: Weights, memory: Mixing) -> Reply[WeightUpload, Mixing]:
        if self.mixing_rate and memory.num_trained:
            memory = await self.learn_mixing(client, message, memory)
        start = {**message.params, **mixture(message, memory, memory.shares)}
        params = await client.fit(Objective(self.loss), params=start, context=(message, memory))
        upload = WeightUpload(params, client.num_examples)
        return Reply(upload, Mixing(params, memory.shares, memory.num_trained + 1))

    async def learn_mixing(self, client: ClientContext, message: Weights, memory: Mixing) -> Mixing:
        """Passes over the drawn examples: until the loss is steady when it is the first time, one afterwards."""
        client = replace(client, terms=())  # while shares stand where weights do, no added term could read these
        data = drawn(client, self.mixing_data)
        if memory.num_trained > 1:
            return await self.one_pass(client, message, memory, data)
        losses: list[float] = []
        while len(losses) < MOST_PASSES and not is_steady(losses, self.threshold):
            memory = await self.one_pass(client, message, memory, data)
            params = {**message.params, **mixture(message, memory, memory.shares)}
            loss = await client.total(summed_cross_entropy, params, data=data)
            losses.append(loss.item() / len(data))
        return memory

    async def one_pass(self, client: ClientContext, message: Weights, memory: Mixing, data: Data) -> Mixing:
        """One pass in which the shares descend the loss of the mixture."""
        params = await client.fit(
            Objective(self.mixing_loss, trains=tuple(memory.shares)),
            params={**message.params, **memory.shares},
            context=(message, memory),
            epochs=1,
            optimizer=Bounded(self.mixing_rate),
            data=data,
        )
        return replace(memory, shares=tree.select(params, list(memory.shares)))

    def mixing_loss(self, model: Model, batch: Batch, message: Weights, memory: Mixing) -> Tensor:
        """The loss of the mixture as a function of its shares, which stand in the place of the mixed weights."""
        shares = tree.select(model.params, list(memory.shares))
        params = {**model.params, **mixture(message, memory, shares)}
        return batch.cross_entropy(model.at(params).logits(batch.x))


def last_layers(names: tuple[str, ...], count: int) -> Patterns:
    """The parameters of the last layers, in the order in which the network's parts define them."""
    from_below = sorted(names, key=lambda name: PARTS_ABOVE.get(name.partition(".")[0], 0))
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in from_below))
    return tuple(name for name in names if name.rpartition(".")[0] in layers[-count:])


def mixture(message: Weights, memory: Mixing, shares: Params) -> Params:
    """local + (global − local) ⊙ share for the weights that have shares; lerp, so that a share of 1 is exact."""
    return {name: torch.lerp(memory.params[name], message.params[name], share) for name, share in shares.items()}


def drawn(client: ClientContext, part: float) -> Data:
    """A random part of the client's examples."""
    count = max(1, int(part * len(client.data)))
    order = torch.randperm(len(client.data), generator=generator(client.step_seed, "mixing"))
    return client.data.rows(order[:count])


def is_steady(losses: list[float], threshold: float) -> bool:
    """Whether there are enough losses and the last of them hardly differ."""
    return len(losses) > WINDOW and pstdev(losses[-WINDOW:]) < threshold
