"""What a method is, and what it is given. Read this first.

A method is one class with both halves of its algorithm. Everything that moves or persists is a record (a tree of
tensors) that is passed in and out:

    server    what the server knows between rounds
    message   what one client receives
    upload    what one client sends back
    memory    what one client keeps; it never leaves the client

Nothing lives on `self` but hyper-parameters. A client's step is a coroutine: `await local.fit(...)` hands a request to
the runtime, which may answer it for one client at once or for a whole cohort together.
"""

import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar, Generic, Literal, Protocol, TypeVar, cast

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from protofed.data import Batch, Data, Transform
from protofed.errors import BadInput
from protofed.networks import Model, Networks, Parts, Patterns, matching, without
from protofed.optim import Optimizer
from protofed.seeds import derive_seed, generator
from protofed.tree import Nothing, Params, Tree, record, select

log = logging.getLogger(__name__)

ClientId = str

# The ranges of hyper-parameters.
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]

Tag = Literal["global", "personal", "prototype", "heterogeneous", "server-side", "wrapper", "reconstruction"]
"""Kinds of methods: one model for all; one for each client; prototypes travel; clients may have different networks; the
server trains or corrects; it goes around another method; and: the paper leaves so much open that this is a guess."""

Server = TypeVar("Server")
Message = TypeVar("Message")
Memory = TypeVar("Memory")
Upload = TypeVar("Upload")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Task:
    """Who holds which data, what it is tested on, and which networks learn it."""

    clients: Mapping[ClientId, Data]
    """Training data of each client; clients are counted in the order of their names. Those without examples are left
    out, with a warning."""
    tests: Mapping[str, Data]
    """Test set of each domain."""
    num_classes: int
    model: Callable[[ClientId], Parts]
    """Builds a client's parts; `features` and `classifier` are two of them."""
    domain_of: Mapping[ClientId, str] = field(default_factory=dict)
    """The domain that a client's own data come from, which must be a test set's name; may leave clients out."""
    local_tests: Mapping[ClientId, Data] = field(default_factory=dict)
    """Test sets of clients' own. For a client without one it is drawn from `tests` in the client's label proportions.
    """
    transform: Transform = field(default_factory=Transform)
    public: Data | None = None
    """Examples that everyone may see, for methods that need such; their labels are not used."""
    name: str = "own"

    def __post_init__(self) -> None:
        self._leave_out_empty()
        if not self.clients:
            raise BadInput(f"task {self.name}: there are no clients with examples")
        for client in self.clients:
            if not isinstance(client, str) or not client or "/" in client:
                raise BadInput(f"task {self.name}: a client cannot be called {client!r}")
        public = {} if self.public is None else {"public": self.public}
        kinds = {"client": self.clients, "test set": self.tests, "test set of": self.local_tests, "set": public}
        for kind, sets in kinds.items():
            for name, data in sets.items():
                where = f"task {self.name}: {kind} {name!r}"
                _check(data, where, self.num_classes)
                self.transform.check(data.x, where)
        for what, named in (("domain_of", self.domain_of), ("local_tests", self.local_tests)):
            for client in named.keys() - self.clients.keys():
                raise BadInput(f"task {self.name}: {what} names {client!r}, who is not a client")
        for client, domain in self.domain_of.items():
            if domain not in self.tests:
                raise BadInput(f"task {self.name}: client {client!r} is of domain {domain!r}, which has no test set")

    def _leave_out_empty(self) -> None:
        empty = sorted(str(client) for client, data in self.clients.items() if not len(data))
        if not empty:
            return
        log.warning("EMPTY_CLIENT: task %s: no examples, left out: %s", self.name, ", ".join(empty))
        for name in ("clients", "domain_of", "local_tests"):
            left = {client: own for client, own in getattr(self, name).items() if client not in empty}
            object.__setattr__(self, name, left)

    @property
    def example(self) -> Tensor:
        """One input, as networks see it, where new tensors are made."""
        data = next(iter(self.clients.values()))
        return self.transform.clean(data.inputs(data.index[:1]).to(torch.get_default_device()))


