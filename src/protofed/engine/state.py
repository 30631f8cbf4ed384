"""What a run is, between two rounds."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from protofed.api.task import ClientId
from protofed.runtimes.base import Failure
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


class Shelved(Mapping[ClientId, Tree]):
    """Memories that need not all be at hand, but can be had."""

    @abstractmethod
    def __or__(self, new: Mapping[ClientId, Tree]) -> "Shelved":
        """With new ones in the place of old ones."""


@dataclass(frozen=True)
class State:
    """Everything that a run is, between two rounds."""

    round: int
    """The number of rounds done."""
    server: Tree
    memories: dict[ClientId, Tree] | Shelved
    """What each client that has taken part keeps."""
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
    abandoned: tuple[str, ...] = ()
    """Why the last round was begun again, each time."""
