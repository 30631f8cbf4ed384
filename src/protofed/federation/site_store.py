"""What a site keeps on its own disk. Nothing of it leaves the site but answers.

log.jsonl                             a line for everything that came in and went out, for people to read
runs/RUN/experiment                   what was agreed for this run
runs/RUN/data                         a digest of the examples that it began with
runs/RUN/seconds                      how long the site has worked for it
runs/RUN/answers/NUMBER-NONCE-SHA     the last answers, to be given again
runs/RUN/clients/CLIENT/NUMBER-SHA    the last versions of a client's state, a safetensors file each
runs/RUN/outbox                       what was sent with noise, to be sent again (`site_privacy.py`)
privacy/ledger.jsonl                  what clients have released, in all runs
peers/SITE.pub                        the keys of other sites that are believed (`keyring.py`)
vault                                 secrets of secure sums, and which were unmasked

A file is whole or not there, and a state's name is its SHA-256, which is checked whenever it is read.
"""

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from protofed import wire
from protofed.api.task import ClientId
from protofed.errors import BadInput
from protofed.federation.codec import MOST_HEADER, Undecodable, decoded, encoded
from protofed.federation.messages import Description, Proposal
from protofed.printable import one_line
from protofed.runs.store import disk, opening
from protofed.runtimes.client_store import Receipt, StateLost
from protofed.runtimes.device import CPU, moved
from protofed.tree import Tree

KEPT_STATES = 12
"""Versions of a client's state: those that the server's last checkpoints may name, after rounds of several steps that
were tried again."""
KEPT_ANSWERS = 4

RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
SHA256 = re.compile("[0-9a-f]{64}")
FILE = re.compile(r"(\d{8})-(.+)")
LOG = "log.jsonl"


class LastFiles:
    """The last few files of a folder. Each has a label and a number, which says which came later."""

    def __init__(self, path: Path, most: int) -> None:
        self._path = path
        self._most = most

    def put(self, label: str, data: bytes, stays: str = "") -> None:
        """A new file, on the disk when this returns; older ones go, but not the one with the label `stays`."""
        disk.make(self._path)
        there = self._there()
        number = 1 + max((n for n, _ in there), default=0)
        with opening.folder(self._path) as own:
            disk.put(own, f"{number:08d}-{label}", data)
            old = [(n, one) for n, one in there if one == label]
            others = [(n, one) for n, one in there if one not in (label, stays)]
            old += others[: max(0, len(others) + 1 - self._most)]
            for n, one in old:
                disk.remove(own, f"{n:08d}-{one}")

    def read(self, label: str) -> bytes | None:
        """The content of the file with a label; None if there is none. Raises OSError if it cannot be read."""
        found = [n for n, one in self._there() if one == label]
        return opening.read(self._path, f"{found[-1]:08d}-{label}") if found else None

    def labels(self) -> list[str]:
        return [label for _, label in self._there()]

    def _there(self) -> list[tuple[int, str]]:
        matches = map(FILE.fullmatch, opening.names_in(self._path))
        return sorted((int(match[1]), match[2]) for match in matches if match)


class StateFiles:
    """The states of a site's clients in one run: a client store whose receipts are the SHA-256 of what was written."""

    def __init__(
        self,
        path: Path,
        like: Callable[[ClientId], Tree],
        device: torch.device = CPU,
        most: int = KEPT_STATES,
    ) -> None:
        """`like` gives a state with the structure that a client's always has; states are loaded onto the device."""
        self._path = path
        self._like = like
        self._device = device
        self._most = most
        self._loaded: dict[ClientId, str] = {}
        """The version that each client went on from last: the server's checkpoint names it."""

    def keep(self, client: ClientId, state: Tree) -> Receipt:
        data = wire.encode(state)
        receipt = Receipt(hashlib.sha256(data).hexdigest())
        self._files(client).put(receipt, data, stays=self._loaded.get(client, ""))
        return receipt

    def load(self, client: ClientId, receipt: Receipt) -> Tree:
        try:
            data = self._files(client).read(receipt)
        except OSError as error:
            raise StateLost(f"its state {receipt[:12]} cannot be read: {opening.reason(error)}") from error
        if data is None:
            raise StateLost(f"its state {one_line(receipt[:12])} is not here any more")
        if hashlib.sha256(data).hexdigest() != receipt:  # guard: site-s-states-checked
            raise StateLost(f"its state {receipt[:12]} does not have its checksum")
        try:
            state = wire.decode(data, self._like(client))
        except wire.WireError as error:
            raise StateLost(f"its state {receipt[:12]} is that of another method: {error}") from error
        self._loaded[client] = receipt
        return moved(state, self._device)

    def _files(self, client: ClientId) -> LastFiles:
        return LastFiles(self._path / folder_name(client), self._most)


def folder_name(client: ClientId) -> str:
    """A name for a client's folder: readable, and of no other client."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", client)[:40]
    return f"{plain}-{hashlib.sha256(client.encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class SiteFolder:
    """The folder of a site."""

    path: Path

    def run(self, run: str) -> Path:
        if not RUN.fullmatch(run):  # guard: run-is-a-plain-name
            raise BadInput(f"a run cannot be called {one_line(run[:80])!r}: only letters, digits, - and _ are allowed")
        return self.path / "runs" / run

    def answers(self, run: str) -> LastFiles:
        return LastFiles(self.run(run) / "answers", KEPT_ANSWERS)

    def agree(self, proposal: Proposal, data: str) -> None:
        """`data` is a digest of the site's examples."""
        self._put(proposal.description.run, "data", data.encode())
        self._put(proposal.description.run, "experiment", encoded(proposal))

    def data(self, run: str) -> str | None:
        """The digest of the examples that a run began with; None if it has not begun."""
        try:
            return opening.read(self.run(run), "data", most=100).decode(errors="replace")
        except FileNotFoundError:
            return None

    def agreed(self, run: str) -> Description | None:
        """What was agreed for a run; None if nothing was."""
        try:
            message = decoded(opening.read(self.run(run), "experiment", most=MOST_HEADER), MOST_HEADER)
        except (FileNotFoundError, Undecodable):
            return None
        return message.description if isinstance(message, Proposal) else None

    def seconds(self, run: str) -> float:
        """How long this site has worked for a run."""
        try:
            return float(opening.read(self.run(run), "seconds", most=100))
        except FileNotFoundError:
            return 0.0

    def add_seconds(self, run: str, more: float) -> None:
        self._put(run, "seconds", f"{self.seconds(run) + more:.3f}".encode())

    def _put(self, run: str, name: str, data: bytes) -> None:
        disk.make(path := self.run(run))
        with opening.folder(path) as own:
            disk.put(own, name, data)

    def log(self, event: str, facts: Mapping[str, Any]) -> None:
        """Adds a line to the log; it is on the disk when this returns."""
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        line = json.dumps({"time": at, "event": event, **facts}).encode() + b"\n"
        disk.make(self.path)
        disk.append(self.path, LOG, line)