def _check(data: Data, where: str, num_classes: int) -> None:
    if not len(data):
        raise BadInput(f"{where} has no examples: leave it out, or give it some")
    if len(data.x) != len(data.y):
        raise BadInput(f"{where} has {len(data.x)} inputs and {len(data.y)} labels")
    if data.x.dtype not in (torch.uint8, torch.float32):
        raise BadInput(f"{where} has inputs of type {data.x.dtype}: make them torch.float32, or torch.uint8 for images")
    if data.y.dtype != torch.int64:
        raise BadInput(f"{where} has labels of type {data.y.dtype}: make them torch.int64")
    if data.index.min() < 0 or data.index.max() >= len(data.y):
        raise BadInput(f"{where} has rows outside 0..{len(data.y) - 1}")
    labels = data.labels
    if labels.min() < 0 or labels.max() >= num_classes:
        raise BadInput(f"{where} has labels {labels.min()} to {labels.max()}, outside 0..{num_classes - 1}")


@dataclass(frozen=True)
class Objective:
    """What a step descends: `loss(model, batch, *context)`, and which parameters it may change."""

    loss: Callable[..., Tensor]
    trains: Patterns = ("*",)
    freezes: Patterns = ()
    """Parameters that it leaves alone, whatever `trains` says."""


@dataclass(frozen=True)
class Request(Generic[T_co]):
    """Work that a step asks of the runtime; awaiting it gives the answer."""

    networks: Networks
    params: Params
    context: tuple[Tree, ...]
    data: Data
    transform: Transform
    seed: int
    """Of everything that the work draws."""

    def __await__(self) -> Generator["Request[Any]", Any, T_co]:
        answer: T_co = yield self
        return answer


@dataclass(frozen=True)
class Fit(Request[Params]):
    """Train: each batch takes one optimiser step for each objective in turn."""

    objectives: tuple[Objective, ...]
    optimizer: Optimizer
    epochs: int
    batch_size: int

    def trained(self) -> list[Params]:
        """The weights that each objective changes, of those that the request begins with."""
        self.networks.check(self.params)
        trainable = select(self.params, self.networks.trainable)
        chosen = [without(matching(trainable, o.trains), o.freezes) for o in self.objectives]
        for objective, weights in zip(self.objectives, chosen, strict=True):
            if not weights:
                raise ValueError(f"no parameter matches {objective.trains} without {objective.freezes}")
        return chosen


@dataclass(frozen=True)
class Total(Request[T_co]):
    """Σ statistic(model, batch, *context) over all examples, in evaluation mode, unvaried."""

    statistic: Callable[..., T_co]


@dataclass(frozen=True)
class Map(Request[T_co]):
    """function(model, batch, *context) for every example in order, in evaluation mode, unvaried."""

    function: Callable[..., T_co]


@dataclass(frozen=True)
class _Sum:
    """A loss plus a term that reads its own context, the last of the contexts."""

    loss: Callable[..., Tensor]
    term: Callable[..., Tensor]

    def __call__(self, model: Model, batch: Batch, *context: Tree) -> Tensor:
        return self.loss(model, batch, *context[:-1]) + self.term(model, batch, *context[-1])


