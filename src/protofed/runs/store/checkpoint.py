"""Checkpoints that are either whole or ignored.

checkpoint/000012/            the state after 12 rounds: it appears by one rename when everything in it is on the disk
    manifest                  what it belongs to, and the SHA-256 of every file and of itself
    server.safetensors        what the server knows
    rounds.jsonl              the lines of all rounds
checkpoint/memories/000012.safetensors   what the clients that took part in round 12 remember

A checkpoint names the files that hold the memories of its clients, its own and older ones, so that a save costs as much
as a round has clients. All that it names is checked before any tensor is read. The last two are kept, so that one may
be damaged.
"""

import contextlib
import hashlib
import json
import logging
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protofed import wire
from protofed.api.task import ClientId
from protofed.engine.federation import Federation
from protofed.engine.state import State
from protofed.errors import RunFailed
from protofed.runs.store import disk
from protofed.runs.store.client_state import Saved, SavedStore, Shard
from protofed.runtimes.client_store import InMemoryStore, Receipt
from protofed.runtimes.device import moved
from protofed.tree import Tree
from protofed.version import __version__

log = logging.getLogger(__name__)

FORMAT = 3
KEPT = 2  # guard: checkpoint-before-kept
SERVER, ROUNDS, MANIFEST, MEMORIES = "server.safetensors", "rounds.jsonl", "manifest", "memories"


class Damaged(Exception):
    """This checkpoint cannot be used."""


@dataclass(frozen=True)
class Checkpoint:
    state: State
    rounds: str
    """The lines of rounds.jsonl up to here."""


def save(folder: Path, checkpoint: Checkpoint, federation: Federation, identity: str) -> Saved | None:
    """Writes a checkpoint; if that fails, the ones before it are untouched. What is in a file now that was in none."""
    return write(folder, prepared(checkpoint, federation, identity))


@dataclass(frozen=True)
class Prepared:
    """A checkpoint, ready to be written by another thread while the run goes on."""

    checkpoint: Checkpoint
    manifest: Callable[[Mapping[str, bytes], Shard], bytes]
    states: Mapping[ClientId, Tree]
    """Of clients, those that are in no file yet."""
    receipts: Mapping[ClientId, Receipt]
    """Of these."""


def prepared(checkpoint: Checkpoint, federation: Federation, identity: str) -> Prepared:
    state, store = checkpoint.state, federation.runtime.store
    if not isinstance(store, SavedStore):  # clients elsewhere keep their states themselves

        def receipts_only(files: Mapping[str, bytes], shard: Shard) -> bytes:
            return _manifest(files, {}, state, federation, identity, dict(state.receipts))

        return Prepared(checkpoint, receipts_only, {}, {})
    states, before = store.unsaved(state.receipts), store.shards(state.receipts)

    def with_shards(files: Mapping[str, bytes], shard: Shard) -> bytes:
        return _manifest(files, {**before, **dict.fromkeys(states, shard)}, state, federation, identity, {})

    return Prepared(checkpoint, with_shards, states, {client: state.receipts[client] for client in states})


def write(folder: Path, ready: Prepared) -> Saved | None:
    """Writes a prepared checkpoint."""
    state, states = ready.checkpoint.state, dict(ready.states)
    kept = wire.encode(states) if states else b""
    shard = Shard(f"{state.round:06d}.safetensors", hashlib.sha256(kept).hexdigest())
    files = {SERVER: wire.encode(state.server), ROUNDS: ready.checkpoint.rounds.encode()}
    files[MANIFEST] = ready.manifest(files, shard)
    target = folder / f"{state.round:06d}"
    try:
        disk.make(folder)
        disk.make(folder / MEMORIES)
        if states:  # guard: memories-before-checkpoint-names-them
            disk.put(folder / MEMORIES / shard.name, kept)  # guard: memories-before-checkpoint-names-them
        disk.put_folder(target, files)  # guard: memories-before-checkpoint-names-them
    except OSError as error:  # guard: swallowed-permissionerror
        size = len(kept) + sum(map(len, files.values()))  # guard: bytes-write
        _tidy(folder)  # guard: failed-save-cleaned-up
        raise RunFailed(_could_not_save(folder, target, size, error)) from error  # guard: failed-save-said
    _tidy(folder)
    return Saved(ready.receipts, shard)


