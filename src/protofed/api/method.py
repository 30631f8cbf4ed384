"""What a method is. Read this first.

A method is one class with both halves of its algorithm. Everything that moves or persists is a record (a tree of
tensors) that is passed in and out:

    state     what the server knows between rounds
    message   what one client receives
    upload    what one client sends back
    memory    what one client keeps; it never leaves the client

Nothing lives on `self` but hyper-parameters. A client's step is a coroutine: `await client.fit(...)` hands a request to
the runtime, which may answer it for one client at once or for a whole cohort together.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Generic, Literal, Protocol, TypeVar, cast

from annotated_types import Ge, Gt
from torch import Tensor

from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.evaluation import Evaluation, Outcomes, Reading, evaluation_of, outcomes_of
from protofed.api.private import NotPrivate, PrivateClient
from protofed.api.registry import Tag
from protofed.api.requests import Objective
from protofed.api.sums import Summand, Totals
from protofed.api.task import ClientId, TaskSpec
from protofed.api.views import Observed, Points, Relation
from protofed.data.batches import Batch
from protofed.nn.networks import Model, Parts, Patterns
from protofed.optim.optimizers import Optimizer
from protofed.tree import Nothing, Params

# The ranges of hyper-parameters.
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]

UsedModel = Literal["public model", "own models"]
"""What clients use: one model for all, or each its own."""

Weighting = Literal["examples", "uniform"]
"""How clients count in a mean over clients: by their numbers of examples, or equally."""
MethodWeighting = Literal["training", "examples", "uniform"]
"""The same as a setting of a method: "training" leaves it to `training.weighting`, which is one for all methods."""

State = TypeVar("State")
Message = TypeVar("Message")
Memory = TypeVar("Memory")
Upload = TypeVar("Upload")
M = TypeVar("M", bound="Method[Any, Any, Any, Any]")


Step = Callable[[ClientContext, Message, Memory], Coroutine[Any, Any, Reply[Upload, Memory]]]
Group = Callable[[ClientId, Upload], Hashable]
"""Which uploads are meant to be alike."""
SettingErrors = Iterator[tuple[str, str]]
"""Settings, and why they cannot be."""
Uploads = Iterable[tuple[ClientId, Upload]]
"""Accepted uploads in canonical order, to be read once: the next client may only train when the last is consumed."""


class Clients(Protocol):
    """The clients that take part in a round."""

    @property
    def ids(self) -> Sequence[ClientId]: ...

    @property
    def server(self) -> ServerContext: ...

    @property
    def summing(self) -> "Summing | None":
        """What gives sums over clients, where uploads are not to be had one by one."""

    def run(
        self,
        step: Step[Message, Memory, Upload],
        message_for: Callable[[ClientId], Message],
        like: Upload,
        group: Group[Upload] | None = None,
    ) -> Iterator[tuple[ClientId, Upload]]:
        """Runs a step at every client. Uploads that are not like `like` are refused. Only those of one `group` are
        compared with each other by rules against bad uploads; all are, if there is none."""


class Summing(Protocol):
    """Clients that give nothing but sums."""

    def summed(
        self,
        step: Step[Message, Memory, Upload],
        message_for: Callable[[ClientId], Message],
        like: Upload,
        summand: Summand,
    ) -> Totals:
        """Runs a step at every client, and gives the sums over clients of what `summand` makes of their uploads."""


class Method(ABC, Generic[State, Message, Memory, Upload]):
    """A federated method: subclass a family in `methods/families.py`, or this."""

    tags: ClassVar[tuple[Tag, ...]] = ()
    """What kind of method it is."""
    has_plain_classifier: ClassVar[bool] = True
    """Whether a server can retrain the classifier on features: it reads `Model.embedding` and may change, and the
    public weights are all that the networks have."""
    retrains_classifier: ClassVar[bool] = False
    """Of a wrapper: whether its server retrains the base's classifier on features."""

    not_by_record: ClassVar[str] = ""
    """Why the loss of a record cannot be told without the client's other records; empty if it can. Only then gradients
    of single records can be clipped."""
    releases_class_sums: ClassVar[bool] = False
    """Whether its private step releases class sums."""
    releases_gradient_sums: ClassVar[bool] = False
    """Whether all that clients add are sums over records (`ClientContext.gradient_sum` and `class_sums`), so that noise
    in a secure sum hides records."""
    has_more_exchanges: ClassVar[bool] = False
    """Whether clients are asked more in a round than to train, so that no method goes around this one."""

    @property
    def private(self) -> Patterns:
        """Weights that never leave the client."""
        return ()

    @property
    def sums(self) -> bool:
        """Whether sums over clients are all that the server reads with these settings, and never one upload."""
        return False

    @property
    def needs_fresh_optimizer(self) -> str:
        """Why clients cannot keep their optimiser's state from round to round; empty if they can."""
        return ""

    @property
    def needs_each_upload(self) -> str:
        """Why the server needs each client's weights as they were sent, so that no robust mean can stand in for them;
        empty if it only averages them."""
        return ""

    @property
    def clients_use(self) -> UsedModel:
        """The model that a client uses, by which the method is judged. A method that has a public model and gives each
        client one of its own says so here."""
        return "own models" if type(self).public is Method.public else "public model"

    def validate(self, optimizer: Optimizer, batch_size: int, spec: TaskSpec | None) -> SettingErrors:
        """What of a run's settings this method cannot work with: the setting, `training.batch_size` or one of its own,
        and why. `spec` is None before the task is built."""
        return iter(())

    # ---- the server's half

    def networks(self, spec: TaskSpec, client: ClientId) -> Parts:
        """The parts that a client works with; a method may add its own to the task's."""
        return spec.model(client)

    @abstractmethod
    def init_server(self, server: ServerContext) -> State:
        """What the server knows before the first round."""

    @abstractmethod
    def message_for(self, state: State, client: ClientId) -> Message:
        """What this client receives. It may be new: one that the server has never heard of."""

    def message_spec(self, step: str, state: State, client: ClientId) -> Any:
        """A message with the names that those have that clients are sent for a step, which is named: what a site
        compares a message with before it reads it. Values and shapes do not matter. A method whose steps are sent
        different records says so here."""
        return self.message_for(state, client)

    @abstractmethod
    def upload_spec(self, state: State, server: ServerContext) -> Upload:
        """An upload with the names, shapes and dtypes that a good one has; values do not matter. What its numbers are,
        such as counts, its record says by roles (`protofed.api.roles`)."""

    @abstractmethod
    def aggregate(self, state: State, uploads: Uploads[Upload], server: ServerContext) -> State:
        """What the server knows after reading the uploads, all of them, once."""

    def group(self, state: State, client: ClientId, upload: Upload) -> Hashable:
        """With whose uploads this one is averaged: one group, unless the method keeps clusters of clients apart."""
        return 0

    def public(self, state: State) -> tuple[Params, Message] | None:
        """The model that anyone may use and the message it predicts with; None where every client has its own."""
        return None

    def global_models(
        self, state: State, memories: Mapping[ClientId, Memory], server: ServerContext
    ) -> Mapping[str, Reading]:
        """Models for everyone that can be made of the models that clients have, by reading, where no public one is
        meant: the names of metrics of `public`. A simulation judges them if it is configured to."""
        return {}

    def setup(self, state: State, clients: Clients) -> State:
        """What happens once, before the first round."""
        return state

    def round(self, state: State, clients: Clients) -> State:
        like = self.upload_spec(state, clients.server)
        uploads = clients.run(self.train, partial(self.message_for, state), like, partial(self.group, state))
        return self.aggregate(state, uploads, clients.server)

    def finish(self, state: State, clients: Clients) -> State:
        """What happens once, after the last round."""
        return state

    def judged(self, state: State, clients: Clients) -> State:
        """What is tested when a round is evaluated that is not the last: with what `finish` does to a public model, if
        it is tested after that. The run goes on from the state before."""
        return state

    # ---- the client's half

    def init_memory(self, client: ClientContext, message: Message) -> Memory:
        """What a client keeps before it first takes part; nothing, unless the method says otherwise."""
        return cast(Memory, Nothing())

    @abstractmethod
    def local_weights(self, message: Message, memory: Memory) -> Params:
        """The weights that this client would use now."""

    @abstractmethod
    async def train(self, client: ClientContext, message: Message, memory: Memory) -> Reply[Upload, Memory]:
        """One round at one client."""

    async def train_privately(self, client: PrivateClient, message: Message, memory: Memory) -> Reply[Upload, Memory]:
        """One round at one client under record-level differential privacy, whose examples cannot be reached."""
        raise NotPrivate(f"{type(self).__name__} has no private step")

    def trained_weights(self, upload: Upload, memory: Memory) -> Params:
        """The weights that a client has just trained, from what it sent and what it kept: those it would use if the
        server sent its upload back. A method whose uploads cannot be read as messages says here how to read them."""
        return self.local_weights(cast(Message, upload), memory)

    def predict(self, model: Model, x: Tensor, message: Message, memory: Memory | None) -> Tensor:
        """Scores of the classes, (B, C); memory is None for the public model."""
        return model.logits(x)

    def probabilities(self, scores: Tensor, message: Message) -> Tensor:
        """The scores that `predict` gives as probabilities, (B, C). Of the nearest prototype, they only say how much
        nearer it is."""
        return scores.softmax(-1)

    def outcomes(self, model: Model, batch: Batch, message: Message, memory: Memory | None) -> Outcomes:
        """What the method says of each example."""
        return outcomes_of(self.predict(model, batch.x, message, memory))

    async def evaluate(self, client: ClientContext, params: Params, message: Message, memory: Memory) -> Evaluation:
        """How a model does on the client's test sets, computed where the data are."""
        tests, known = client.tests, (message, memory)
        pooled = own = None
        if tests.pooled is not None:
            pooled = await client.map(self.outcomes, params, known, data=tests.pooled, to_cpu=True)
        if tests.own is not None:
            own = await client.map(self.outcomes, params, known, data=tests.own, to_cpu=True)
        return evaluation_of(pooled, own, tests, client.num_classes)

    async def evaluate_own(self, client: ClientContext, message: Message, memory: Memory) -> Reply[Evaluation, Memory]:
        """A step: how the model does that this client would use now, fine-tuned on its data if that is configured."""
        params = self.local_weights(message, memory)
        if client.fine_tune:
            objective, known = Objective(self.prediction_loss), (message, memory)
            params = await client.fit(objective, params=params, context=known, epochs=client.fine_tune)
        return Reply(await self.evaluate(client, params, message, memory), memory)

    def prediction_loss(self, model: Model, batch: Batch, message: Message, memory: Memory) -> Tensor:
        """The cross-entropy of the scores that the method predicts with: what fine-tuning before a test descends."""
        return batch.cross_entropy(self.predict(model, batch.x, message, memory))

    # ---- what figures show of the method; nothing of it takes part in training

    def shown_features(self, model: Model, x: Tensor) -> Tensor:
        """The features whose distribution a figure shows, (B, D): those that prototypes are means of."""
        return model.features(x)

    def prototype_sets(self, state: State) -> Mapping[str, Points]:
        """The prototypes that the server has, by kind, in the space of `shown_features`."""
        return {}

    def relations(self, state: State, observed: Observed) -> Mapping[str, Relation]:
        """Who learns from whom, by title."""
        return {}

    def public_variants(self, state: State) -> Mapping[str, tuple[Params, Message]]:
        """The public model before and after something that the server does to it, such as a calibration."""
        return {}

    def starting_weights(self, message: Message, memory: Memory) -> Params:
        """The weights that the client's next training would start from."""
        return self.local_weights(message, memory)