@dataclass(frozen=True)
class Local:
    """What a client's step works with: its own data and networks, and the runtime's help."""

    client: ClientId
    round: int
    num_rounds: int
    num_classes: int
    networks: Networks
    data: Data
    transform: Transform
    optimizer: Optimizer
    epochs: int
    batch_size: int
    seed: int
    """The root of all draws of the run."""
    step_seed: int
    """The root of the draws of this step."""
    public: Data | None = None
    """Examples that everyone may see; their labels are not used."""
    terms: tuple[tuple[Callable[..., Tensor], tuple[Tree, ...]], ...] = ()
    _requests: Iterator[int] = field(default_factory=itertools.count)

    @property
    def num_examples(self) -> Tensor:
        return torch.tensor(len(self.data))

    def initial_params(self) -> Params:
        """The weights that every client with these networks starts from."""
        return self.networks.init(derive_seed(self.seed, "weights"))

    async def fit(
        self,
        *objectives: Objective,
        params: Params,
        context: tuple[Tree, ...] = (),
        epochs: int | None = None,
        optimizer: Optimizer | None = None,
        data: Data | None = None,
    ) -> Params:
        """The weights after training from `params`; anything not named here is as configured."""
        for term, own_context in self.terms:
            objectives = tuple(replace(o, loss=_Sum(o.loss, term)) for o in objectives)
            context = (*context, own_context)
        return await Fit(
            networks=self.networks,
            params=params,
            context=context,
            data=self.data if data is None else data,
            transform=self.transform,
            objectives=objectives,
            optimizer=(optimizer or self.optimizer).for_round(self.round),
            epochs=self.epochs if epochs is None else epochs,
            batch_size=self.batch_size,
            seed=self._next_seed(),
        )

    async def total(
        self,
        statistic: Callable[..., T],
        params: Params,
        context: tuple[Tree, ...] = (),
        data: Data | None = None,
    ) -> T:
        """Σ statistic(model, batch, *context) over the client's examples."""
        data = self.data if data is None else data
        return await Total(self.networks, params, context, data, self.transform, self._next_seed(), statistic)

    async def map(
        self,
        function: Callable[..., T],
        params: Params,
        context: tuple[Tree, ...] = (),
        data: Data | None = None,
    ) -> T:
        """function(model, batch, *context) for each of the client's examples, in order."""
        data = self.data if data is None else data
        return await Map(self.networks, params, context, data, self.transform, self._next_seed(), function)

    def _next_seed(self) -> int:
        return derive_seed(self.step_seed, "request", next(self._requests))

    def adding(self, term: Callable[..., Tensor], *context: Tree) -> "Local":
        """The same, but every fit also descends `term(model, batch, *context)`: how one method wraps another."""
        return replace(self, terms=(*self.terms, (term, context)))


@record
class Reply(Generic[Upload, Memory]):
    """What a step ends with: what is sent, and what stays."""

    upload: Upload
    memory: Memory


Step = Callable[[Local, Message, Memory], Coroutine[Any, Any, Reply[Upload, Memory]]]
Objections = Iterator[tuple[str, str]]
"""Settings, and why they cannot be."""
Uploads = Iterable[tuple[ClientId, Upload]]
"""Accepted uploads in canonical order, to be read once: the next client may only train when the last is consumed."""


@dataclass(frozen=True)
class Central:
    """The server's own means."""

    task: Task
    networks: Networks
    optimizer: Optimizer
    round: int
    num_rounds: int
    seed: int
    phase_seed: int
    """The root of the server's draws in this setup, round or finish."""
    answer: Callable[[Request[Any]], Any]
    """The runtime: does the work that a request names."""
    _fits: Iterator[int] = field(default_factory=itertools.count)

    @cached_property
    def generator(self) -> torch.Generator:
        """The server's randomness."""
        return generator(self.phase_seed, "server")

    @property
    def feature_dim(self) -> int:
        """D, the size of a feature vector."""
        return self.networks.feature_dim(self.task.example)

    def initial_params(self) -> Params:
        """The weights that every client with these networks starts from."""
        return self.networks.init(derive_seed(self.seed, "weights"))

    def fit(
        self,
        *objectives: Objective,
        params: Params,
        data: Data,
        context: tuple[Tree, ...] = (),
        epochs: int = 1,
        batch_size: int = 64,
        optimizer: Optimizer | None = None,
    ) -> Params:
        """The weights after training on data that the server has, such as prototypes."""
        request = Fit(
            networks=self.networks,
            params=params,
            context=context,
            data=data,
            transform=Transform(),
            objectives=objectives,
            optimizer=(optimizer or self.optimizer).for_round(self.round),
            epochs=epochs,
            batch_size=batch_size,
            seed=derive_seed(self.phase_seed, "server fit", next(self._fits)),
        )
        fitted: Params = self.answer(request)
        return fitted


class Clients(Protocol):
    """The clients that take part in a round."""

    @property
    def ids(self) -> Sequence[ClientId]: ...

    @property
    def central(self) -> Central: ...

    def run(
        self, step: Step[Message, Memory, Upload], message_for: Callable[[ClientId], Message], like: Upload
    ) -> Iterator[tuple[ClientId, Upload]]:
        """Runs a step at every client; uploads that are not like `like` are refused."""


