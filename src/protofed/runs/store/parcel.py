"""A run folder as plain bytes, to travel between machines.

What arrives is checked before anything is written: only the names that a run folder has, only bytes, not too many. So
nothing lands outside of the folder. The lock stays where it is.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from protofed.errors import RunFailed
from protofed.runs.store import disk, opening
from protofed.runs.store.checkpoint import write_atomically
from protofed.runs.store.folder import RunFolder

MAX_BYTES = 4 * 2**30
"""Of a whole run folder. It is in memory at both ends."""
NAME = re.compile(
    r"config(-until-[0-9]+)?\.toml|environment\.json|task\.json|rounds\.jsonl|done"
    r"|checkpoint/[0-9]+/(manifest|rounds\.jsonl|server\.safetensors)|checkpoint/memories/[0-9]+\.safetensors"
)

Parcel = dict[str, bytes]
"""Files by their names below the run folder."""


def packed(folder: RunFolder, limit: int = MAX_BYTES) -> Parcel:
    """The files of a run folder. Whoever works there must not do so meanwhile."""
    paths = {str(path.relative_to(folder.path)): path for path in _files(folder.path)}
    paths = {name: path for name, path in paths.items() if NAME.fullmatch(name)}
    _refuse_size(sum(path.stat().st_size for path in paths.values()), str(folder.path), limit)
    return {name: path.read_bytes() for name, path in paths.items()}


def checked(files: Any, source: str, limit: int = MAX_BYTES) -> Parcel:
    """What has come as a run folder, if it is one. `source` says of which run."""
    if not isinstance(files, Mapping):
        raise RunFailed(f"{source}: what came back is no run folder but {type(files).__name__}")
    for name, data in files.items():
        if not (isinstance(name, str) and NAME.fullmatch(name)):  # guard: parcel-names
            raise RunFailed(
                f"{source}: {str(name)[:100]!r} came back, which is no file of a run folder; nothing was written"
            )
        if not isinstance(data, bytes):  # guard: parcel-bytes
            raise RunFailed(f"{source}: {name} came back as {type(data).__name__}, not as bytes; nothing was written")
    _refuse_size(sum(map(len, files.values())), source, limit)
    return dict(files)


def unpack(files: Parcel, folder: RunFolder) -> None:
    """Writes checked files. Whenever this is stopped, the folder holds the state that it had or the new one. A state
    that did not come is removed in the end."""
    try:
        disk.make(folder.path)
        _write(files, folder)
    except OSError as error:
        raise RunFailed(
            f"could not write {folder.path}: {error.strerror or error}; make room, then run again"
        ) from error
    if "done" in files:
        folder.end()


def _write(files: Parcel, folder: RunFolder) -> None:
    by_parent: dict[str, Parcel] = {}
    for name, data in files.items():
        parent, _, last = name.rpartition("/")
        by_parent.setdefault(parent, {})[last] = data
    top, memories = by_parent.pop("", {}), by_parent.pop("checkpoint/memories", {})
    for name in sorted(top.keys() - {"rounds.jsonl", "done"}):
        write_atomically(folder.path / name, top[name])
    if not by_parent:
        return
    states = {parent.rpartition("/")[2]: inner for parent, inner in by_parent.items()}
    with opening.folder(folder.path) as own:
        disk.make_in(own, "checkpoint")
    with opening.folder(folder.path, "checkpoint") as own:
        disk.make_in(own, "memories")
        with opening.folder_in(own, "memories") as inner:  # first what a checkpoint names, then the checkpoint
            for name, data in memories.items():
                disk.put(inner, name, data)
            for name in sorted(states):
                disk.put_folder(own, name, states[name])
            folder.write_rounds(top.get("rounds.jsonl", b"").decode())
            for name in os.listdir(own):
                if name.isdigit() and name not in states:
                    disk.discard(own, name)
            for name in os.listdir(inner):
                if name not in memories:
                    disk.remove(inner, name)


def _files(root: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(root):
        for name in (*folders, *names):
            path = Path(parent, name)
            if path.is_symlink():  # guard: parcel-links
                raise RunFailed(f"{path} is a link, and a run folder has none: replace it by what it points to")
            if path.is_file():
                yield path


def _refuse_size(size: int, source: str, limit: int) -> None:
    if size > limit:  # guard: parcel-size
        raise RunFailed(f"{source}: the run folder has {size} bytes, and at most {limit} travel; run it without --ray")
