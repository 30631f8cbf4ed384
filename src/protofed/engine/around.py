"""A setting of the training that concerns what clients keep, as a method around the configured one."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.evaluation import Evaluation, Outcomes, Reading
from protofed.api.method import Clients, Group, Method, Step, Summing, Uploads, UsedModel
from protofed.api.sums import Summand, Totals
from protofed.api.task import ClientId, TaskSpec
from protofed.api.views import Observed, Points, Relation
from protofed.data.batches import Batch
from protofed.nn.networks import Model, Parts, Patterns
from protofed.tree import Params, Tree, record


@record
class Kept:
    """What a client keeps."""

    base: Tree  # for the method
    own: Tree  # for the setting


@dataclass(frozen=True)
class Around(Method[Any, Any, Any, Any]):
    """The configured method, with something else at its clients. Every step of the base goes through `stepped`; what a
    subclass does not say is the base's."""

    base: Method[Any, Any, Any, Any]

    # ---- what a setting says

    async def stepped(
        self, step: Step[Any, Any, Any], client: ClientContext, message: Tree, memory: Any
    ) -> Reply[Any, Any]:
        """A step of the base, at a client that keeps this."""
        return await step(client, self.seen(message, memory), self.kept_by_base(memory))

    def seen(self, message: Tree, memory: Any) -> Tree:
        """The message as the base sees it; memory is None for the public model."""
        return message

    def kept_by_base(self, memory: Any) -> Tree:
        return memory

    def arrived(self, upload: Tree, server: ServerContext) -> Tree:
        """An upload as the base's server reads it."""
        return upload

    # ---- the server's half

    @property
    def private(self) -> Patterns:
        return self.base.private

    @property
    def sums(self) -> bool:
        return self.base.sums

    @property
    def releases_class_sums(self) -> bool:  # type: ignore[override]
        return self.base.releases_class_sums

    @property
    def needs_fresh_optimizer(self) -> str:
        return self.base.needs_fresh_optimizer

    @property
    def needs_each_upload(self) -> str:
        return self.base.needs_each_upload

    @property
    def clients_use(self) -> UsedModel:
        return self.base.clients_use

    def networks(self, spec: TaskSpec, client: ClientId) -> Parts:
        return self.base.networks(spec, client)

    def init_server(self, server: ServerContext) -> Tree:
        return self.base.init_server(server)

    def message_for(self, state: Tree, client: ClientId) -> Tree:
        return self.base.message_for(state, client)

    def upload_spec(self, state: Tree, server: ServerContext) -> Tree:
        return self.base.upload_spec(state, server)

    def aggregate(self, state: Tree, uploads: Uploads[Tree], server: ServerContext) -> Tree:
        return self.base.aggregate(state, uploads, server)

    def group(self, state: Tree, client: ClientId, upload: Tree) -> Hashable:
        return self.base.group(state, client, upload)

    def public(self, state: Tree) -> tuple[Params, Tree] | None:
        return self.base.public(state)

    def global_models(
        self, state: Tree, memories: Mapping[ClientId, Any], server: ServerContext
    ) -> Mapping[str, Reading]:
        kept = {client: self.kept_by_base(memory) for client, memory in memories.items()}
        return self.base.global_models(state, kept, server)

    def setup(self, state: Tree, clients: Clients) -> Tree:
        return self.base.setup(state, _Clients(self, clients))

    def round(self, state: Tree, clients: Clients) -> Tree:
        return self.base.round(state, _Clients(self, clients, is_round=True))

    def finish(self, state: Tree, clients: Clients) -> Tree:
        return self.base.finish(state, _Clients(self, clients))

    def judged(self, state: Tree, clients: Clients) -> Tree:
        return self.base.judged(state, _Clients(self, clients))

    # ---- the client's half

    def init_memory(self, client: ClientContext, message: Tree) -> Tree:
        return self.base.init_memory(client, message)

    def local_weights(self, message: Tree, memory: Any) -> Params:
        return self.base.local_weights(self.seen(message, memory), self.kept_by_base(memory))

    async def train(self, client: ClientContext, message: Tree, memory: Any) -> Reply[Any, Any]:
        return await self.stepped(self.base.train, client, message, memory)

    def trained_weights(self, upload: Tree, memory: Any) -> Params:
        return self.base.trained_weights(self.seen(upload, memory), self.kept_by_base(memory))

    def predict(self, model: Model, x: Tensor, message: Tree, memory: Any) -> Tensor:
        return self.base.predict(model, x, self.seen(message, memory), self.kept_by_base(memory))

    def probabilities(self, scores: Tensor, message: Tree) -> Tensor:
        return self.base.probabilities(scores, message)

    def outcomes(self, model: Model, batch: Batch, message: Tree, memory: Any) -> Outcomes:
        return self.base.outcomes(model, batch, self.seen(message, memory), self.kept_by_base(memory))

    def shown_features(self, model: Model, x: Tensor) -> Tensor:
        return self.base.shown_features(model, x)

    def prototype_sets(self, state: Tree) -> Mapping[str, Points]:
        return self.base.prototype_sets(state)

    def relations(self, state: Tree, observed: Observed) -> Mapping[str, Relation]:
        return self.base.relations(state, _ObservedByBase(self, observed))

    def public_variants(self, state: Tree) -> Mapping[str, tuple[Params, Tree]]:
        return {} if self.public(state) is None else self.base.public_variants(state)

    def starting_weights(self, message: Tree, memory: Any) -> Params:
        return self.base.starting_weights(self.seen(message, memory), self.kept_by_base(memory))

    async def evaluate(self, client: ClientContext, params: Params, message: Tree, memory: Any) -> Evaluation:
        return await self.base.evaluate(client, params, self.seen(message, memory), self.kept_by_base(memory))

    async def evaluate_own(self, client: ClientContext, message: Tree, memory: Any) -> Reply[Evaluation, Any]:
        return await self.stepped(self.base.evaluate_own, client, message, memory)


