"""Partial implementations that methods share: clients that share weights, and those that share prototypes too."""

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Generic, TypeVar

import torch
from torch import Tensor

from protofed import tree
from protofed.api import method as api
from protofed.api import roles
from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import Clients, Method, MethodWeighting, Uploads
from protofed.api.private import PrivateClient
from protofed.api.requests import Objective
from protofed.api.roles import Count
from protofed.api.sums import Summand, folded
from protofed.api.sums import Summands as Summands
from protofed.api.sums import Totals as Totals
from protofed.api.task import ClientId
from protofed.data.batches import Batch
from protofed.methods._shared.losses import cross_entropy
from protofed.nn.networks import Model, matching, without
from protofed.prototypes import class_means
from protofed.prototypes.class_means import ClassSums, PrototypeMode, Prototypes
from protofed.tree import Params, Tree, record


@dataclass(frozen=True)
class Averages:
    """Of a method that averages what clients send."""

    weighting: MethodWeighting = field(default="training", kw_only=True)
    """How clients count in the mean of their weights: by their numbers of examples, equally ("uniform"), or as
    `training.weighting` says for all methods."""

    @property
    def is_uniform(self) -> bool:
        return self.weighting == "uniform"

    def weight_of(self, num_examples: Tensor) -> float:
        """How much a client counts in the mean."""
        return 1.0 if self.is_uniform else num_examples.item()

    def public_weight(self, num_examples: int) -> float:
        return 1.0 if self.is_uniform else float(num_examples)


@record
class OwnWeights:
    """The memory of a client that keeps some or all of its weights."""

    params: Params


@record
class Weights:
    params: Annotated[Params, roles.Weights()]


@record
class WeightUpload:
    params: Annotated[Params, roles.Weights()]
    num_examples: Annotated[Tensor, Count()]  # ()


Memory = TypeVar("Memory")
Targets = TypeVar("Targets")
State = TypeVar("State", bound=Weights)
Message = TypeVar("Message", bound=Weights)
Upload = TypeVar("Upload", bound=WeightUpload)
Own = TypeVar("Own", bound=OwnWeights)


class SumMethod(Method[api.State, api.Message, api.Memory, api.Upload]):
    """A method whose server reads sums over clients and never one client's upload.

    A method that needs the uploads side by side overrides `aggregate`, and then is not in sum form.
    """

    @property
    def sums(self) -> bool:
        return type(self).aggregate is SumMethod.aggregate

    @property
    def adds_to_one(self) -> bool:
        """Whether a client adds to one of its summands alone, and to the others at weight 0."""
        return False

    def public_weight(self, num_examples: int) -> float:
        """What a client of so many examples counts where not all count 1: everybody can know it."""
        return 1.0

    def unchanged(self, upload: api.Upload, message: api.Message) -> api.Upload:
        """What a client sends in the place of an upload like this if it has learnt nothing. Under client-level
        differential privacy clients add how they differ from it. It holds for a class that replaces neither `summand`
        nor `upload_spec`."""
        raise NotImplementedError

    @abstractmethod
    def summand(self, upload: api.Upload, message: api.Message) -> Summands:
        """What a client adds; made of what it received and sent, so that it could be made at the client."""

    def summand_of(self, step: str) -> Summand:
        """What a client adds in a step, which is named: a site takes it from here, and adds nothing in a step that is
        not named. A method that asks for more sums than that of the training says so here. Raises LookupError."""
        if step != "train":
            raise LookupError(step)
        return self.summand

    @abstractmethod
    def from_sum(self, state: api.State, totals: Totals, server: ServerContext) -> api.State:
        """What the server knows after a round."""

    def aggregate(self, state: api.State, uploads: Uploads[api.Upload], server: ServerContext) -> api.State:
        return self.from_sum(state, folded(uploads, partial(self.message_for, state), self.summand), server)

    def round(self, state: api.State, clients: Clients) -> api.State:
        if clients.summing is None:
            return super().round(state, clients)
        like = self.upload_spec(state, clients.server)
        totals = clients.summing.summed(self.train, partial(self.message_for, state), like, self.summand)
        return self.from_sum(state, totals, clients.server)


def in_sum_form(method: Method[Any, Any, Any, Any]) -> SumMethod[Any, Any, Any, Any]:
    """The method, if its server needs sums alone."""
    if not (method.sums and isinstance(method, SumMethod)):
        raise TypeError(f"the server of {type(method).__name__} needs more than sums over clients")
    return method


