"""Partial implementations that methods share: clients that share weights, and those that share prototypes too."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor

from protofed import tree
from protofed.data import Batch
from protofed.errors import BadInput
from protofed.method import Central, ClientId, Clients, Local, Method, Objective, Reply, Task, Uploads
from protofed.networks import Model, Parts, Patterns, matching, without
from protofed.prototypes import class_means
from protofed.prototypes.class_means import PrototypeMode, Prototypes
from protofed.tree import Mean, Nothing, Params, record

Memory = TypeVar("Memory")
Known = TypeVar("Known")

HEAD: Patterns = ("classifier.*",)
Weighting = Literal["uniform", "examples"]
"""Whether clients count the same in a mean over clients, or by their numbers of examples."""


@record
class OwnWeights:
    """The memory of a client that keeps some or all of its weights."""

    params: Params


@record
class Weights:
    params: Params


@record
class WeightUpload:
    params: Params
    num_examples: Tensor  # ()


class WeightSharing(Method[Weights, Weights, Memory, WeightUpload], Generic[Memory]):
    """Clients train the server's weights; the server takes the mean, weighted by their numbers of examples."""

    @abstractmethod
    def loss(self, model: Model, batch: Batch, message: Weights, memory: Memory) -> Tensor:
        """The local objective."""

    def init_server(self, central: Central) -> Weights:
        return Weights(without(central.initial_params(), self.private))

    def message_for(self, server: Weights, client: ClientId) -> Weights:
        return server

    def upload_like(self, server: Weights, central: Central) -> WeightUpload:
        return WeightUpload(server.params, torch.tensor(0))

    def aggregate(self, server: Weights, uploads: Uploads[WeightUpload], central: Central) -> Weights:
        mean = Mean()
        for _, upload in uploads:
            mean.add(upload.params, upload.num_examples.item())
        return Weights(mean.value())

    async def train(self, local: Local, message: Weights, memory: Memory) -> Reply[WeightUpload, Memory]:
        start = self.local_weights(message, memory)
        params = await local.fit(Objective(self.loss), params=start, context=(message, memory))
        upload = WeightUpload(without(params, self.private), local.num_examples)
        return Reply(upload, self.remember(params, memory))

    def remember(self, params: Params, memory: Memory) -> Memory:
        """What a client keeps of the weights that it trained."""
        return memory

    def local_weights(self, message: Weights, memory: Memory) -> Params:
        return message.params


class PartSharing(WeightSharing[OwnWeights]):
    """Clients train all weights together, send those that are not private, and keep those that are."""

    def init_memory(self, local: Local, message: Weights) -> OwnWeights:
        return OwnWeights(matching(local.initial_params(), self.private))

    def local_weights(self, message: Weights, memory: OwnWeights) -> Params:
        return {**message.params, **memory.params}

    def remember(self, params: Params, memory: OwnWeights) -> OwnWeights:
        return replace(memory, params=tree.select(params, list(memory.params)))

    def loss(self, model: Model, batch: Batch, message: Weights, memory: OwnWeights) -> Tensor:
        return batch.cross_entropy(model.logits(batch.x))


def weighted(uploads: Uploads[WeightUpload], weighting: Weighting) -> Iterator[tuple[ClientId, WeightUpload]]:
    """The uploads as they are to count in a mean by numbers of examples."""
    for client, upload in uploads:
        yield client, upload if weighting == "examples" else replace(upload, num_examples=torch.tensor(1))


class GlobalModel(WeightSharing[Memory]):
    """All weights are shared, so there is a model for everyone."""

    has_plain_classifier: ClassVar[bool] = True
    """Whether the classifier reads `Model.embedding`, so that a server can retrain it on features."""

    def public(self, server: Weights) -> tuple[Params, Weights] | None:
        return server.params, server


def refuse_other_classifier(base: GlobalModel[Any], method: str) -> None:
    if not base.has_plain_classifier:
        raise BadInput(f"{method} retrains a classifier on features, and that of {type(base).__name__} reads others")


class Wrapper(Method[Any, Any, Any, Any]):
    """A method around another one with a global model; whatever it does not say itself is the base's."""

    base: GlobalModel[Any]

    def networks(self, task: Task, client: ClientId) -> Parts:
        return self.base.networks(task, client)

    def init_server(self, central: Central) -> Any:
        return self.base.init_server(central)

    def setup(self, server: Any, clients: Clients) -> Any:
        return self.base.setup(server, clients)

    def message_for(self, server: Any, client: ClientId) -> Any:
        return self.base.message_for(server, client)

    def upload_like(self, server: Any, central: Central) -> Any:
        return self.base.upload_like(server, central)

    def aggregate(self, server: Any, uploads: Uploads[Any], central: Central) -> Any:
        return self.base.aggregate(server, uploads, central)

    def finish(self, server: Any, clients: Clients) -> Any:
        return self.base.finish(server, clients)

    def public(self, server: Any) -> tuple[Params, Any] | None:
        return self.base.public(server)

    def init_memory(self, local: Local, message: Any) -> Any:
        return self.base.init_memory(local, message)

    def local_weights(self, message: Any, memory: Any) -> Params:
        return self.base.local_weights(message, memory)

    async def train(self, local: Local, message: Any, memory: Any) -> Reply[Any, Any]:
        return await self.base.train(local, message, memory)

    def trained_weights(self, upload: Any, memory: Any) -> Params:
        return self.base.trained_weights(upload, memory)

    def predict(self, model: Model, x: Tensor, message: Any, memory: Any | None) -> Tensor:
        return self.base.predict(model, x, message, memory)


