"""What clients remember, most of it on the disk: a run may have far more clients than would fit into memory."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from protofed import wire
from protofed.api.task import ClientId
from protofed.engine.state import Shelved
from protofed.errors import RunFailed
from protofed.runtimes.device import moved
from protofed.tree import Tree

HELD_BYTES = 256 * 2**20  # guard: memories-not-all-held
"""Of memories that are on the disk and are kept at hand all the same; those used last stay."""


@dataclass(frozen=True)
class Shard:
    """A file of memories."""

    name: str
    sha256: str


@dataclass(frozen=True)
class Saved:
    """Memories that are in a file now."""

    memories: Mapping[ClientId, Tree]
    shard: Shard


class Shelf:
    """Reads memories from the files that a run has written, and holds on to those that were used last."""

    def __init__(self, folder: Path, like: Callable[[ClientId], Tree], device: torch.device) -> None:
        self._folder = folder
        self._like = like
        self._device = device
        self._held: OrderedDict[tuple[ClientId, Shard], Tree] = OrderedDict()
        self._num_bytes = 0

    def read(self, client: ClientId, shard: Shard) -> Tree:
        if (client, shard) not in self._held:
            self.hold(client, shard, self._from_file(client, shard))
        self._held.move_to_end((client, shard))
        return self._held[client, shard]

    def hold(self, client: ClientId, shard: Shard, memory: Tree) -> None:
        self._held[client, shard] = memory
        self._num_bytes += wire.num_bytes(memory)
        while self._num_bytes > HELD_BYTES and len(self._held) > 1:
            _, oldest = self._held.popitem(last=False)
            self._num_bytes -= wire.num_bytes(oldest)

    def drop(self, client: ClientId, shard: Shard) -> None:
        """Forgets what a newer memory has taken the place of."""
        memory = self._held.pop((client, shard), None)
        if memory is not None:
            self._num_bytes -= wire.num_bytes(memory)

    def _from_file(self, client: ClientId, shard: Shard) -> Tree:
        path, prefix = self._folder / shard.name, f"{client}/"
        try:
            with safe_open(path, "pt") as file:
                names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118, not a dict
                arrays = {name.removeprefix(prefix): file.get_tensor(name).clone() for name in names}
        except Exception as error:  # its checksum was right when the run began
            raise RunFailed(f"{path} can no longer be read: {error}") from error
        return moved(wire.from_arrays(arrays, self._like(client)), self._device)


class Memories(Shelved):
    """The memories of all clients that have taken part: new ones in memory, those that were saved on a shelf."""

    def __init__(self, shelf: Shelf, shards: Mapping[ClientId, Shard], fresh: Mapping[ClientId, Tree]) -> None:
        self._shelf = shelf
        self.shards = shards
        """The file that holds the last saved memory of a client."""
        self.fresh = fresh
        """Those that are not on the disk."""

    def __getitem__(self, client: ClientId) -> Tree:
        return self.fresh[client] if client in self.fresh else self._shelf.read(client, self.shards[client])

    def __contains__(self, client: object) -> bool:
        return client in self.fresh or client in self.shards

    def __iter__(self) -> Iterator[ClientId]:
        return iter(sorted(self.fresh.keys() | self.shards.keys()))

    def __len__(self) -> int:
        return len(self.fresh.keys() | self.shards.keys())

    def __or__(self, new: Mapping[ClientId, Tree]) -> "Memories":
        return Memories(self._shelf, self.shards, {**self.fresh, **new})

    def settled(self, saved: Saved) -> "Memories":
        """The same, now that some are in a file."""
        # guard: save-writes-round-s-memories-only
        done = {client for client, memory in self.fresh.items() if saved.memories.get(client) is memory}
        for client in done:
            if client in self.shards:
                self._shelf.drop(client, self.shards[client])
            self._shelf.hold(client, saved.shard, self.fresh[client])
        fresh = {client: memory for client, memory in self.fresh.items() if client not in done}
        return Memories(self._shelf, {**self.shards, **dict.fromkeys(done, saved.shard)}, fresh)
