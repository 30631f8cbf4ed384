"""Checkpoints that are either whole or ignored.

checkpoint/000012/            the state after 12 rounds: it appears by one rename when everything in it is on the disk
    manifest                  what it belongs to, and the SHA-256 of every file and of itself
    server.safetensors        what the server knows
    rounds.jsonl              the lines of all rounds
checkpoint/memories/000012.safetensors   what the clients that took part in round 12 remember
checkpoint/damaged-000012/    one that is not whole; nothing reads it

A checkpoint names the files that hold the memories of its clients, its own and older ones, so that a save costs as much
as a round has clients. All that it names is checked before any tensor is read. The last two that are whole are kept, so
that one may be damaged; so are those whose manifest says that they are to be kept.
"""

import contextlib
import hashlib
import json
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protofed import wire
from protofed.api.task import ClientId
from protofed.engine.federation import Federation
from protofed.engine.state import State
from protofed.errors import BadInput, RunFailed
from protofed.runs.store import disk, opening, verify
from protofed.runs.store.client_state import MEMORIES, Saved, SavedStore, Shard, packed
from protofed.runs.store.verify import MANIFEST, ROUNDS, SERVER, Damaged
from protofed.runtimes.client_store import InMemoryStore, Receipt
from protofed.runtimes.device import moved
from protofed.tree import Tree
from protofed.version import __version__

log = logging.getLogger(__name__)

FORMAT = 4
KEPT = 2  # guard: checkpoint-before-kept
ASIDE = "damaged-"


@dataclass(frozen=True)
class Checkpoint:
    state: State
    rounds: str
    """The lines of rounds.jsonl up to here."""
    is_kept: bool = False
    """Whether it stays when later ones are there."""
    is_best: bool = False
    """Whether its round is the best so far by validation. It stays until there is a better one."""


def save(folder: Path, checkpoint: Checkpoint, federation: Federation, identity: str) -> Saved | None:
    """Writes a checkpoint; if that fails, the ones before it are untouched. What is in a file now that was in none."""
    return write(folder, prepared(checkpoint, federation, identity))


@dataclass(frozen=True)
class Prepared:
    """A checkpoint, ready to be written by another thread while the run goes on."""

    checkpoint: Checkpoint
    manifest: Callable[[Mapping[str, str], Shard], bytes]
    """Of the SHA-256 of its files, and where its clients' states will be."""
    states: Mapping[ClientId, Tree]
    """Of clients, those that are in no file yet."""
    receipts: Mapping[ClientId, Receipt]
    """Of these."""
    before: Collection[Shard] = ()
    """The files that hold the other ones."""


def prepared(checkpoint: Checkpoint, federation: Federation, identity: str) -> Prepared:
    state, store = checkpoint.state, federation.runtime.store
    if not isinstance(store, SavedStore):  # clients elsewhere keep their states themselves

        def receipts_only(digests: Mapping[str, str], shard: Shard) -> bytes:
            return _manifest(digests, {}, checkpoint, federation, identity, dict(state.receipts))

        return Prepared(checkpoint, receipts_only, {}, {})
    store.refuse_damage()
    states, before = store.unsaved(state.receipts), store.shards(state.receipts)

    def with_shards(digests: Mapping[str, str], shard: Shard) -> bytes:
        return _manifest(digests, {**before, **dict.fromkeys(states, shard)}, checkpoint, federation, identity, {})

    receipts = {client: state.receipts[client] for client in states}
    return Prepared(checkpoint, with_shards, states, receipts, set(before.values()))


def write(folder: Path, ready: Prepared) -> Saved | None:
    """Writes a prepared checkpoint into a folder that lies in one which must be there."""
    state, states = ready.checkpoint.state, dict(ready.states)
    kept, name = packed(states), f"{state.round:06d}"
    shard = Shard.of(f"{name}.safetensors", kept)
    files = {SERVER: wire.encode(state.server), ROUNDS: ready.checkpoint.rounds.encode()}
    digests = {each: hashlib.sha256(data).hexdigest() for each, data in files.items()}
    files[MANIFEST] = ready.manifest(digests, shard)
    try:
        with opening.folder(folder.parent) as above:
            disk.make_in(above, folder.name)
        with opening.folder(folder.parent, folder.name) as own:
            disk.make_in(own, MEMORIES)
            verify.refuse_changed(folder, ready.before)
            whole = _set_aside(folder, own)
            with opening.folder_in(own, MEMORIES) as memories:
                if states:  # guard: memories-before-checkpoint-names-them
                    disk.put(memories, shard.name, kept)  # guard: memories-before-checkpoint-names-them
                disk.put_folder(own, name, files)  # guard: memories-before-checkpoint-names-them
    except OSError as error:  # guard: swallowed-permissionerror
        size = len(kept) + sum(map(len, files.values()))  # guard: bytes-write
        _tidy(folder)  # guard: failed-save-cleaned-up
        raise RunFailed(_could_not_save(folder, name, size, error)) from error  # guard: failed-save-said
    for each, digest in digests.items():
        verify.note_written(folder, name, each, digest=digest)
    if states:
        verify.note_written(folder, MEMORIES, shard.name, digest=shard.sha256)
    _tidy(folder, {**whole, name: [*(one.name for one in ready.before), shard.name]})
    return Saved(ready.receipts, shard)


