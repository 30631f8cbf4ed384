"""What a server knows of differential privacy at sites: what they tell."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from protofed.engine.message import Refused, WireMessage
from protofed.engine.private import Private, Run
from protofed.privacy.ledger import LEDGER, Entry, Ledger
from protofed.runtimes.jobs import Job, Outcome
from protofed.tree import Tree

if TYPE_CHECKING:
    from protofed.engine.federation import Federation


class ToldPrivate(Private):
    """Sites draw the noise, keep to the budget and pay. The server writes down what they say that they have spent."""

    def keep_in(self, folder: Path) -> None:
        self.ledger = Ledger(folder / LEDGER, self.ledger.entries)

    def sent(self, federation: "Federation", run: Run, jobs: Iterable[Job], like: Tree) -> Iterator[Outcome]:
        asked: dict[str, Job] = {}

        def noted() -> Iterator[Job]:
            for job in jobs:
                asked[job.client] = job
                yield job

        for client, outcome in run(noted()):
            if isinstance(outcome, WireMessage):
                self._told(asked[client], outcome)
            yield client, outcome

    def _told(self, job: Job, message: WireMessage) -> None:
        try:
            charges = message.charges
        except Refused:
            return  # the engine says what is wrong with it
        t, digest = job.ticket, hashlib.sha256(message.data).hexdigest()
        self.ledger.write(
            Entry(t.run, t.round, t.phase, t.call, job.client, one.kind, one.releases, one.cost, digest)
            for one in charges
        )
