"""How many bytes a round moves between the server and one client.

Counted are the tensors of the records at their own precision, not the names and shapes that a wire format adds. Where
papers count floats, our records also hold: in `num_examples` one whole number of 8 bytes, in `count` one float for each
class of a set of prototypes, and in `label` one whole number of 8 bytes for each row of a list of prototypes.
"""

from dataclasses import dataclass

from protofed import wire
from protofed.method import ClientId
from protofed.runtimes.federation import Federation, State
from protofed.tree import Tree


@dataclass(frozen=True)
class Traffic:
    down: int
    """Bytes that the client receives."""
    up: int
    """Bytes that it sends."""


def num_bytes(record: Tree) -> int:
    """The bytes of a record's tensors."""
    return sum(leaf.numel() * leaf.element_size() for leaf in wire.to_arrays(record).values())


def traffic(federation: Federation, state: State, client: ClientId) -> Traffic:
    """What the next round moves to and from this client. A method that runs more than one step in a round, or whose
    `setup` or `finish` asks the clients, moves more."""
    method = federation.method
    like = method.upload_like(state.server, federation.central(state.round, "round"))
    return Traffic(num_bytes(method.message_for(state.server, client)), num_bytes(like))
