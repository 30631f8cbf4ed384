"""What clients have released in a run, and what it cost, on the disk before it leaves.

A line is written for every release. A release that is sent again, bit for bit, costs nothing, since it tells nothing
new: it has the digest of the first one.
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import fsum
from pathlib import Path
from typing import Any

from protofed.api.task import ClientId
from protofed.errors import RunFailed

FOLDER = "privacy"
"""Where a run's folder has it."""
LEDGER = "ledger.jsonl"


@dataclass(frozen=True)
class Entry:
    """A line of the ledger."""

    run: str
    round: int
    phase: str
    call: int
    """Of the phase: clients may be asked several times."""
    client: ClientId
    kind: str
    releases: int
    cost: float
    digest: str
    """Of the bytes that are sent."""

    @property
    def line(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=True)


class Ledger:
    """The lines of a run, in a file that only grows."""

    def __init__(self, path: Path | None = None, entries: Iterable[Entry] = ()) -> None:
        """Without a path it is only remembered. The entries are those of a run that this one goes on from."""
        self._path = path
        self._entries: dict[Entry, None] = {}
        if path is not None and path.exists():
            self._entries = dict.fromkeys(read(path))
            _cut(path)
        self.write([entry for entry in entries if entry not in self._entries])

    @property
    def entries(self) -> Sequence[Entry]:
        return tuple(self._entries)

    def spent(self, client: ClientId, run: str | None = None) -> float:
        """Σ 1/m² of a client: its μ² so far, in all runs or in one."""
        return fsum(e.cost for e in self._entries if e.client == client and run in (None, e.run))

    def write(self, entries: Iterable[Entry]) -> None:
        """Adds lines; they are on the disk when this returns. What is there already is the same release."""
        new = [entry for entry in dict.fromkeys(entries) if entry not in self._entries]
        if new and self._path is not None:
            _append(self._path, "".join(f"{entry.line}\n" for entry in new).encode())
        self._entries |= dict.fromkeys(new)


def _append(path: Path, data: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    is_new = not path.exists()
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(handle, left) :]
        os.fsync(handle)  # guard: ledger-on-the-disk
    finally:
        os.close(handle)
    if is_new:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read(path: Path) -> list[Entry]:
    """The lines of a ledger; none if there is none. A last line without an end is being written, or was when the
    process was killed: what it is about was not sent."""
    data = path.read_bytes() if path.exists() else b""
    lines = data[: data.rfind(b"\n") + 1].decode(errors="replace").splitlines()
    return [_entry(line, f"{path}, line {i}") for i, line in enumerate(lines, 1)]


def _cut(path: Path) -> None:
    """Takes away a last line without an end, so that the next one has its own."""
    data = path.read_bytes()
    if not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)  # guard: torn-line-cut-off


def most_spent(entries: Iterable[Entry]) -> float:
    """Σ 1/m² of the client that has released most."""
    costs: dict[ClientId, list[float]] = {}
    for entry in entries:
        costs.setdefault(entry.client, []).append(entry.cost)
    return max(map(fsum, costs.values()), default=0.0)


def _entry(line: str, where: str) -> Entry:
    try:
        found: dict[str, Any] = json.loads(line)
        entry = Entry(**found)
        if not all(type(found[name]) is kind for name, kind in _KINDS.items()) or not entry.cost >= 0:
            raise ValueError("a value of another type")
    except (ValueError, TypeError) as error:
        raise RunFailed(f"{where} is damaged ({error}): what was released before is not known any more") from error
    return entry


_KINDS = {"run": str, "round": int, "phase": str, "call": int, "client": str, "kind": str, "releases": int}
_KINDS |= {"cost": float, "digest": str}
