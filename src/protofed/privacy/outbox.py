"""What a client has sent with secret noise, to be sent again, bit for bit, if it is asked for the same once more.

Noise that cannot be drawn again would make a second release of the same step, and the two together tell more than one.
A file is whole or not there, and is there before anything is sent.
"""

import hashlib
import os
import re
from pathlib import Path
from typing import TypeVar

from protofed import wire
from protofed.api.task import ClientId
from protofed.errors import RunFailed
from protofed.tree import Tree

T = TypeVar("T")

KEPT_ROUNDS = 3
"""Rounds whose files stay: a run may go on from its last state but one."""
NAME = re.compile(r"(\d{8})-[0-9a-f]{64}\.safetensors")


class Outbox:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, client: ClientId, round: int, about: str, like: T) -> T | None:
        """What was sent for this question; None if nothing was. `about` tells questions of a round apart."""
        path = self._folder / _name(client, round, about)
        if not path.exists():
            return None
        try:
            return wire.decode(path.read_bytes(), like)
        except wire.WireError as error:
            raise RunFailed(
                f"{path} is damaged: what client {client} sent in round {round + 1} cannot be sent again ({error})"
            ) from error

    def put(self, client: ClientId, round: int, about: str, sent: Tree) -> None:
        """Keeps what is going to be sent; it is on the disk when this returns."""
        write_whole(self._folder, _name(client, round, about), wire.encode(sent))

    def forget(self, before: int) -> None:
        """Removes what was sent so many rounds ago that no run goes on from there."""
        for path in self._folder.iterdir() if self._folder.exists() else ():
            match = NAME.fullmatch(path.name)
            if match and int(match[1]) < before - KEPT_ROUNDS:
                path.unlink(missing_ok=True)


def write_whole(folder: Path, name: str, data: bytes) -> None:
    """A file that only its owner can read, in a folder of this kind; both are on the disk when this returns."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    path = folder / name
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    above = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(above)
    finally:
        os.close(above)


def _name(client: ClientId, round: int, about: str) -> str:
    digest = hashlib.sha256(f"{client}\0{about}".encode()).hexdigest()
    return f"{round:08d}-{digest}.safetensors"