class WeightSharing(Averages, SumMethod[State, Message, Memory, Upload]):
    """Clients train the server's weights; the server takes the mean of what they send.

    What the server knows, sends and receives are records that have at least `params`.
    """

    def loss(self, model: Model, batch: Batch, message: Message, memory: Memory) -> Tensor:
        """The local objective: cross-entropy, unless the method says otherwise."""
        return cross_entropy(model, batch)

    def summand(self, upload: Upload, message: Message) -> Summands:
        return {"upload": (upload, self.weight_of(upload.num_examples))}

    def from_sum(self, state: State, totals: Totals, server: ServerContext) -> State:
        return replace(state, params=totals["upload"].value().params)

    def share(self, totals: Totals, server: ServerContext) -> float:
        """Which part of the weight of all clients replied in this round."""
        everyone = len(server.spec.clients) if self.is_uniform else server.spec.num_examples
        return totals["upload"].weight / everyone

    def local_weights(self, message: Message, memory: Memory) -> Params:
        return message.params

    async def trained(self, client: ClientContext, message: Message, memory: Memory) -> Params:
        """The weights after the client's training of a round."""
        start = self.local_weights(message, memory)
        return await client.fit(Objective(self.loss), params=start, context=(message, memory))

    async def trained_privately(self, client: PrivateClient, message: Message, memory: Memory) -> Params:
        """The same, with noise."""
        start = self.local_weights(message, memory)
        return await client.fit(Objective(self.loss), params=start, context=(message, memory))


class PublicWeights(WeightSharing[State, State, Memory, Upload]):
    """The server sends what it knows, and its weights are a model for everyone."""

    def message_for(self, state: State, client: ClientId) -> State:
        return state

    def public(self, state: State) -> tuple[Params, State] | None:
        return state.params, state


class PlainSharing(WeightSharing[State, Weights, Memory, WeightUpload]):
    """Nothing but weights travels, whatever else the server knows."""

    def message_for(self, state: State, client: ClientId) -> Weights:
        return Weights(state.params)

    def upload_spec(self, state: State, server: ServerContext) -> WeightUpload:
        return WeightUpload(state.params, torch.tensor(0))

    def unchanged(self, upload: WeightUpload, message: Weights) -> WeightUpload:
        return WeightUpload(message.params, torch.tensor(0))

    async def train(self, client: ClientContext, message: Weights, memory: Memory) -> Reply[WeightUpload, Memory]:
        params = await self.trained(client, message, memory)
        upload = WeightUpload(tree.select(params, list(message.params)), client.num_examples)
        return Reply(upload, self.remember(params, memory))

    async def train_privately(
        self, client: PrivateClient, message: Weights, memory: Memory
    ) -> Reply[WeightUpload, Memory]:
        params = await self.trained_privately(client, message, memory)
        upload = WeightUpload(tree.select(params, list(message.params)), client.num_examples)
        return Reply(upload, client.post(self.remember, params, memory))

    def remember(self, params: Params, memory: Memory) -> Memory:
        """What a client keeps of the weights that it trained."""
        return memory


class GlobalModel(PlainSharing[Weights, Memory]):
    """The server's weights are all that it knows, and a model for everyone."""

    def init_server(self, server: ServerContext) -> Weights:
        return Weights(without(server.initial_params(), self.private))

    def public(self, state: Weights) -> tuple[Params, Weights] | None:
        return state.params, state


class OwnModels(GlobalModel[OwnWeights]):
    """Beside the model for everyone, each client has one of its own, which it uses."""

    clients_use = "own models"

    def init_memory(self, client: ClientContext, message: Weights) -> OwnWeights:
        return OwnWeights(message.params)

    def local_weights(self, message: Weights, memory: OwnWeights) -> Params:
        return memory.params


class PrivateParts(PlainSharing[Weights, Own]):
    """Clients train all weights together, send those that are not private, and keep those that are."""

    def init_server(self, server: ServerContext) -> Weights:
        return Weights(without(server.initial_params(), self.private))

    def local_weights(self, message: Weights, memory: Own) -> Params:
        return {**message.params, **memory.params}

    def remember(self, params: Params, memory: Own) -> Own:
        return replace(memory, params=tree.select(params, list(memory.params)))