@dataclass(frozen=True)
class _ObservedByBase:
    """A federation as the base sees it."""

    method: Around
    observed: Observed

    @property
    def server(self) -> ServerContext:
        return self.observed.server

    @property
    def ids(self) -> Sequence[ClientId]:
        return self.observed.ids

    def memory(self, client: ClientId) -> Tree:
        return self.method.kept_by_base(self.observed.memory(client))

    def class_means(self, client: ClientId, params: Params) -> Any:
        return self.observed.class_means(client, params)


class Keeping(Around):
    """Clients keep something for the setting, beside what they keep for the method."""

    def kept_by_base(self, memory: Kept | None) -> Tree:
        return None if memory is None else memory.base


def unwrapped(method: Method[Any, Any, Any, Any]) -> Method[Any, Any, Any, Any]:
    """The method as it was configured."""
    return unwrapped(method.base) if isinstance(method, Around) else method


@dataclass(frozen=True)
class At:
    """A step of the base as a step of the method around it."""

    method: Around
    step: Step[Any, Any, Any]

    async def __call__(self, client: ClientContext, message: Tree, memory: Tree) -> Reply[Any, Any]:
        return await self.method.stepped(self.step, client, message, memory)


@dataclass(frozen=True)
class _Clients:
    """The clients of a phase as the base sees them."""

    method: Around
    clients: Clients
    is_round: bool = False

    @property
    def ids(self) -> Sequence[ClientId]:
        return self.clients.ids

    @property
    def server(self) -> ServerContext:
        return self.clients.server

    @property
    def summing(self) -> Summing | None:
        return None if self.clients.summing is None else self

    def run(
        self,
        step: Step[Any, Any, Any],
        message_for: Callable[[ClientId], Any],
        like: Any,
        group: Group[Any] | None = None,
    ) -> Iterator[tuple[ClientId, Any]]:
        uploads = self.clients.run(self._around(step), message_for, like, group)
        return ((client, self.method.arrived(upload, self.server)) for client, upload in uploads)

    def summed(
        self, step: Step[Any, Any, Any], message_for: Callable[[ClientId], Any], like: Any, summand: Summand
    ) -> Totals:
        """What `arrived` does at the server, clients have done: `stepped` puts the same into what they send."""
        assert self.clients.summing is not None
        return self.clients.summing.summed(self._around(step), message_for, like, summand)

    def _around(self, step: Step[Any, Any, Any]) -> Step[Any, Any, Any]:
        is_training = self.is_round and step == self.method.base.train
        return self.method.train if is_training else At(self.method, step)
