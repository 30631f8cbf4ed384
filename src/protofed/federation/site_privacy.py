"""Differential privacy at a site: what its clients have released in all runs, and that they release no more than they
may. It is on the site's disk before anything leaves, and nothing that a server says changes it.

privacy/ledger.jsonl     what each release cost, in all runs
runs/RUN/outbox/         what was sent lately, to be sent again bit for bit
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum, inf
from pathlib import Path
from typing import TYPE_CHECKING

from protofed import wire
from protofed.api.task import ClientId
from protofed.engine.private import Private
from protofed.federation.messages import Limits, Order, Refusal
from protofed.federation.refused import Refused
from protofed.privacy.account import epsilon_of, mu_of
from protofed.privacy.exchanges import AddMasked
from protofed.privacy.ledger import FOLDER, LEDGER, Entry, Ledger, read
from protofed.privacy.outbox import Outbox
from protofed.privacy.settings import PrivacySettings
from protofed.runtimes.client_store import StateLost
from protofed.runtimes.jobs import Answer, Failure, Job, Reason, failure_of

if TYPE_CHECKING:
    from protofed.engine.federation import Federation

STEPS = ("train", "evaluate_own")
"""That a private run asks for."""
SLACK = 1 + 1e-9
"""Of a sum of many costs in floating point."""


@dataclass(frozen=True)
class Spent:
    """What the clients of a site have released."""

    folder: Path
    """The site's."""

    @property
    def path(self) -> Path:
        return self.folder / FOLDER / LEDGER

    def epsilons(self, delta: float) -> dict[ClientId, float]:
        """ε of each client that has released something, over all runs."""
        ledger = Ledger(entries=read(self.path))
        clients = sorted({entry.client for entry in ledger.entries})
        return {client: epsilon_of(ledger.spent(client) ** 0.5, delta) for client in clients}

    def refusals(
        self, settings: PrivacySettings, run: str, clients: Sequence[ClientId], limits: Limits
    ) -> Iterator[tuple[Refusal, str]]:
        """Why a run may not begin: with those before it, it could release more than the policy allows."""
        if not settings.is_on or not limits.epsilon:
            return
        ledger, budget = Ledger(entries=read(self.path)), mu_of(settings.epsilon, settings.delta) ** 2
        for client in clients:
            others = ledger.spent(client) - ledger.spent(client, run)
            if others + budget > most(limits) * SLACK:  # guard: site-s-epsilon
                before, together = (epsilon_of(mu2**0.5, limits.delta) for mu2 in (others, others + budget))
                yield (
                    Refusal.EPSILON_TOO_LARGE,
                    f"max_epsilon = {limits.epsilon:g} in this site's policy, at δ = {limits.delta:g}: {client} has "
                    f"released ε = {before:.4g} in other runs, and with privacy.epsilon = {settings.epsilon:g} of this "
                    f"one it could be {together:.4g}",
                )


def most(limits: Limits) -> float:
    """μ² of a client, over all runs."""
    return mu_of(limits.epsilon, limits.delta) ** 2 if limits.epsilon else inf


class SitePrivate(Private):
    """What the clients of a site release in one run."""

    def __init__(self, settings: PrivacySettings, run: str, site: Path, own: Path, limits: Limits) -> None:
        """`site` is the site's folder, `own` the run's there."""
        super().__init__(replace(settings, noise="secret"))  # guard: noise-at-sites-is-secret
        self.ledger = Ledger(Spent(site).path)
        self._outbox = Outbox(own / "outbox")
        self._run, self._most = run, most(limits)

    def left(self, client: ClientId) -> float:
        """Of what this run promises, and of what the policy allows for all runs."""
        of_run = self.budget - self.ledger.spent(client, self._run)
        return min(of_run, self._most - self.ledger.spent(client))  # guard: site-s-epsilon-in-rounds

    def epsilons(self, clients: Sequence[ClientId]) -> Mapping[ClientId, float]:
        """ε of each client so far, in all runs, at the δ of this one."""
        return {c: epsilon_of(self.ledger.spent(c) ** 0.5, self.settings.delta) for c in clients}

    def refuse_step(self, order: Order) -> None:
        if order.step not in STEPS or order.evaluates:  # guard: private-steps-at-sites
            raise Refused(Refusal.STEP_NOT_ALLOWED, "a private run asks its clients to train, and for nothing else")

    def outcome(self, federation: "Federation", job: Job, run: Callable[[Job], Answer | Failure]) -> Answer | Failure:
        """What came of a training step, written down before anybody is given it."""
        like = federation.uploads.spec(
            federation.method.upload_spec(federation.initial_server, federation.server_context(0, "load"))
        )
        try:
            [(_, outcome)] = self.sent(federation, lambda jobs: ((one.client, run(one)) for one in jobs), [job], like)
        except StateLost as error:
            return failure_of(job.client, error)
        return outcome

    def outcome_of_sum(
        self, federation: "Federation", job: Job, run: Callable[[Job], Answer | Failure]
    ) -> Answer | Failure:
        """What came of an exchange of a secure sum. A client pays before what it adds leaves the site, since others can
        take the masks away without it. What it adds to a sum that is abandoned is paid for too."""
        noised = federation.noised_sums
        if noised is None or not isinstance(job.step, AddMasked):
            return run(job)
        costs, left = noised.costs(job.step.occasion.round), self.left(job.client)
        price = fsum(costs.values())
        if price > left * SLACK:  # guard: sums-in-budget-at-sites
            what = f"another sum costs {price:.4g} of μ², and {left:.4g} is left"
            return Failure(job.client, Reason.BUDGET_SPENT, what)
        outcome = run(job)
        if isinstance(outcome, Answer):
            t, digest = job.ticket, hashlib.sha256(wire.encode(outcome.upload)).hexdigest()
            self.ledger.write(  # guard: sums-charged-at-sites
                Entry(t.run, t.round, t.phase, t.question, job.client, kind, 1, each, digest)
                for kind, each in costs.items()
            )
        return outcome

    def _failed(self, job: Job, failure: Failure) -> Failure:
        """A client that cannot pay is left out; others go on."""
        return failure
