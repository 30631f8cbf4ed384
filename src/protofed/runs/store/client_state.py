"""What clients of a simulation keep, most of it on the disk: a run may have far more clients than would fit into
memory.

New states are in memory until the next checkpoint writes them into a file, a shard. Of those on the disk, the ones that
were used last stay at hand.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from safetensors import safe_open

from protofed import wire
from protofed.api.task import ClientId
from protofed.errors import RunFailed
from protofed.runtimes.client_store import InMemoryStore, Receipt
from protofed.runtimes.device import moved
from protofed.tree import Tree

HELD_BYTES = 256 * 2**20  # guard: memories-not-all-held
"""Of states that are on the disk and are kept at hand all the same; those used last stay."""


@dataclass(frozen=True)
class Shard:
    """A file of states."""

    name: str
    sha256: str


@dataclass(frozen=True)
class Saved:
    """States that are in a file now."""

    receipts: Mapping[ClientId, Receipt]
    shard: Shard


_SHARDS: WeakKeyDictionary[Receipt, Shard] = WeakKeyDictionary()
"""The files of all states that are in one, whichever run of this process wrote it."""


class SavedStore(InMemoryStore):
    """A client store whose states a checkpoint can write and read."""

    def __init__(self, folder: Path, like: Callable[[ClientId], Tree], device: torch.device) -> None:
        self._folder = folder
        self._like = like
        self._device = device
        self._shards: WeakKeyDictionary[Receipt, Shard] = WeakKeyDictionary()
        self._held: OrderedDict[str, Tree] = OrderedDict()
        self._num_bytes = 0

    def load(self, client: ClientId, receipt: Receipt) -> Tree:
        if receipt not in self._shards:
            return super().load(client, receipt)
        if receipt not in self._held:
            self._hold(receipt, self._from_file(client, self._shards[receipt]))
        self._held.move_to_end(receipt)
        return self._held[receipt]

    # ---- what checkpoints do

    def unsaved(self, receipts: Mapping[ClientId, Receipt]) -> dict[ClientId, Tree]:
        """The states that are in no file."""
        # guard: save-writes-round-s-memories-only
        return {client: self.load(client, receipt) for client, receipt in receipts.items() if receipt in self}

    def shards(self, receipts: Mapping[ClientId, Receipt]) -> dict[ClientId, Shard]:
        """Where the other ones are."""
        return {client: _SHARDS[receipt] for client, receipt in receipts.items() if receipt not in self}

    def settle(self, saved: Saved) -> None:
        """These are in a file now."""
        for receipt in saved.receipts.values():
            if receipt in self:
                self._hold(receipt, self._place(receipt, saved.shard))

    def restored(self, shards: Mapping[ClientId, Shard]) -> dict[ClientId, Receipt]:
        """Receipts for the states that these files hold."""
        receipts = {client: self.keep(client, None) for client in shards}
        for client, shard in shards.items():
            self._place(receipts[client], shard)
        return receipts

    def _place(self, receipt: Receipt, shard: Shard) -> Tree:
        """Notes which file holds a state; what it was, if it was in memory."""
        self._shards[receipt] = _SHARDS[receipt] = shard
        weakref.finalize(receipt, self._drop, str(receipt))
        return self.hand_over(receipt, self)

    def _hold(self, receipt: Receipt, state: Tree) -> None:
        self._held[str(receipt)] = state
        self._num_bytes += wire.num_bytes(state)
        while self._num_bytes > HELD_BYTES and len(self._held) > 1:
            _, oldest = self._held.popitem(last=False)
            self._num_bytes -= wire.num_bytes(oldest)

    def _drop(self, receipt: str) -> None:
        """Forgets a version that nobody can ask for any more."""
        state = self._held.pop(receipt, None)
        if state is not None:
            self._num_bytes -= wire.num_bytes(state)

    def _from_file(self, client: ClientId, shard: Shard) -> Tree:
        path, prefix = self._folder / shard.name, f"{client}/"
        try:
            with safe_open(path, "pt") as file:
                names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118, not a dict
                arrays = {name.removeprefix(prefix): file.get_tensor(name).clone() for name in names}
        except Exception as error:  # its checksum was right when the run began
            raise RunFailed(f"{path} can no longer be read: {error}") from error
        return moved(wire.from_arrays(arrays, self._like(client)), self._device)
