"""Where sites keep what nobody else may know: files that only their owner can read, in a folder that goes with the run.

It is never in a client's memory, which checkpoints hold.
"""

import hashlib
import json
import os
import shutil
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protofed.api.task import ClientId


class Aborted(Exception):
    """A site does not go on with a secure sum, since that could give away what it must not."""


@dataclass(frozen=True)
class Vault:
    folder: Path

    @staticmethod
    def new() -> "Vault":
        """A vault that is emptied when it is no longer needed."""
        vault = Vault(Path(tempfile.mkdtemp(prefix="protofed-sites-")))
        weakref.finalize(vault, shutil.rmtree, vault.folder, ignore_errors=True)
        return vault

    def keep(self, client: ClientId, kind: str, secrets: dict[str, Any]) -> None:
        """Writes a site's secrets, in the place of those of this kind that it had. They are on the disk when this
        returns: a site that has forgotten what it unmasked would do so again."""
        place = self._place(client, kind)
        new = place.with_suffix(".new")
        new.unlink(missing_ok=True)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
            json.dump(secrets, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(place)
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def read(self, client: ClientId, kind: str) -> dict[str, Any] | None:
        place = self._place(client, kind)
        found: dict[str, Any] | None = json.loads(place.read_text()) if place.exists() else None
        return found

    def forget(self, client: ClientId, kind: str) -> None:
        self._place(client, kind).unlink(missing_ok=True)

    def _place(self, client: ClientId, kind: str) -> Path:
        """A client's name may be no name of a file."""
        return self.folder / f"{hashlib.sha256(client.encode()).hexdigest()[:32]}.{kind}"
