"""Work that a step asks of the runtime. Awaiting a request gives its answer."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from protofed.data.batches import Data
from protofed.data.transforms import Transform
from protofed.nn.networks import Networks, Patterns, matching, without
from protofed.optim.optimizers import Optimizer
from protofed.tree import Params, Tree, select

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Objective:
    """What a step descends: `loss(model, batch, *context)`, and which parameters it may change."""

    loss: Callable[..., Tensor]
    trains: Patterns = ("*",)
    freezes: Patterns = ()
    """Parameters that it leaves alone, whatever `trains` says."""


@dataclass(frozen=True)
class Request(Generic[T_co]):
    """Work for the runtime, which may do it for one client or for many together."""

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
class Fitted:
    """The answer to a `Fit`."""

    params: Params
    folded: Tree
    """The sums of its `fold`; empty without one."""
    states: tuple[Tree, ...]
    """What the optimiser may go on from, for each objective; empty unless the fit began with states."""
    loss: float | None
    """The mean over batches of what the objectives' losses were there, each at the weights that its step began from;
    their sum, if there are several. None if there was no batch."""


@dataclass(frozen=True)
class Fit(Request[Fitted]):
    """Train: each batch takes one optimiser step for each objective in turn."""

    objectives: tuple[Objective, ...]
    optimizer: Optimizer
    epochs: int
    batch_size: int
    rate_changes: bool = False
    """Whether requests of other rounds differ from this one in the learning rate."""
    fold: Callable[..., Tree] | None = None
    """A statistic `fold(model, batch, *context)`, summed over the batches of the last epoch. It is given the model of
    the first objective's loss, before that batch's step, and no gradient flows through it."""
    states: tuple[Tree, ...] | None = None
    """What the optimiser goes on from, for each objective; None: it begins afresh, and its state is not wanted."""

    def trained(self) -> list[Params]:
        """The weights that each objective changes, of those that the request begins with."""
        self.networks.check(self.params)
        trainable = select(self.params, self.networks.trainable)
        chosen = [without(matching(trainable, o.trains), o.freezes) for o in self.objectives]
        for objective, weights in zip(self.objectives, chosen, strict=True):
            if not weights:
                raise ValueError(f"no parameter matches {objective.trains} without {objective.freezes}")
        return chosen


class Mechanism(Protocol):
    """Makes a sum over records a release under differential privacy."""

    def clipped(self, rows: Tensor) -> Tensor:
        """What each record adds to the sum, (n, P), at most so long as the noise is made for."""

    def released(self, total: Tensor) -> Tensor:
        """The sum (P,) of clipped rows, with noise."""


@dataclass(frozen=True)
class PrivateFit(Fit):
    """Train on gradients that are clipped record by record, summed, noised, and divided by the size of a full batch.
    Losses do not leave: the answer has none."""

    mechanisms: tuple[Mechanism, ...] = ()
    """For the gradients of each objective."""
    penalty: Callable[..., Tensor] | None = None
    """`penalty(model, *context)`, which sees no record: its gradient is added as it is."""
    is_sum: bool = False
    """Whether nothing is trained: the answer is the sum of the gradients at `params`, in their place, in float64."""


@dataclass(frozen=True)
class Total(Request[T_co]):
    """Σ statistic(model, batch, *context) over all examples, in evaluation mode, without augmentation."""

    statistic: Callable[..., T_co]


@dataclass(frozen=True)
class Map(Request[T_co]):
    """function(model, batch, *context) for every example in order, in evaluation mode, without augmentation."""

    function: Callable[..., T_co]
    to_cpu: bool = False
    """Whether the answer is wanted on the CPU. A GPU's answers for many clients then come there in one transfer."""
