"""How a federation trains, whatever the method."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Interval

from protofed.api.method import Weighting
from protofed.engine.norm_statistics import NormStatistics
from protofed.engine.optimizer_state import OptimizerState
from protofed.optim.optimizers import Optimizer, Sgd
from protofed.optim.schedules import ConstantRate, Schedule


@dataclass(frozen=True)
class Training:
    """The settings of `[training]`."""

    rounds: Annotated[int, Ge(1)] = 20
    """How often clients and server exchange what they learnt."""
    epochs: Annotated[int, Ge(1)] = 5
    """Passes of a client over its data in one round."""
    batch_size: Annotated[int, Ge(1)] = 64
    """Examples in one step of training."""
    fraction: Annotated[float, Interval(gt=0, le=1)] = 1.0
    """Share of the clients that take part in a round."""
    full_last_round: bool = False
    """Whether all clients take part in the last round, whatever `fraction` says, as in FedRep's paper."""
    slow_share: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """Share of the clients that are slow, drawn once. In every round a slow client makes 1 to `epochs` passes instead
    of `epochs`; how many is drawn anew, each number equally likely, as in FedProx's paper."""
    held_out_clients: Annotated[int, Ge(0)] = 0
    """Clients, drawn once, that never train and that the server knows nothing of. They are tested as new clients, with
    what the method gives somebody whom it has never seen (the metric `new`)."""
    minimum_replies: Annotated[int, Ge(1)] = 1
    """A round with fewer good replies is abandoned."""
    seed: Annotated[int, Ge(0)] = 0
    """The root of every draw."""
    optimizer: Optimizer = field(default_factory=lambda: Sgd(lr=0.01, momentum=0.9, weight_decay=1e-5))
    """What clients train with."""
    optimizer_state: OptimizerState = "fresh"
    """Whether every training begins with a new state of the optimiser, or a client's main training of a round goes on
    from the momentum or the moments that its last one left. The main training is the first of the round that is with
    the configured optimiser, and not with one of the method's own; all others begin afresh."""
    schedule: Schedule = ConstantRate()  # noqa: RUF009 (it is frozen, so it can be shared)
    """How the learning rate of clients changes over the rounds. It holds where a client trains with the configured
    optimiser in a round. Training before the first round, after the last one or before a test, at the server, or with
    an optimiser that the method brings has its rate as it is."""
    weighting: Weighting = "examples"
    """How clients count in the mean of their weights, in every method whose own `weighting` does not differ: by their
    numbers of examples, or equally."""
    norm_statistics: NormStatistics = "averaged"
    """What becomes of the running statistics of layers of normalisation: they are sent and averaged like weights; or
    every client keeps its own, trains from them and is tested with them; or they are dropped, so that every training
    begins with the initial ones and models are tested with those."""
    over_selection: Annotated[float, Interval(ge=1, le=10)] = 1.0
    """So many times as many clients are asked as `fraction` says, for those that will not reply; all that do count."""
    deadline: Annotated[float, Ge(0)] = 0.0
    """Seconds that a round waits for its clients; 0: as long as it takes."""
    attempts: Annotated[int, Ge(1)] = 3
    """How often a round that is abandoned is tried, with clients drawn anew, before the run ends."""
    max_norm: Annotated[float, Gt(0)] = 1e12
    """Uploads with a larger norm are refused."""
    quarantine: Annotated[int, Ge(0)] = 3
    """A client with so many refused uploads in a row is not asked any more; 0: never."""
    on_divergence: Literal["stop", "skip", "retry_half_lr"] = "stop"
    """What happens when a client's loss or weights become infinite or not a number: the run ends and says where it
    began, the client is left out of the round, or it repeats the round with half the learning rate."""