class PartSharing(PrivateParts[OwnWeights]):
    """The private weights are all that a client keeps."""

    def init_memory(self, client: ClientContext, message: Weights) -> OwnWeights:
        return OwnWeights(matching(client.initial_params(), self.private))


@record
class WeightsAndPrototypes(Generic[Targets]):
    """What the server knows and sends: weights, and what it made of the clients' prototypes."""

    params: Params
    prototypes: Targets


@record
class PrototypeUpload:
    params: Annotated[Params, roles.Weights()]
    prototypes: Prototypes
    num_examples: Annotated[Tensor, Count()]  # ()


class PrototypeSharing(
    Averages,
    SumMethod[WeightsAndPrototypes[Targets], WeightsAndPrototypes[Targets], Tree, PrototypeUpload],
    Generic[Targets],
):
    """Clients send weights and class prototypes, and learn against what the server makes of the latter."""

    releases_class_sums = True

    prototype_mode: PrototypeMode

    @abstractmethod
    def no_prototypes(self, num_classes: int, dim: int) -> Targets:
        """What the server knows of prototypes before the first round."""

    @abstractmethod
    def combine(self, sums: ClassSums, previous: Targets) -> Targets:
        """What the server makes of the sums of the clients' prototypes."""

    @abstractmethod
    def prototype_loss(self, z: Tensor, batch: Batch, targets: Targets) -> Tensor:
        """The terms that read prototypes, per example, (B,)."""

    def init_server(self, server: ServerContext) -> WeightsAndPrototypes[Targets]:
        prototypes = self.no_prototypes(server.num_classes, server.feature_dim)
        return WeightsAndPrototypes(server.initial_params(), prototypes)

    def message_for(self, state: WeightsAndPrototypes[Targets], client: ClientId) -> WeightsAndPrototypes[Targets]:
        return state

    def public(self, state: WeightsAndPrototypes[Targets]) -> tuple[Params, WeightsAndPrototypes[Targets]] | None:
        return state.params, state

    def upload_spec(self, state: WeightsAndPrototypes[Targets], server: ServerContext) -> PrototypeUpload:
        prototypes = class_means.no_prototypes(server.num_classes, server.feature_dim)
        return PrototypeUpload(state.params, prototypes, torch.tensor(0))

    def summand(self, upload: PrototypeUpload, message: WeightsAndPrototypes[Targets]) -> Summands:
        return {
            "params": (upload.params, self.weight_of(upload.num_examples)),
            "prototypes": (self.added(upload.prototypes), 1.0),
        }

    def added(self, prototypes: Prototypes) -> ClassSums:
        """What a client's prototypes add to the sums: each counts once, unless the method says otherwise."""
        return class_means.of_owner(prototypes)

    def from_sum(
        self, state: WeightsAndPrototypes[Targets], totals: Totals, server: ServerContext
    ) -> WeightsAndPrototypes[Targets]:
        prototypes = self.combine(totals["prototypes"].total, state.prototypes)
        return WeightsAndPrototypes(totals["params"].value(), prototypes)

    def local_weights(self, message: WeightsAndPrototypes[Targets], memory: Tree) -> Params:
        return message.params

    async def train(
        self, client: ClientContext, message: WeightsAndPrototypes[Targets], memory: Tree
    ) -> Reply[PrototypeUpload, Tree]:
        params, prototypes = await class_means.fit_with_prototypes(
            client, Objective(self.loss), message.params, (message.prototypes,), self.prototype_mode
        )
        return Reply(PrototypeUpload(params, class_means.ownership(prototypes), client.num_examples), memory)

    async def train_privately(
        self, client: PrivateClient, message: WeightsAndPrototypes[Targets], memory: Tree
    ) -> Reply[PrototypeUpload, Tree]:
        """Prototypes are those of the received weights, in some of the rounds."""
        context = (message.prototypes,)
        params = await client.fit(Objective(self.loss), params=message.params, context=context)
        prototypes = client.post(class_means.ownership, await client.prototypes(message.params))
        return Reply(PrototypeUpload(params, prototypes, client.num_examples), memory)

    def loss(self, model: Model, batch: Batch, targets: Targets) -> Tensor:
        """The local objective: cross-entropy and what the method adds."""
        z = model.features(batch.x)
        return batch.cross_entropy(model.scores(z)) + batch.mean(self.prototype_loss(z, batch, targets))
