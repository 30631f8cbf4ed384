"""Where clients' states are kept, by receipt.

A step leaves a new version of its client's state, and the server is given a receipt for it, never the state. The
version is the client's state only if the round counts: then the receipt is in the server's state, and the next order
names it. A version whose receipt nobody holds any more is forgotten. So a round that is refused, late or abandoned
costs nothing.
"""

import itertools
from typing import Protocol
from weakref import WeakKeyDictionary

from protofed.api.task import ClientId
from protofed.errors import RunFailed
from protofed.tree import Tree


class Receipt(str):
    """Names one version of one client's state."""


class StateLost(LookupError):
    """A client no longer has the version of its state that a receipt names."""


class ClientStore(Protocol):
    def keep(self, client: ClientId, state: Tree) -> Receipt:
        """Keeps a version for as long as its receipt is held."""

    def load(self, client: ClientId, receipt: Receipt) -> Tree:
        """The version that a receipt names. Raises StateLost where each client's state is its own."""


_NUMBERS = itertools.count()
_STATES: WeakKeyDictionary[Receipt, Tree] = WeakKeyDictionary()
"""Of all simulations in this process, so that one runtime can go on where another one stopped."""


_OWNERS: WeakKeyDictionary[Receipt, ClientStore] = WeakKeyDictionary()
"""The stores that have taken states out of this process's memory, such as into files."""


class InMemoryStore:
    """The states of all clients of a simulation, in this process."""

    def keep(self, client: ClientId, state: Tree) -> Receipt:
        receipt = Receipt(f"{client}/{next(_NUMBERS)}")
        _STATES[receipt] = state
        return receipt

    def hand_over(self, receipt: Receipt, owner: ClientStore) -> Tree | None:
        """Another store keeps this version from now on; what it was, if it was here."""
        _OWNERS[receipt] = owner
        return _STATES.pop(receipt, None)

    def __contains__(self, receipt: object) -> bool:
        return receipt in _STATES

    def load(self, client: ClientId, receipt: Receipt) -> Tree:
        if receipt in _OWNERS and _OWNERS[receipt] is not self:
            return _OWNERS[receipt].load(client, receipt)
        try:
            return _STATES[receipt]
        except KeyError:
            raise RunFailed(
                f"the state {receipt} of client {client} is not in this process: what clients at sites keep stays there"
            ) from None
