"""Finds out whether a checkpoint is whole. All that it names is checked before anything of it is used, names and types
too: whoever writes a checkpoint can also write its checksums."""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from protofed.api.task import ClientId
from protofed.errors import BadInput, RunFailed
from protofed.runs.store import opening
from protofed.runs.store.client_state import MEMORIES, Shard
from protofed.wire import WireError

SERVER, ROUNDS, MANIFEST = "server.safetensors", "rounds.jsonl", "manifest"

KINDS = {"format": int, "protofed": str, "run": str, "round": int}
"""What every manifest says, whichever version wrote it."""
SHARD_NAME = re.compile(r"[0-9]{6,}\.safetensors")


class Damaged(Exception):
    """This checkpoint cannot be used."""


def numbered(folder: Path) -> list[str]:
    """The names of finished checkpoints, the newest first."""
    try:
        names = opening.names_in(folder.parent, folder.name)
    except OSError as error:
        raise BadInput(
            f"{folder} cannot be read: {error.strerror or error}; put the folder of its checkpoints itself there"
        ) from error
    numbers = sorted((int(name) for name in names if re.fullmatch("[0-9]{6,}", name)), reverse=True)
    return [name for number in numbers if (name := f"{number:06d}") in names]


def manifest_of(folder: Path, name: str) -> dict[str, Any]:
    """What a checkpoint is of, and the checksums of its files."""
    try:
        line, digest, rest = opening.read(folder.parent, folder.name, name, MANIFEST).split(b"\n")
        if hashlib.sha256(line).hexdigest().encode() != digest or rest:  # guard: checksum-manifest, end-manifest
            raise Damaged(f"{MANIFEST} does not have its checksum")
        manifest = json.loads(line)
    except OSError as error:
        raise Damaged(f"{MANIFEST}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{MANIFEST}: {error}") from error
    known = manifest if isinstance(manifest, dict) else {}
    wrong = [key for key, kind in KINDS.items() if type(known.get(key)) is not kind]
    if wrong:  # guard: manifest-has-its-types
        raise Damaged(f"{MANIFEST} does not say its {wrong[0]}")
    return known


def files_of(folder: Path, name: str, manifest: dict[str, Any]) -> dict[str, bytes]:
    """A checkpoint's files, once they have been found whole."""
    digests = _table(manifest, "files", str)
    if digests.keys() != {SERVER, ROUNDS}:  # guard: manifest-names-its-files
        raise Damaged(f"{MANIFEST} names the files {', '.join(map(repr, digests))}, not {SERVER} and {ROUNDS}")
    files = {}
    for each, digest in digests.items():
        files[each] = _read(each, folder.parent, folder.name, name, each)
        if hashlib.sha256(files[each]).hexdigest() != digest:  # guard: checksum-files
            raise Damaged(f"{each} does not have its checksum")
    return files


def shards_of(folder: Path, manifest: dict[str, Any]) -> dict[ClientId, Shard]:
    """Where each client's memory is, once all these files have been found whole."""
    shards: dict[ClientId, Shard] = {}
    for name in memories_named(manifest):
        facts, where = manifest["memories"][name], f"{MEMORIES}/{name}"
        data = _read(where, folder.parent, folder.name, MEMORIES, name)
        if hashlib.sha256(data).hexdigest() != facts["sha256"]:  # guard: checksum-memories
            raise Damaged(f"{where} does not have its checksum")
        try:
            shard = Shard.of(name, data)
        except WireError as error:
            raise Damaged(f"{where}: {error}") from error
        if not shard.parts.keys() >= set(facts["clients"]):
            raise Damaged(f"{where} does not hold all the clients that {MANIFEST} names")
        shards |= dict.fromkeys(facts["clients"], shard)
    return shards


def memories_named(manifest: dict[str, Any]) -> list[str]:
    """The names of the files that hold what clients remember."""
    for name, facts in _table(manifest, "memories", dict).items():
        if not SHARD_NAME.fullmatch(name):  # guard: manifest-names-its-memories
            raise Damaged(f"{MANIFEST} names {name!r} as memories, which no checkpoint does")
        clients = facts.get("clients")
        if not isinstance(clients, list) or not all(isinstance(one, str) for one in (*clients, facts.get("sha256"))):
            raise Damaged(f"{MANIFEST} does not say what is in {MEMORIES}/{name}")
    return list(manifest["memories"])


