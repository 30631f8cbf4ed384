"""What clients of a simulation keep, most of it on the disk: a run may have far more clients than would fit into
memory.

New states are in memory until the next checkpoint writes them into a file, a shard. Of those on the disk, the ones that
were used last stay at hand. A shard holds an array of bytes for each client, which are a file of its own, and the
SHA-256 of each is known from when the shard was written or found whole: what is read from it later is checked again.
"""

import hashlib
import json
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

import torch

from protofed import wire
from protofed.api.task import ClientId
from protofed.errors import RunFailed
from protofed.runs.store import opening
from protofed.runtimes.client_store import InMemoryStore, Receipt
from protofed.runtimes.device import moved
from protofed.tree import Tree

MEMORIES = "memories"
"""The folder of shards, beside the checkpoints that name them."""
HELD_BYTES = 256 * 2**20  # guard: memories-not-all-held
"""Of states that are on the disk and are kept at hand all the same; those used last stay."""


@dataclass(frozen=True)
class Part:
    """The bytes of one client's state in a shard."""

    begin: int
    size: int
    sha256: str


@dataclass(frozen=True)
class Shard:
    """A file of states."""

    name: str
    sha256: str
    parts: Mapping[ClientId, Part] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, name: str, data: bytes) -> "Shard":
        """The shard with this content, which is whole."""
        return cls(name, hashlib.sha256(data).hexdigest(), _parts(data))


def packed(states: Mapping[ClientId, Tree]) -> bytes:
    """The content of a shard, in the format of safetensors; nothing for no states."""
    files = {client: wire.encode(state) for client, state in states.items()}
    header, end = {}, 0
    for client, data in files.items():
        begin, end = end, end + len(data)
        header[f"{client}/"] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [begin, end]}
    line = json.dumps(header).encode()
    line += b" " * (-len(line) % 8)
    return b"".join([len(line).to_bytes(8, "little"), line, *files.values()]) if files else b""


def _parts(data: bytes) -> dict[ClientId, Part]:
    """Where each client's state is, once the whole is known to be what was written."""
    parts = {}
    content = memoryview(data)[8 + int.from_bytes(data[:8], "little") :]
    for name, facts in (wire.header(data) if data else {}).items():
        match facts:
            case {"dtype": "U8", "data_offsets": [int(begin), int(end)]} if 0 <= begin <= end <= len(content):
                digest = hashlib.sha256(content[begin:end]).hexdigest()
                parts[name.removesuffix("/")] = Part(len(data) - len(content) + begin, end - begin, digest)
            case _:
                raise wire.WireError(f"{name} is no state of a client")
    return parts


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
        """`folder` is that of the checkpoints."""
        self._folder = folder
        self._like = like
        self._device = device
        self._shards: WeakKeyDictionary[Receipt, Shard] = WeakKeyDictionary()
        self._held: OrderedDict[str, Tree] = OrderedDict()
        self._num_bytes = 0
        self._damage = ""

    def load(self, client: ClientId, receipt: Receipt) -> Tree:
        if receipt not in self._shards:
            return super().load(client, receipt)
        if receipt not in self._held:
            self._hold(receipt, self._from_file(client, self._shards[receipt]))
        self._held.move_to_end(receipt)
        return self._held[receipt]

    # ---- what checkpoints do

    def refuse_damage(self) -> None:
        """Refuses to save after a state could not be read: that cost a client its round, and would cost the run."""
        if self._damage:  # guard: memories-lost-end-run
            raise RunFailed(self._damage)

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
        path, part = self._folder / MEMORIES / shard.name, shard.parts[client]
        advice = "put it back from a copy of the run's folder, then resume"
        try:
            data = opening.read_part(part.begin, part.size, self._folder.parent, self._folder.name, *path.parts[-2:])
        except OSError as error:
            self._damage = f"{path} can no longer be read: {error.strerror or error}; {advice}"
            raise RunFailed(self._damage) from error
        if hashlib.sha256(data).hexdigest() != part.sha256:  # guard: memories-checked-whenever-read
            self._damage = f"{path} no longer holds what client {client} keeps: it has changed since; {advice}"
            raise RunFailed(self._damage)
        return moved(wire.decode(data, self._like(client)), self._device)
