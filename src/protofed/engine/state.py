"""What a run is, between two rounds."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from protofed.api.evaluation import Evaluation
from protofed.api.task import ClientId
from protofed.runtimes.client_store import Receipt
from protofed.runtimes.jobs import Failure
from protofed.tree import Tree


@dataclass(frozen=True)
class Traffic:
    """What moved between the server and one client: bytes of tensors, without the names that a wire format adds."""

    down: int = 0
    """Bytes of the messages that the client was sent."""
    up: int = 0
    """Bytes of the uploads that came back and were accepted."""

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.down + other.down, self.up + other.up)


@dataclass(frozen=True)
class State:
    """Everything that a run is, between two rounds."""

    round: int
    """The number of rounds done."""
    server: Tree
    receipts: Mapping[ClientId, Receipt]
    """Which version of its state each client that has taken part goes on from. The states are the clients'."""
    failures: tuple[Failure, ...] = ()
    """Of the last round, or of the setup if there was none yet."""
    traffic: Mapping[ClientId, Traffic] = field(default_factory=dict)
    """Of the last round, or of the setup if there was none yet."""
    client_seconds: float = 0.0
    """How long the server waited for clients in the last round."""
    strikes: Mapping[ClientId, int] = field(default_factory=dict)
    """How many uploads in a row were refused, of clients for whom it is not 0."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """How many replies did not count in the last round, by reason; a message may be refused and its client not."""
    repeats: Mapping[ClientId, int] = field(default_factory=dict)
    """Of clients that diverged in the last round: how often their learning rate was halved."""
    evaluations: Mapping[ClientId, Evaluation] = field(default_factory=dict)
    """How the models did that clients trained in the last round, if that was asked for."""
    loss: float | None = None
    """The training loss of the last round: the mean, over the clients that counted and weighted by their examples, of
    the mean loss of their main training. None if nobody trained."""
    abandoned: tuple[str, ...] = ()
    """Why the last round was begun again, each time."""

    def following(self, before: "State") -> "State":
        """This state, of the end of a run, with what happened in the last round counted in."""
        return replace(
            self,
            failures=(*before.failures, *self.failures),
            traffic={
                c: before.traffic.get(c, Traffic()) + self.traffic.get(c, Traffic())
                for c in {**before.traffic, **self.traffic}
            },
            client_seconds=before.client_seconds + self.client_seconds,
            refused=dict(Counter(before.refused) + Counter(self.refused)),
            repeats={**before.repeats, **self.repeats},
            evaluations=before.evaluations,
            loss=before.loss,
            abandoned=(*before.abandoned, *self.abandoned),
        )