class Method(ABC, Generic[Server, Message, Memory, Upload]):
    """A federated method: subclass a family in `methods/families.py`, or this."""

    tags: ClassVar[tuple[Tag, ...]] = ()
    """What kind of method it is."""
    private: ClassVar[Patterns] = ()
    """Weights that never leave the client."""
    retrains_classifier: ClassVar[bool] = False
    """Of a wrapper: whether its server retrains the base's classifier on features."""

    def objections(self, optimizer: Optimizer, batch_size: int, task: Task | None) -> Objections:
        """What of a run's settings this method cannot work with: the setting, `training.batch_size` or one of its own,
        and why. The task is not known before it is built."""
        return iter(())

    # ---- the server's half

    def networks(self, task: Task, client: ClientId) -> Parts:
        """The parts that a client works with; a method may add its own to the task's."""
        return task.model(client)

    @abstractmethod
    def init_server(self, central: Central) -> Server:
        """What the server knows before the first round."""

    @abstractmethod
    def message_for(self, server: Server, client: ClientId) -> Message:
        """What this client receives."""

    @abstractmethod
    def upload_like(self, server: Server, central: Central) -> Upload:
        """An upload with the names, shapes and dtypes that a good one has. Leaves called `count` or `num_examples`
        must hold whole numbers ≥ 0, leaves called `label` classes; values here do not matter."""

    @abstractmethod
    def aggregate(self, server: Server, uploads: Uploads[Upload], central: Central) -> Server:
        """What the server knows after reading the uploads, all of them, once."""

    def public(self, server: Server) -> tuple[Params, Message] | None:
        """The model that anyone may use and the message it predicts with; None where every client has its own."""
        return None

    def setup(self, server: Server, clients: Clients) -> Server:
        """What happens once, before the first round."""
        return server

    def round(self, server: Server, clients: Clients) -> Server:
        like = self.upload_like(server, clients.central)
        uploads = clients.run(self.train, partial(self.message_for, server), like)
        return self.aggregate(server, uploads, clients.central)

    def finish(self, server: Server, clients: Clients) -> Server:
        """What happens once, after the last round."""
        return server

    # ---- the client's half

    def init_memory(self, local: Local, message: Message) -> Memory:
        """What a client keeps before it first takes part; nothing, unless the method says otherwise."""
        return cast(Memory, Nothing())

    @abstractmethod
    def local_weights(self, message: Message, memory: Memory) -> Params:
        """The weights that this client would use now."""

    @abstractmethod
    async def train(self, local: Local, message: Message, memory: Memory) -> Reply[Upload, Memory]:
        """One round at one client."""

    def trained_weights(self, upload: Upload, memory: Memory) -> Params:
        """The weights that a client has just trained, from what it sent and what it kept: those it would use if the
        server sent its upload back. A method whose uploads cannot be read as messages says here how to read them."""
        return self.local_weights(cast(Message, upload), memory)

    def predict(self, model: Model, x: Tensor, message: Message, memory: Memory | None) -> Tensor:
        """Scores of the classes, (B, C); memory is None for the public model."""
        return model.logits(x)

    def confusion(self, model: Model, batch: Batch, message: Message, memory: Memory | None, *parts: Tensor) -> Tensor:
        """How often class i was taken for class j, (1 + P, C, C): among all examples, and among those of each part (N,)
        of the store, which marks its own."""
        scores = self.predict(model, batch.x, message, memory)
        classes = torch.arange(scores.shape[-1], device=scores.device)
        taken = (scores.argmax(-1)[:, None] == classes).double()  # (B, C)
        weight = torch.stack([batch.weight, *(batch.weight * part[batch.index] for part in parts)])  # (1 + P, B)
        truth = (batch.y[:, None] == classes).double() * weight[..., None]  # (1 + P, B, C)
        return truth.mT @ taken


def objections(
    method: Method[Any, Any, Any, Any], optimizer: Optimizer, batch_size: int, task: Task | None, where: str = "method"
) -> Objections:
    """What a method and those that it goes around cannot work with; each setting by its whole name."""
    for setting, why in method.objections(optimizer, batch_size, task):
        yield setting if setting.startswith("training.") else f"{where}.{setting}", why
    base = getattr(method, "base", None)
    if isinstance(base, Method):
        yield from objections(base, optimizer, batch_size, task, f"{where}.base")