def saved_store(folder: Path, federation: Federation) -> SavedStore:
    """The store of a run's clients, which its checkpoints read and write."""
    return SavedStore(folder / MEMORIES, federation.initial_client_state, federation.runtime.device)


def load(
    folder: Path, federation: Federation, identity: str, allowed: Collection[str] = (), has_changed: bool = False
) -> Checkpoint | None:
    """The newest whole checkpoint; None if none was ever written; damaged ones are named and passed over. `allowed` may
    name `protofed`, for one that another version wrote. Of a run whose settings have changed, only the part of its
    identity that is its data's must be the same."""
    damages = []
    for path in _numbered(folder):
        try:
            return _read(path, federation, identity, allowed, has_changed)
        except Damaged as damage:
            log.warning("checkpoint %s is damaged (%s); using the one before it", path, damage)
            damages.append(f"{path.name}: {damage}")
    if damages:  # guard: all-damaged-error
        raise RunFailed(
            f"every checkpoint in {folder} is damaged ({'; '.join(damages)}): nothing to resume; "
            f"remove {folder.parent} to start afresh"
        )
    return None


def rounds_saved(folder: Path) -> int:
    """The number of rounds that the newest checkpoint holds, going by its name."""
    return max((int(path.name) for path in _numbered(folder)), default=0)


def write_atomically(path: Path, data: bytes) -> None:
    """The file is the old one or the new one, whatever happens."""
    try:
        disk.put(path, data)
    except OSError as error:
        free = shutil.disk_usage(path.parent).free if path.parent.exists() else 0
        raise RunFailed(
            f"could not write {path}: {error.strerror or error} ({len(data)} bytes to write, {free} free); "
            "checkpoints are as they were"
        ) from error


def _manifest(
    files: Mapping[str, bytes],
    shards: Mapping[ClientId, Shard],
    state: State,
    federation: Federation,
    identity: str,
    receipts: Mapping[ClientId, str],
) -> bytes:
    """One line of JSON and one line with its SHA-256."""
    clients = defaultdict(list)
    for client, shard in sorted(shards.items()):
        clients[shard].append(client)
    facts = {
        "format": FORMAT,
        "protofed": __version__,
        "run": identity,
        "round": state.round,
        "networks": _networks(federation),
        "strikes": dict(state.strikes),
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
        "receipts": dict(receipts),
        "memories": {s.name: {"sha256": s.sha256, "clients": own} for s, own in clients.items()},
    }
    line = json.dumps(facts).encode()
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


def _networks(federation: Federation) -> dict[str, list[int]]:
    """Names and shapes of the first client's weights."""
    return {name: list(shape) for name, shape in federation.networks_of(federation.ids[0]).shapes.items()}


def refuse_other_data(folder: Path, identity: str) -> None:
    """Refuses to take a run that has ended for one on data that have changed since."""
    for path in _numbered(folder):
        with contextlib.suppress(Damaged):
            then = _checked_manifest(path)["run"]
            if then.partition("+")[2] != identity.partition("+")[2]:
                raise RunFailed(
                    f"{path.parent.parent} holds run {then}, not {identity}: its data or code have changed since"
                )
            return


def _read(path: Path, federation: Federation, identity: str, allowed: Collection[str], has_changed: bool) -> Checkpoint:
    manifest = _checked_manifest(path)
    _refuse_others(path, manifest, federation, allowed)
    then, now = (run.partition("+")[2] if has_changed else run for run in (manifest["run"], identity))
    if then != now:  # guard: another-run-or-other-files
        raise RunFailed(f"{path} belongs to run {manifest['run']}, not to {identity}: its configuration or data differ")
    if manifest["round"] != int(path.name):  # guard: manifest-another-round
        raise Damaged(f"{MANIFEST} is that of round {manifest['round']}")
    files = {name: _checked(path / name, digest) for name, digest in manifest["files"].items()}
    shards = _checked_shards(path.parent, manifest)  # guard: checks-before-parsing
    # guard: checks-before-parsing
    # guard: checks-before-parsing
    server = moved(wire.decode(files[SERVER], federation.initial_server), federation.runtime.device)
    receipts = {client: Receipt(receipt) for client, receipt in manifest["receipts"].items()}
    if isinstance(federation.runtime.store, InMemoryStore):  # clients are in this process
        federation.runtime.store = store = saved_store(path.parent, federation)
        receipts = store.restored(shards)
    state = State(manifest["round"], server, receipts, strikes=manifest["strikes"])
    return Checkpoint(state, files[ROUNDS].decode())


