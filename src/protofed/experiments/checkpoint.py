"""Checkpoints that are either whole or ignored.

A checkpoint is a folder, named by the number of rounds done, that appears by one rename after everything in it is on
the disk. Its manifest holds the SHA-256 of every file and of itself, checked before any tensor is read. The last two
are kept, so that one may be damaged.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protofed import wire
from protofed.errors import RunFailed
from protofed.runtimes.federation import Federation
from protofed.runtimes.state import State

log = logging.getLogger(__name__)

FORMAT = 1
KEPT = 2
SERVER, MEMORIES, ROUNDS, MANIFEST = "server.safetensors", "memories.safetensors", "rounds.jsonl", "manifest"


class Damaged(Exception):
    """This checkpoint cannot be used."""


@dataclass(frozen=True)
class Checkpoint:
    state: State
    rounds: str
    """The lines of rounds.jsonl up to here."""


def save(folder: Path, checkpoint: Checkpoint, identity: str) -> None:
    """Writes a checkpoint; if that fails, the ones before it are untouched."""
    state = checkpoint.state
    files = {
        SERVER: wire.encode(state.server),
        MEMORIES: wire.encode(state.memories),
        ROUNDS: checkpoint.rounds.encode(),
    }
    files[MANIFEST] = _manifest(files, state, identity)
    target, temporary = folder / f"{state.round:06d}", folder / f".writing-{state.round:06d}"
    try:
        _write(temporary, files)
        if target.exists():  # a damaged one, which the run fell back behind
            shutil.rmtree(target)
        temporary.rename(target)
        sync(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            shutil.rmtree(temporary)
        raise RunFailed(_could_not_save(folder, target, sum(map(len, files.values())), error)) from error
    for old in _numbered(folder)[KEPT:]:
        shutil.rmtree(old, ignore_errors=True)


def load(folder: Path, federation: Federation, identity: str) -> Checkpoint | None:
    """The newest whole checkpoint; None if none was ever written; damaged ones are named and passed over."""
    found = _numbered(folder)
    for path in found:
        try:
            return _read(path, federation, identity)
        except Damaged as damage:
            log.warning("checkpoint %s is damaged (%s); using the one before it", path, damage)
    if found:
        raise RunFailed(f"every checkpoint in {folder} is damaged: nothing to resume; remove {folder} to start afresh")
    return None


def rounds_saved(folder: Path) -> int:
    """The number of rounds that the newest checkpoint holds, going by its name."""
    return max((int(path.name) for path in _numbered(folder)), default=0)


def sync(path: Path) -> None:
    """Waits until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, data: bytes) -> None:
    """The file is the old one or the new one, whatever happens."""
    temporary = path.with_name(f".writing-{path.name}")
    try:
        temporary.write_bytes(data)
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise RunFailed(f"could not write {path}: {error.strerror or error}; checkpoints are as they were") from error


def _write(folder: Path, files: dict[str, bytes]) -> None:
    folder.parent.mkdir(exist_ok=True)
    sync(folder.parent.parent)
    if folder.exists():  # left by a run that was killed while it wrote
        shutil.rmtree(folder)
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
        sync(folder / name)
    sync(folder)


def _manifest(files: dict[str, bytes], state: State, identity: str) -> bytes:
    """One line of JSON and one line with its SHA-256."""
    facts = {
        "format": FORMAT,
        "run": identity,
        "round": state.round,
        "clients": sorted(state.memories),
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
    }
    line = json.dumps(facts).encode()
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


def _read(path: Path, federation: Federation, identity: str) -> Checkpoint:
    manifest = _checked_manifest(path)
    if manifest["format"] != FORMAT:
        raise RunFailed(f"{path} has format {manifest['format']}, and this version of protofed reads {FORMAT}")
    if manifest["run"] != identity:
        raise RunFailed(f"{path} belongs to run {manifest['run']}, not to {identity}: its configuration differs")
    files = {name: _checked_file(path / name, digest) for name, digest in manifest["files"].items()}
    method, central = federation.method, federation.central(manifest["round"], "load")
    server = wire.decode(files[SERVER], method.init_server(central))
    bare = State(manifest["round"], server, {})
    likes = {c: federation.memory_of(bare, c, method.message_for(server, c)) for c in manifest["clients"]}
    memories = wire.decode(files[MEMORIES], likes)
    return Checkpoint(State(manifest["round"], server, memories), files[ROUNDS].decode())


def _checked_manifest(path: Path) -> dict[str, Any]:
    try:
        line, digest, rest = (path / MANIFEST).read_bytes().split(b"\n")
    except (OSError, ValueError) as error:
        raise Damaged(f"{MANIFEST}: {error}") from error
    if hashlib.sha256(line).hexdigest().encode() != digest or rest:
        raise Damaged(f"{MANIFEST} does not have its checksum")
    manifest: dict[str, Any] = json.loads(line)
    return manifest


def _checked_file(path: Path, digest: str) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Damaged(f"{path.name}: {error}") from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise Damaged(f"{path.name} does not have its checksum")
    return data


def _is_whole(path: Path) -> bool:
    try:
        for name, digest in _checked_manifest(path)["files"].items():
            _checked_file(path / name, digest)
    except Damaged:
        return False
    return True


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