def saved_store(folder: Path, federation: Federation) -> SavedStore:
    """The store of a run's clients, which its checkpoints read and write."""
    return SavedStore(folder, federation.initial_client_state, federation.runtime.device)


def load(
    folder: Path, federation: Federation, identity: str, allowed: Collection[str] = (), has_changed: bool = False
) -> Checkpoint | None:
    """The newest whole checkpoint; None if none was ever written; damaged ones are named and passed over. `allowed` may
    name `protofed`, for one that another version wrote. Of a run whose settings have changed, only the part of its
    identity that is its data's must be the same."""
    damages = []
    for name in verify.numbered(folder):
        try:
            return _read(folder / name, federation, identity, allowed, has_changed)
        except Damaged as damage:
            log.warning("checkpoint %s is damaged (%s); using the one before it", folder / name, damage)
            damages.append(f"{name}: {damage}")
    if damages:  # guard: all-damaged-error
        raise RunFailed(
            f"every checkpoint in {folder} is damaged ({'; '.join(damages)}): nothing to resume; "
            f"remove {folder.parent} to start afresh"
        )
    return None


def load_round(folder: Path, round: int, federation: Federation, identity: str | None) -> Checkpoint:
    """The state after this round, to be looked at. Settings and the version of protofed may have changed since; data
    and code of the user's own may not, unless there is no identity to compare."""
    if f"{round:06d}" not in verify.numbered(folder):
        there = ", ".join(map(str, verify.rounds_there(folder))) or "none"
        advice = f"a run that is told so before it gets there keeps it: [saving] keep = [{round}]"
        raise BadInput(f"{folder.parent} has no state of round {round}, but those of: {there}; {advice}")
    try:
        return _read(folder / f"{round:06d}", federation, identity, ("protofed",), has_changed=True)
    except Damaged as damage:
        raise RunFailed(f"checkpoint {folder / f'{round:06d}'} is damaged: {damage}") from damage


def rounds_saved(folder: Path) -> int:
    """The number of rounds that the newest checkpoint holds, going by its name."""
    return max(map(int, verify.numbered(folder)), default=0)


def rounds_digests(folder: Path) -> list[str]:
    """The SHA-256 of the lines that the last checkpoints hold, that of the newest first."""
    digests: list[str] = []
    for name in verify.numbered(folder):
        with contextlib.suppress(Damaged, KeyError, TypeError):
            digests.append(verify.manifest_of(folder, name)["files"][ROUNDS])
    return digests[:KEPT]  # guard: rounds-are-the-last


def write_atomically(path: Path, data: bytes) -> None:
    """The file is the old one or the new one, whatever happens."""
    try:
        with opening.folder(path.parent) as own:
            disk.put(own, path.name, data)
    except OSError as error:
        raise RunFailed(
            f"could not write {path}: {opening.reason(error)} ({len(data)} bytes to write, {disk.free(path)} free); "
            "checkpoints are as they were"
        ) from error


