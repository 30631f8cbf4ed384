"""Methods that go around another one: what it needs to have, and what is left to it."""

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import Clients, Method, SettingErrors, Uploads, UsedModel
from protofed.api.task import ClientId, TaskSpec
from protofed.api.views import Points
from protofed.errors import BadInput
from protofed.methods.families import Summands, SumMethod, Totals, in_sum_form
from protofed.nn.networks import Model, Parts
from protofed.optim.optimizers import Optimizer
from protofed.tree import Params


def base_errors(wrapper: Method[Any, Any, Any, Any], base: Method[Any, Any, Any, Any]) -> SettingErrors:
    """Why a wrapper cannot go around a base: what decides is what the base has, not its class."""
    name, base_name = type(wrapper).__name__, type(base).__name__
    if type(base).public is Method.public:
        yield "base", f"{name} needs a method that has a public model, and {base_name} has none"
    elif "wrapper" in base.tags:
        yield "base", f"{name} goes around a method, and {base_name} is a wrapper itself"
    elif base.has_more_exchanges:  # guard: wrappers-around-one-exchange
        yield "base", f"{name} goes around methods whose clients are asked once in a round; {base_name} asks again"
    elif wrapper.retrains_classifier and not base.has_plain_classifier:
        yield (
            "base",
            f"{name} retrains a classifier on features, and that of {base_name} reads others or does not stand alone",
        )


def published(base: Method[Any, Any, Any, Any], state: Any) -> tuple[Params, Any]:
    """The base's public model, and the message that it predicts with."""
    public = base.public(state)
    if public is None:
        raise BadInput(f"{type(base).__name__} has no public model with these settings, so nothing can go around it")
    return public


class Wrapper(SumMethod[Any, Any, Any, Any]):
    """A method around another one that has a public model; whatever it does not say itself is the base's. It is in sum
    form where its base is, unless it reads uploads itself."""

    base: Method[Any, Any, Any, Any]

    @property
    def sums(self) -> bool:
        return self.base.sums and type(self).aggregate in (Wrapper.aggregate, StatefulWrapper.aggregate)

    @property
    def needs_fresh_optimizer(self) -> str:
        return self.base.needs_fresh_optimizer

    @property
    def needs_each_upload(self) -> str:
        return self.base.needs_each_upload

    @property
    def clients_use(self) -> UsedModel:
        return self.base.clients_use

    def validate(self, optimizer: Optimizer, batch_size: int, spec: TaskSpec | None) -> SettingErrors:
        return base_errors(self, self.base)

    def networks(self, spec: TaskSpec, client: ClientId) -> Parts:
        return self.base.networks(spec, client)

    def init_server(self, server: ServerContext) -> Any:
        return self.base.init_server(server)

    def setup(self, state: Any, clients: Clients) -> Any:
        return self.base.setup(state, clients)

    def message_for(self, state: Any, client: ClientId) -> Any:
        return self.base.message_for(state, client)

    def upload_spec(self, state: Any, server: ServerContext) -> Any:
        return self.base.upload_spec(state, server)

    def aggregate(self, state: Any, uploads: Uploads[Any], server: ServerContext) -> Any:
        return self.base.aggregate(state, uploads, server)

    @property
    def adds_to_one(self) -> bool:
        return in_sum_form(self.base).adds_to_one

    def public_weight(self, num_examples: int) -> float:
        return in_sum_form(self.base).public_weight(num_examples)

    def summand(self, upload: Any, message: Any) -> Summands:
        return in_sum_form(self.base).summand(upload, message)

    def from_sum(self, state: Any, totals: Totals, server: ServerContext) -> Any:
        return in_sum_form(self.base).from_sum(state, totals, server)

    def group(self, state: Any, client: ClientId, upload: Any) -> Hashable:
        return self.base.group(state, client, upload)

    def finish(self, state: Any, clients: Clients) -> Any:
        return self.base.finish(state, clients)

    def public(self, state: Any) -> tuple[Params, Any] | None:
        return self.base.public(state)

    def init_memory(self, client: ClientContext, message: Any) -> Any:
        return self.base.init_memory(client, message)

    def local_weights(self, message: Any, memory: Any) -> Params:
        return self.base.local_weights(message, memory)

    async def train(self, client: ClientContext, message: Any, memory: Any) -> Reply[Any, Any]:
        return await self.base.train(client, message, memory)

    def trained_weights(self, upload: Any, memory: Any) -> Params:
        return self.base.trained_weights(upload, memory)

    def predict(self, model: Model, x: Tensor, message: Any, memory: Any | None) -> Tensor:
        return self.base.predict(model, x, message, memory)

    def probabilities(self, scores: Tensor, message: Any) -> Tensor:
        return self.base.probabilities(scores, message)

    def shown_features(self, model: Model, x: Tensor) -> Tensor:
        return self.base.shown_features(model, x)

    def prototype_sets(self, state: Any) -> Mapping[str, Points]:
        return self.base.prototype_sets(state)

    def starting_weights(self, message: Any, memory: Any) -> Params:
        return self.base.starting_weights(message, memory)


class StatefulWrapper(Wrapper):
    """A wrapper whose server knows more than the base's: its record has the base's as `base`."""

    def setup(self, state: Any, clients: Clients) -> Any:
        return replace(state, base=self.base.setup(state.base, clients))

    def message_for(self, state: Any, client: ClientId) -> Any:
        return self.base.message_for(state.base, client)

    def upload_spec(self, state: Any, server: ServerContext) -> Any:
        return self.base.upload_spec(state.base, server)

    def aggregate(self, state: Any, uploads: Uploads[Any], server: ServerContext) -> Any:
        return self.with_base(state, self.base.aggregate(state.base, uploads, server), server)

    def from_sum(self, state: Any, totals: Totals, server: ServerContext) -> Any:
        return self.with_base(state, super().from_sum(state.base, totals, server), server)

    def with_base(self, state: Any, base: Any, server: ServerContext) -> Any:
        """What the wrapper's server knows when the base's has read a round."""
        return replace(state, base=base)

    def group(self, state: Any, client: ClientId, upload: Any) -> Hashable:
        return self.base.group(state.base, client, upload)

    def finish(self, state: Any, clients: Clients) -> Any:
        return replace(state, base=self.base.finish(state.base, clients))

    def public(self, state: Any) -> tuple[Params, Any] | None:
        return self.base.public(state.base)

    def prototype_sets(self, state: Any) -> Mapping[str, Points]:
        return self.base.prototype_sets(state.base)
