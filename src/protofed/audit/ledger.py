"""The account of a private run, made once more from its ledger."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protofed import wire
from protofed.api.task import ClientId
from protofed.audit.replay import Replay
from protofed.errors import BadInput
from protofed.privacy.account import epsilon_of
from protofed.privacy.ledger import Entry, read
from protofed.privacy.settings import PrivacySettings
from protofed.runs.loading import SavedRun

NAME = "ledger.jsonl"


@dataclass(frozen=True)
class Account:
    """What clients of a private run have released, and what of it was found in the replay."""

    settings: PrivacySettings
    lines: int
    spent: Mapping[ClientId, float]
    """ε of each client at the settings' δ."""
    missing: Sequence[ClientId]
    """Clients whose upload of the last round is not in the ledger, bit for bit."""

    @property
    def epsilon(self) -> float:
        """Of the client that has released most."""
        return max(self.spent.values(), default=0.0)


def account(run: SavedRun, replay: Replay) -> Account | None:
    """None for a run without differential privacy."""
    settings = run.config.privacy
    if not settings.is_on:
        return None
    entries = entries_of(run)
    costs: dict[ClientId, list[float]] = {client: [] for client in replay.federation.ids}
    for entry in entries:
        costs.setdefault(entry.client, []).append(entry.cost)
    spent = {client: epsilon_of(sum(own) ** 0.5, settings.delta) for client, own in costs.items()}
    return Account(settings, len(entries), spent, _missing(replay, entries))


def entries_of(run: SavedRun) -> Sequence[Entry]:
    """The lines of the ledger."""
    path = run.folder.privacy / NAME
    if not path.is_file():
        raise BadInput(f"{path} is not there: nothing says what this private run has released")
    return read(path)


def _missing(replay: Replay, entries: Sequence[Entry]) -> list[ClientId]:
    there = {(entry.client, entry.round, entry.digest) for entry in entries}
    number, missing = replay.before.round, []
    for call in replay.uploads.values():
        for client, sent in call.items():
            upload = sent.upload
            for transform in replay.federation.uploads.transforms:
                upload = transform.encode(upload)
            if (client, number, hashlib.sha256(wire.encode(upload)).hexdigest()) not in there:
                missing.append(client)
    return missing