def _manifest(
    digests: Mapping[str, str],
    shards: Mapping[ClientId, Shard],
    checkpoint: Checkpoint,
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
        "round": checkpoint.state.round,
        "kept": checkpoint.is_kept,
        "best": checkpoint.is_best,
        "networks": _networks(federation),
        "strikes": dict(checkpoint.state.strikes),
        "files": dict(digests),
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
    for name in verify.numbered(folder):
        with contextlib.suppress(Damaged):
            then = verify.manifest_of(folder, name)["run"]
            if then.partition("+")[2] != identity.partition("+")[2]:
                raise RunFailed(
                    f"{folder.parent} holds run {then}, not {identity}: its data or code have changed since"
                )
            return


def _read(
    path: Path, federation: Federation, identity: str | None, allowed: Collection[str], has_changed: bool
) -> Checkpoint:
    folder, name = path.parent, path.name
    manifest = verify.manifest_of(folder, name)
    _refuse_others(path, manifest, federation, allowed)
    both = (manifest["run"], manifest["run"] if identity is None else identity)
    then, now = (run.partition("+")[2] if has_changed else run for run in both)
    if then != now:  # guard: another-run-or-other-files
        raise RunFailed(f"{path} belongs to run {manifest['run']}, not to {identity}: its configuration or data differ")
    if manifest["round"] != int(name):  # guard: manifest-another-round
        raise Damaged(f"{MANIFEST} is that of round {manifest['round']}")
    files = verify.files_of(folder, name, manifest)
    shards = verify.shards_of(folder, manifest)  # guard: checks-before-parsing
    # guard: checks-before-parsing
    # guard: checks-before-parsing
    server = moved(wire.decode(files[SERVER], federation.initial_server), federation.runtime.device)
    strikes, kept_elsewhere = verify.strikes_and_receipts(manifest)
    receipts = {client: Receipt(receipt) for client, receipt in kept_elsewhere.items()}
    if isinstance(federation.runtime.store, InMemoryStore):  # clients are in this process
        federation.runtime.store = store = saved_store(folder, federation)
        receipts |= store.restored(shards)  # guard: states-elsewhere-are-not-made-afresh
    state = State(manifest["round"], server, receipts, strikes=strikes)
    return Checkpoint(state, files[ROUNDS].decode(), *verify.marks(folder, name))


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


def _set_aside(folder: Path, own: int) -> dict[str, list[str]]:
    """Gives damaged checkpoints another name: they do not count, and whatever can be saved of them still can be. The
    others, with the memories that they name."""
    whole = _whole(folder)
    for name in verify.numbered(folder):
        if name not in whole:  # guard: damaged-set-aside
            free = (f"{ASIDE}{name}{more}" for more in ("", *(f"-{k}" for k in range(2, 1000))))
            other = next(each for each in free if opening.kind(own, each) is None)
            disk.rename(own, name, other)
            log.warning("checkpoint %s is damaged; it is %s now", folder / name, other)
    return whole


def _whole(folder: Path) -> dict[str, list[str]]:
    """The memories that each checkpoint names which is whole."""
    found = {}
    for name in verify.numbered(folder):
        with contextlib.suppress(Damaged):
            found[name] = verify.whole(folder, name)
    return found


def _tidy(folder: Path, known: Mapping[str, list[str]] | None = None) -> None:
    """Removes older checkpoints, what is half written, and memories that no checkpoint names. Only those that are whole
    count: `known`, if that is known. Nothing is lost if that fails."""
    try:
        whole = _whole(folder) if known is None else known
        names = verify.numbered(folder)
        counted = [name for name in names if name in whole]  # guard: only-whole-count
        with opening.folder(folder.parent, folder.name) as own:
            for name in os.listdir(own):
                if name.startswith((".writing-", ".removing-")):
                    disk.remove(own, name)
            stays = verify.staying(folder, counted)
            older = [name for name in counted[KEPT:] if name not in stays]  # guard: kept-rounds-stay
            for name in older:
                disk.discard(own, name)
                verify.forget(folder / name)
            if counted == names:  # guard: memories-of-damaged-stay
                _tidy_memories(folder, own, {m for name in counted if name not in older for m in whole[name]})
    except (OSError, BadInput) as error:
        log.warning("%s: old files could not be removed: %s", folder, error)


def _tidy_memories(folder: Path, own: int, named: set[str]) -> None:
    for name in os.listdir(own):
        if name.startswith(ASIDE):
            with contextlib.suppress(Damaged):  # what else is in it may be good again one day
                named |= {*verify.memories_named(verify.manifest_of(folder, name))}
    with opening.folder_in(own, MEMORIES) as memories:
        for name in os.listdir(memories):
            if name not in named:  # guard: memories-checkpoint-names-stay, memories-nobody-names-go
                disk.remove(memories, name)
                verify.forget(folder / MEMORIES / name)


def _could_not_save(folder: Path, name: str, size: int, error: OSError) -> str:
    try:
        others = [other for other in verify.numbered(folder) if other != name]
        kept = next((other for other in others if verify.is_whole(folder, other)), None)
        last = f"The last good checkpoint, {folder / kept}, is intact" if kept else "There is no good checkpoint yet"
    except BadInput as unreadable:
        last = str(unreadable)
    return (
        f"could not save {folder / name}: {opening.reason(error)} ({size} bytes to write, {disk.free(folder)} free). "
        f"{last}; make room, then resume."
    )
