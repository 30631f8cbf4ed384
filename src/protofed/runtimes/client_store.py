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


class ClientStore(Protocol):
    def keep(self, client: ClientId, state: Tree) -> Receipt:
        """Keeps a version for as long as its receipt is held."""

    def load(self, client: ClientId, receipt: Receipt) -> Tree:
        """The version that a receipt names."""


class InMemoryStore:
    """The states of all clients of a simulation, in this process."""

    def __init__(self) -> None:
        self._states: WeakKeyDictionary[Receipt, Tree] = WeakKeyDictionary()
        self._numbers = itertools.count()

    def keep(self, client: ClientId, state: Tree) -> Receipt:
        receipt = Receipt(f"{client}/{next(self._numbers)}")
        self._states[receipt] = state
        return receipt

    def load(self, client: ClientId, receipt: Receipt) -> Tree:
        try:
            return self._states[receipt]
        except KeyError:
            raise RunFailed(f"the state {receipt} of client {client} is not in this process") from None