class Enclosing(Wrapper):
    """A wrapper whose server knows more than the base's: its record has the base's as `base`."""

    def setup(self, server: Any, clients: Clients) -> Any:
        return replace(server, base=self.base.setup(server.base, clients))

    def message_for(self, server: Any, client: ClientId) -> Any:
        return self.base.message_for(server.base, client)

    def upload_like(self, server: Any, central: Central) -> Any:
        return self.base.upload_like(server.base, central)

    def aggregate(self, server: Any, uploads: Uploads[Any], central: Central) -> Any:
        return replace(server, base=self.base.aggregate(server.base, uploads, central))

    def finish(self, server: Any, clients: Clients) -> Any:
        return replace(server, base=self.base.finish(server.base, clients))

    def public(self, server: Any) -> tuple[Params, Any] | None:
        return self.base.public(server.base)

    def published(self, base_server: Any) -> tuple[Params, Any]:
        """The base's public model, which a global model always has, and the message that it predicts with."""
        public = self.base.public(base_server)
        assert public is not None
        return public


@record
class WeightsAndPrototypes(Generic[Known]):
    """What the server knows and sends: weights, and what it made of the clients' prototypes."""

    params: Params
    prototypes: Known


@record
class PrototypeUpload:
    params: Params
    prototypes: Prototypes
    num_examples: Tensor  # ()


class PrototypeSharing(
    Method[WeightsAndPrototypes[Known], WeightsAndPrototypes[Known], Nothing, PrototypeUpload], Generic[Known]
):
    """Clients send weights and class prototypes, and learn against what the server makes of the latter."""

    prototype_mode: PrototypeMode

    @abstractmethod
    def no_prototypes(self, num_classes: int, dim: int) -> Known:
        """What the server knows of prototypes before the first round."""

    @abstractmethod
    def combine(self, prototypes: list[Prototypes], previous: Known) -> Known:
        """What the server makes of the clients' prototypes."""

    @abstractmethod
    def prototype_loss(self, z: Tensor, batch: Batch, known: Known) -> Tensor:
        """The terms that read prototypes, per example, (B,)."""

    def networks(self, task: Task, client: ClientId) -> Parts:
        return class_means.with_recorder(task, task.model(client), self.prototype_mode)

    def init_server(self, central: Central) -> WeightsAndPrototypes[Known]:
        params = without(central.initial_params(), class_means.RECORDED)
        return WeightsAndPrototypes(params, self.no_prototypes(central.task.num_classes, central.feature_dim))

    def message_for(self, server: WeightsAndPrototypes[Known], client: ClientId) -> WeightsAndPrototypes[Known]:
        return server

    def public(self, server: WeightsAndPrototypes[Known]) -> tuple[Params, WeightsAndPrototypes[Known]] | None:
        return server.params, server

    def upload_like(self, server: WeightsAndPrototypes[Known], central: Central) -> PrototypeUpload:
        prototypes = class_means.no_prototypes(central.task.num_classes, central.feature_dim)
        return PrototypeUpload(server.params, prototypes, torch.tensor(0))

    def aggregate(
        self, server: WeightsAndPrototypes[Known], uploads: Uploads[PrototypeUpload], central: Central
    ) -> WeightsAndPrototypes[Known]:
        mean, prototypes = Mean(), []
        for _, upload in uploads:
            mean.add(upload.params, upload.num_examples.item())
            prototypes.append(upload.prototypes)
        return WeightsAndPrototypes(mean.value(), self.combine(prototypes, server.prototypes))

    def local_weights(self, message: WeightsAndPrototypes[Known], memory: Nothing) -> Params:
        return message.params

    async def train(
        self, local: Local, message: WeightsAndPrototypes[Known], memory: Nothing
    ) -> Reply[PrototypeUpload, Nothing]:
        start = class_means.cleared(message.params, local.networks)
        params = await local.fit(Objective(self.loss), params=start, context=(message.prototypes,))
        prototypes = class_means.ownership(await class_means.of_client(local, params, self.prototype_mode))
        shared = without(params, (*self.private, *class_means.RECORDED))
        return Reply(PrototypeUpload(shared, prototypes, local.num_examples), memory)

    def loss(self, model: Model, batch: Batch, known: Known) -> Tensor:
        """The local objective: cross-entropy and what the method adds."""
        z = model.features(batch.x)
        class_means.record_last_epoch(model, z, batch)
        return batch.cross_entropy(model.scores(z)) + batch.mean(self.prototype_loss(z, batch, known))
