"""A client's step under differential privacy: it works with what may be known, and reaches no example.

`Method.train_privately` is given a `PrivateClient` in the place of a `ClientContext`. Weights come from `fit`, whose
gradients are clipped record by record and noised; class sums are clipped and noised too. Whatever is made of released
numbers alone may be sent and kept: that is what `post` is for. All other tensors are refused.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from torch import Tensor

from protofed.api.requests import Mechanism, Objective
from protofed.api.task import ClientId
from protofed.data.batches import Batch
from protofed.nn.networks import Model, Networks
from protofed.optim.optimizers import Optimizer
from protofed.tree import Params, Tree, record

T = TypeVar("T")

ChargeKind = Literal["gradients", "class sums"]
KINDS: tuple[ChargeKind, ...] = ("gradients", "class sums")


class NotPrivate(TypeError):
    """A step that is not made for differential privacy."""


class Unreleased(ValueError):
    """A tensor that was not made of released ones alone."""


class BudgetSpent(ArithmeticError):
    """A release would cost more than is left of a client's budget."""


@dataclass(frozen=True)
class Charge:
    """What one step of a client costs for releases of one kind."""

    kind: ChargeKind
    releases: int
    cost: float
    """Σ 1/m² over these releases."""


@dataclass(frozen=True)
class Terms:
    """What clients' releases look like in a run."""

    clip_features: float
    clip_gradients: float
    gradient_multiplier: float
    """m of each pass over the data."""
    class_sum_multiplier: float
    """m of each release of class sums; 0 if there are none."""
    release_rounds: tuple[int, ...]
    noise: Literal["simulated", "secret"]
    left: float = 0.0
    """What is left of a client's μ² when a step begins."""


@record
class NoisySums:
    """Σ of the clipped features of each class, and how many there are. There is noise in every number, also where a
    class is absent."""

    total: Tensor  # (C, D)
    mass: Tensor  # (C,), may be negative


Function = Callable[[Model, Batch], Tensor]


@dataclass(frozen=True)
class Features:
    """The features of examples and their classes, as a request asks for them."""

    function: Function | None
    """None for the features of the network."""

    def __call__(self, model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
        z = model.features(batch.x) if self.function is None else self.function(model, batch)
        return z, batch.y


class RecordSums(Protocol):
    """The sums over its records that a client makes for a secure sum with noise: each record is clipped, the sums are
    exact, and nothing else may be added."""

    @property
    def releases_class_sums(self) -> bool:
        """Whether class sums are released in this round."""

    def gradients(self, *known: Tree) -> Mechanism:
        """What clips the gradients of records. They are taken at trees that must have been sent."""

    def noted(self, gradients: Params) -> Params:
        """The sum of gradients, which may be added as it is."""

    def class_sums(
        self, z: Tensor, y: Tensor, num_classes: int, longest: float | None, *known: Tree
    ) -> tuple[Tensor, Tensor]:
        """Σ of the clipped features of each class, and how many there are, which may be added as they are."""


class PrivateClient(ABC):
    """What a private step works with. There are no data here, no statistics of them, and no test sets."""

    id: ClientId
    round: int
    num_rounds: int
    num_classes: int
    num_steps: int
    """How many steps its training of a round takes."""
    optimizer: Optimizer
    networks: Networks

    @property
    @abstractmethod
    def num_examples(self) -> Tensor:
        """How many examples the client enrolled with: everyone knows it."""

    @property
    @abstractmethod
    def releases_class_sums(self) -> bool:
        """Whether this is one of the rounds in which class sums are released."""

    @abstractmethod
    def initial_params(self) -> Params:
        """The weights that every client with these networks starts from."""

    @abstractmethod
    async def fit(
        self,
        *objectives: Objective,
        params: Params,
        context: tuple[Tree, ...] = (),
        epochs: int | None = None,
        penalty: Callable[..., Tensor] | None = None,
    ) -> Params:
        """The weights after training from `params` with noise. A loss is that of a batch, and must be the mean over the
        losses of its records. `penalty(model, *context)` is added to every loss after clipping: it sees no record."""

    @abstractmethod
    async def class_sums(
        self, params: Params, function: Function | None = None, longest: float | None = None
    ) -> NoisySums:
        """The sums of each class's features at these weights, in evaluation mode. `function` gives other features
        (B, D), `longest` is their largest length if it is below `privacy.clip_features`."""

    @abstractmethod
    async def prototypes(self, params: Params, function: Function | None = None, longest: float | None = None) -> Any:
        """Class means and counts, made of class sums; none in rounds without a release. A class is left out where noise
        would be longer than a quarter of the longest feature."""

    @abstractmethod
    def post(self, function: Callable[..., T], *trees: Tree) -> T:
        """What a function makes of trees that are released; it is released too."""