def _table(manifest: dict[str, Any], key: str, kind: type) -> dict[str, Any]:
    table = manifest.get(key)
    if not isinstance(table, dict) or not all(isinstance(value, kind) for value in table.values()):
        raise Damaged(f"{MANIFEST} has no table of {key}")
    return table


def strikes_and_receipts(manifest: dict[str, Any]) -> tuple[dict[ClientId, int], dict[ClientId, str]]:
    return _table(manifest, "strikes", int), _table(manifest, "receipts", str)


def _read(what: str, path: Path, *names: str) -> bytes:
    try:
        return opening.read(path, *names)
    except OSError as error:
        raise Damaged(f"{what}: {error.strerror or error}") from error


# ---- which are whole


_DIGESTS: dict[Path, tuple[tuple[int, ...], str]] = {}
"""The SHA-256 of files that this process has read or written, and what the system said of them then."""


def whole(folder: Path, name: str) -> list[str]:
    """The memories that a checkpoint names, all of it found whole. Raises Damaged."""
    manifest = manifest_of(folder, name)
    memories = memories_named(manifest)
    expected = {(name, each): digest for each, digest in _table(manifest, "files", str).items()}
    expected |= {(MEMORIES, each): manifest["memories"][each]["sha256"] for each in memories}
    for names, digest in expected.items():
        try:
            is_whole = digest_of(folder, *names) == digest
        except OSError as error:
            raise Damaged(f"{names[-1]}: {error.strerror or error}") from error
        if not is_whole:
            raise Damaged(f"{names[-1]} does not have its checksum")
    return memories


def is_whole(folder: Path, name: str) -> bool:
    try:
        whole(folder, name)
    except Damaged:
        return False
    return True


def rounds_there(folder: Path) -> list[int]:
    """The rounds whose states can be loaded: those to be kept, and the last."""
    names = [name for name in numbered(folder) if is_whole(folder, name)]
    return sorted(int(name) for name in {*names[:1], *staying(folder, names)})


def staying(folder: Path, names: Sequence[str]) -> set[str]:
    """Of checkpoints, the latest first: those to be kept, and the best by validation, which is the last that was the
    best so far."""
    found = {name: marks(folder, name) for name in names}
    best = [name for name in names if found[name][1]][:1]
    return {*best, *(name for name in names if found[name][0])}


def marks(folder: Path, name: str) -> tuple[bool, bool]:
    """Whether a checkpoint is to stay when later ones are there, and whether it was the best by validation so far. One
    of which that can no longer be known stays."""
    try:
        manifest = manifest_of(folder, name)
        return manifest.get("kept") is True, manifest.get("best") is True
    except Damaged:
        return True, False


def refuse_changed(folder: Path, shards: Collection[Shard]) -> None:
    """Refuses to go on if a file that holds clients' states is no longer what was written."""
    for shard in shards:
        try:
            is_same = digest_of(folder, MEMORIES, shard.name) == shard.sha256
        except OSError:
            is_same = False
        if not is_same:  # guard: memories-still-the-same
            raise RunFailed(
                f"{folder / MEMORIES / shard.name} was changed or removed while the run went on, and no checkpoint is "
                "whole without it: put it back from a copy of the run's folder, then resume"
            )


def digest_of(folder: Path, *names: str) -> str:
    """The SHA-256 of a file. It is read again only if it has changed, going by what the system says."""
    path = folder.joinpath(*names)
    with opening.file(folder.parent, folder.name, *names) as handle:
        known, digest = _DIGESTS.get(path, ((), ""))
        facts = _facts(handle)
        if known != facts:
            with open(handle, "rb", closefd=False) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            _DIGESTS[path] = facts, digest
    return digest


def note_written(folder: Path, *names: str, digest: str) -> None:
    """This process has just written a file, and need not read it."""
    with contextlib.suppress(OSError), opening.file(folder.parent, folder.name, *names) as handle:
        _DIGESTS[folder.joinpath(*names)] = _facts(handle), digest


def forget(path: Path) -> None:
    """A file, or a folder of files, is gone."""
    for each in [each for each in _DIGESTS if each == path or each.parent == path]:
        del _DIGESTS[each]


def _facts(handle: int) -> tuple[int, ...]:
    """What changes when a file does."""
    facts = os.fstat(handle)
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_ctime_ns