def _refuse_others(path: Path, manifest: Mapping[str, Any], federation: Federation, allowed: Collection[str]) -> None:
    """Refuses what other networks or another version has written."""
    if manifest["format"] != FORMAT:  # guard: other-formats
        raise RunFailed(
            f"{path} has format {manifest['format']}, and this version of protofed reads {FORMAT}: it was saved by "
            f"protofed {manifest['protofed']}; go on with that version, or start the run afresh in another folder"
        )
    if manifest["protofed"] != __version__ and "protofed" not in allowed:  # guard: other-versions
        raise RunFailed(
            f"{path} was saved by protofed {manifest['protofed']}, and this is {__version__}, which may compute "
            "something else: --allow-config-change protofed goes on all the same"
        )
    then, now = manifest["networks"], _networks(federation)
    changed = [f"{n}: {then.get(n)} then, {now.get(n)} now" for n in {**then, **now} if then.get(n) != now.get(n)]
    if changed:  # guard: other-networks
        raise RunFailed(f"{path} was saved with other networks ({'; '.join(changed[:5])})")


def _checked_shards(folder: Path, manifest: Mapping[str, Any]) -> dict[ClientId, Shard]:
    """Where each client's memory is, once all these files have been found whole."""
    shards: dict[ClientId, Shard] = {}
    for name, facts in manifest["memories"].items():
        try:
            with (folder / MEMORIES / name).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise Damaged(f"{MEMORIES}/{name}: {error}") from error
        if digest != facts["sha256"]:  # guard: checksum-memories
            raise Damaged(f"{MEMORIES}/{name} does not have its checksum")
        shards |= dict.fromkeys(facts["clients"], Shard(name, digest))
    return shards


def _checked_manifest(path: Path) -> dict[str, Any]:
    try:
        line, digest, rest = (path / MANIFEST).read_bytes().split(b"\n")
    except (OSError, ValueError) as error:
        raise Damaged(f"{MANIFEST}: {error}") from error
    if hashlib.sha256(line).hexdigest().encode() != digest or rest:  # guard: checksum-manifest, end-manifest
        raise Damaged(f"{MANIFEST} does not have its checksum")
    manifest: dict[str, Any] = json.loads(line)
    return manifest


def _checked(path: Path, digest: str) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Damaged(f"{path.name}: {error}") from error
    if hashlib.sha256(data).hexdigest() != digest:  # guard: checksum-files
        raise Damaged(f"{path.name} does not have its checksum")
    return data


def _is_whole(path: Path) -> bool:
    try:
        manifest = _checked_manifest(path)
        for name, digest in manifest["files"].items():
            _checked(path / name, digest)
        _checked_shards(path.parent, manifest)
    except Damaged:
        return False
    return True


def _tidy(folder: Path) -> None:
    """Removes older checkpoints, what is half written, and memories that no checkpoint names. Nothing is lost if that
    fails."""
    try:
        for path in (*_numbered(folder)[KEPT:], *folder.glob(".writing-*")):
            disk.remove(path)
        named = {name for path in _numbered(folder) for name in _memories_of(path)}
        for path in (folder / MEMORIES).iterdir():
            if path.name not in named:  # guard: memories-checkpoint-names-stay, memories-nobody-names-go
                disk.remove(path)
    except OSError as error:
        log.warning("%s: old files could not be removed: %s", folder, error)


def _memories_of(path: Path) -> list[str]:
    try:
        return list(_checked_manifest(path)["memories"])
    except Damaged:
        return []


def _numbered(folder: Path) -> list[Path]:
    """Finished checkpoints, the newest first."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if p.name.isdigit()), key=lambda p: int(p.name), reverse=True)


def _could_not_save(folder: Path, target: Path, size: int, error: OSError) -> str:
    kept = [path for path in _numbered(folder) if path != target and _is_whole(path)]
    last = f"The last good checkpoint, {kept[0]}, is intact" if kept else "There is no good checkpoint yet"
    free = shutil.disk_usage(folder if folder.exists() else folder.parent).free
    return (
        f"could not save {target}: {error.strerror or error} ({size} bytes to write, {free} free). "
        f"{last}; make room, then resume."
    )
