"""What a federation learns: what everyone may know of it, and what only one client has."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol

import torch
from torch import Tensor

from protofed.data.batches import Data
from protofed.data.transforms import Transform
from protofed.errors import BadInput
from protofed.nn.networks import Parts

log = logging.getLogger(__name__)

ClientId = str


@dataclass(frozen=True)
class InputSpec:
    """What networks read: one input's shape and type. It holds no example."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def kind(self) -> Literal["image", "vector", "tokens"]:
        if not self.dtype.is_floating_point:
            return "tokens"
        return "image" if len(self.shape) == 3 else "vector"

    def blank(self, size: int = 1) -> Tensor:
        """Inputs of zeros, for asking a network how large its outputs are."""
        return torch.zeros((size, *self.shape), dtype=self.dtype)


class Preprocessing(Protocol):
    """How files become examples as a task stores them; `protofed.datasets.preprocessing` has those there are."""

    @property
    def kind(self) -> Literal["images", "table"]: ...


@dataclass(frozen=True)
class Enrolment:
    """What a client declared when it joined."""

    num_examples: int
    domain: str | None = None


@dataclass(frozen=True)
class TaskSpec:
    """What everyone may know of a task. It holds no example of any client."""

    name: str
    num_classes: int
    input: InputSpec
    transform: Transform
    model: Callable[[ClientId], Parts]
    """Builds a client's parts; `features` and `classifier` are two of them."""
    clients: Mapping[ClientId, Enrolment]
    public: Data | None = None
    """Examples that everyone may see; their labels are not used."""

    @property
    def num_examples(self) -> int:
        """The training examples of all clients together."""
        return sum(enrolment.num_examples for enrolment in self.clients.values())


@dataclass(frozen=True)
class Site:
    """What one client has, and nobody else."""

    train: Data
    test: Data | None = None
    """Examples of its own that it does not train on."""


@dataclass(frozen=True)
class Task:
    """A whole federation in one process: who holds which data, what it is tested on, and which networks learn it."""

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
    name: str = "custom"
    validation: Mapping[ClientId, Data] = field(default_factory=dict)
    """Examples of clients' own by which rounds are compared. They are neither trained on nor part of a test set."""
    held_out: tuple[ClientId, ...] = ()
    """Clients that never train and that the server knows nothing of. They are tested as new clients."""
    class_names: tuple[str, ...] = ()
    """The name of each class; none if the classes have no names."""
    preprocessing: Preprocessing | None = None
    """How a file becomes an example; None if only tensors can be given to a model of this task."""
    has_data: bool = True
    """False for the outline of a task whose data are elsewhere: its examples are blank, and nothing trains on it."""

    def __post_init__(self) -> None:
        self._leave_out_empty()
        if not self.clients:
            raise BadInput(f"task {self.name}: there are no clients with examples")
        for client in self.clients:
            if not isinstance(client, str) or not client or "/" in client:
                raise BadInput(f"task {self.name}: a client cannot be called {client!r}")
        public = {} if self.public is None else {"public": self.public}
        kinds = {
            "client": self.clients,
            "test set": self.tests,
            "test set of": self.local_tests,
            "validation set of": self.validation,
            "set": public,
        }
        for kind, sets in kinds.items():
            for name, data in sets.items():
                where = f"task {self.name}: {kind} {name!r}"
                _check(data, where, self.num_classes)
                self.transform.check(data.x, where)
        for what, named in (
            ("domain_of", self.domain_of),
            ("local_tests", self.local_tests),
            ("validation", self.validation),
            ("held_out", self.held_out),
        ):
            for client in {*named} - self.clients.keys():
                raise BadInput(f"task {self.name}: {what} names {client!r}, who is not a client")
        if self.class_names and len(self.class_names) != self.num_classes:
            raise BadInput(f"task {self.name}: {len(self.class_names)} names for {self.num_classes} classes")
        for client, domain in self.domain_of.items():
            if domain not in self.tests:
                raise BadInput(f"task {self.name}: client {client!r} is of domain {domain!r}, which has no test set")

    def _leave_out_empty(self) -> None:
        empty = sorted(str(client) for client, data in self.clients.items() if not len(data))
        if not empty:
            return
        log.warning("EMPTY_CLIENT: task %s: no examples, left out: %s", self.name, ", ".join(empty))
        for name in ("clients", "domain_of", "local_tests", "validation"):
            kept = {client: value for client, value in getattr(self, name).items() if client not in empty}
            object.__setattr__(self, name, kept)
        object.__setattr__(self, "held_out", tuple(client for client in self.held_out if client not in empty))

    @cached_property
    def spec(self) -> TaskSpec:
        """What the server and its method are given of this task."""
        some = next(iter(self.clients.values())).x
        dtype = torch.float32 if some.dtype == torch.uint8 else some.dtype
        return TaskSpec(
            name=self.name,
            num_classes=self.num_classes,
            input=InputSpec(tuple(some.shape[1:]), dtype),
            transform=self.transform,
            model=self.model,
            clients={c: Enrolment(len(data), self.domain_of.get(c)) for c, data in self.clients.items()},
            public=self.public,
        )

    @property
    def has_tests(self) -> bool:
        return bool(self.tests or self.local_tests)

    @property
    def tests_are_at_home(self) -> bool:
        """Whether there are test sets, and only clients have them."""
        return self.has_tests and not self.tests

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, or their numbers."""
        return self.class_names or tuple(map(str, range(self.num_classes)))

    def refuse_without_data(self) -> None:
        if not self.has_data:  # guard: blank-examples-train-nothing
            raise BadInput(
                "this run was loaded without its data and can only predict; load it with load(..., data=True)"
            )

    def site(self, client: ClientId) -> Site:
        """What this client has."""
        return Site(self.clients[client], self.local_tests.get(client))


def _check(data: Data, where: str, num_classes: int) -> None:
    if not len(data):
        raise BadInput(f"{where} has no examples: leave it out, or give it some")
    if len(data.x) != len(data.y):
        raise BadInput(f"{where} has {len(data.x)} inputs and {len(data.y)} labels")
    if data.x.dtype not in (torch.uint8, torch.float32, torch.int32, torch.int64):
        raise BadInput(
            f"{where} has inputs of type {data.x.dtype}: make them torch.float32, torch.uint8 for images, "
            "or torch.int64 for tokens"
        )
    if data.y.dtype != torch.int64:
        raise BadInput(f"{where} has labels of type {data.y.dtype}: make them torch.int64")
    if data.index.min() < 0 or data.index.max() >= len(data.y):
        raise BadInput(f"{where} has rows outside 0..{len(data.y) - 1}")
    labels = data.labels
    if labels.min() < 0 or labels.max() >= num_classes:
        raise BadInput(f"{where} has labels {labels.min()} to {labels.max()}, outside 0..{num_classes - 1}")