def validate(
    method: Method[Any, Any, Any, Any],
    optimizer: Optimizer,
    batch_size: int,
    spec: TaskSpec | None,
    where: str = "method",
) -> SettingErrors:
    """What a method and those that it goes around cannot work with; each setting by its whole name."""
    for setting, why in method.validate(optimizer, batch_size, spec):
        yield setting if setting.startswith("training.") else f"{where}.{setting}", why
    base = getattr(method, "base", None)
    if isinstance(base, Method):
        yield from validate(base, optimizer, batch_size, spec, f"{where}.base")


def weighting_of(method: Method[Any, Any, Any, Any], of_training: Weighting) -> Weighting | None:
    """How clients count in the method's mean, or in that of its base; None if it averages nothing."""
    own: MethodWeighting | None = getattr(method, "weighting", None)
    base = getattr(method, "base", None)
    if own is None:
        return weighting_of(base, of_training) if isinstance(base, Method) else None
    return of_training if own == "training" else own


def with_weighting(method: M, of_training: Weighting) -> M:
    """The method, and its base, with the weighting of the training where they leave it to that. By examples is what
    they do without being told."""
    if of_training == "examples":
        return method
    base = getattr(method, "base", None)
    changes: dict[str, Any] = {"base": with_weighting(base, of_training)} if isinstance(base, Method) else {}
    if getattr(method, "weighting", None) == "training":
        changes["weighting"] = of_training
    return replace(cast(Any, method), **changes) if changes else method
