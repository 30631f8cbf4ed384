"""A site: answers what a server asks, within its limits, from its own data. It keeps a log of all that it was asked and
of all that it sent, which a data protection officer can read.

Nothing that a server sends is run. It names a method that is installed here, one of its steps, and clients of this
site. What a step leaves is on the site's disk before the answer leaves the site.
"""

import hashlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protofed.engine.message import printable
from protofed.errors import BadInput
from protofed.federation.agreement import Refused as RefusedExperiment
from protofed.federation.agreement import refusals
from protofed.federation.codec import Undecodable, decoded, encoded
from protofed.federation.keyring import Keyring, fingerprints
from protofed.federation.messages import (
    Answer,
    Description,
    Enrolment,
    Failed,
    Limits,
    Message,
    Notice,
    Order,
    Proposal,
    Question,
    Refusal,
    Shared,
    Survey,
    Verdict,
)
from protofed.federation.own_data import OwnData
from protofed.federation.plan import method_digests, plan_of, versions
from protofed.federation.refused import Refused
from protofed.federation.site_data import SiteData
from protofed.federation.site_privacy import SitePrivate, Spent
from protofed.federation.site_run import SiteRun
from protofed.federation.site_store import SiteFolder
from protofed.federation.steps import exchange_of
from protofed.models.formats import outline_of
from protofed.runs.config.recording import fingerprint
from protofed.runs.store import opening
from protofed.runtimes.jobs import Reason

CHANGED = "the examples of this site have changed since the run began"


@dataclass
class Site:
    folder: Path
    """Where it keeps its log, and what its clients remember."""
    data: SiteData | OwnData
    limits: Limits = Limits()  # noqa: RUF009 (it is frozen, so it can be shared)
    dry_run: bool = False
    """Whether everything is checked and written into the log, and nothing is done."""
    device: str = "cpu"
    keyring: Keyring | None = None
    """For secure sums; without it the site takes part in none."""
    _runs: dict[str, SiteRun] = field(default_factory=dict)
    """By the name of the run: what the last order needed."""

    def handle(self, data: bytes) -> bytes | None:
        """The answer to what a server sent; None to what is no question, or if the site can keep no log of it."""
        digest, message = hashlib.sha256(data).hexdigest(), None
        try:
            try:
                message = decoded(data, self.limits.bytes)
            except Undecodable as error:
                self._files.log("unreadable", {"sha256": digest, "bytes": len(data), "why": printable(str(error))})
                return None
            answer = self._answer(message, digest, len(data))
            if answer is not None:
                facts = {"nonce": message.nonce, "sha256": hashlib.sha256(answer).hexdigest(), "bytes": len(answer)}
                self._files.log("sent", facts)  # guard: nothing-leaves-unlogged
            return answer
        except OSError as error:
            return self._full(message, error) if isinstance(message, Order) else None

    @property
    def _files(self) -> SiteFolder:
        return SiteFolder(self.folder)

    def _answer(self, message: Message, digest: str, size: int) -> bytes | None:
        match message:
            case Survey():
                return encoded(self._shared(message))
            case Question():
                self._files.log("asked", {"nonce": message.nonce, "sha256": digest})
                return encoded(self._enrolment(message))
            case Proposal():
                return encoded(self._verdict(message))
            case Order():
                return self._answered(message, digest, size)
            case Notice():
                self._files.log("not begun", {"nonce": message.nonce, "why": [*map(printable, message.why)]})
                return encoded(Notice(message.nonce))
        self._files.log("unexpected", {"kind": type(message).__name__, "sha256": digest})
        return None

    # ---- before the first round

    def _shared(self, survey: Survey) -> Shared:
        """What this site tells of its own files. All of it is written into the log."""
        shares, refused = "", None
        try:
            if not isinstance(self.data, OwnData):
                raise Refused(Refusal.OTHER_TASK, f"the task of this site is {self.data.task.name}, without own files")
            shares = self.data.shares(survey.task)
        except Exception as error:  # guard: no-survey-ends-a-site
            refused = self._refused(error, survey.nonce)
        self._files.log("survey", {"nonce": survey.nonce, "task": printable(survey.task), "told": shares})
        if self.dry_run and refused is None:  # guard: dry-run-tells-nothing
            refused = (Refusal.DRY_RUN, "this site only says what it would do, and would tell of its files")
        return Shared(survey.nonce, "" if refused else shares, _named([refused] if refused else []))

    def _refused(self, error: Exception, nonce: str) -> RefusedExperiment:
        """What leaves the site of a reason. A fault of files may name a value, so only the log has it."""
        if isinstance(error, Refused):
            return error.name, error.text
        why = str(error) if isinstance(error, BadInput) else f"{type(error).__name__}: {error}"
        self._files.log("fault", {"nonce": nonce, "why": printable(why)})  # guard: faults-of-files-stay-here
        return Refusal.FILES_NOT_USABLE, "files of this site cannot be used: its log says why, or `protofed site check`"

    def _data(self, preparation: str) -> SiteData:
        """The site's part of the task. Raises Refused, or anything else for a fault of its files."""
        if isinstance(self.data, OwnData):
            return self.data.prepared(preparation)
        if preparation:
            raise Refused(Refusal.OTHER_TASK, f"the task of this site is {self.data.task.name}, without own files")
        return self.data

    def _enrolment(self, question: Question) -> Enrolment:
        wanted = self.limits.methods
        methods = {name: digest for name, digest in method_digests().items() if not wanted or name in wanted}
        try:
            data = self._data(question.preparation)
        except Exception as error:
            told = _named([self._refused(error, question.nonce)])
            return Enrolment(question.nonce, versions(), "", (), (), methods, self.limits, told)
        validated = tuple(client for client in data.clients if client in data.task.validation)
        outline = outline_of(data.task).text().decode()
        keys = None if self.keyring is None else self.keyring.own(data.clients)
        return Enrolment(
            question.nonce, versions(), outline, data.own_tests, validated, methods, self.limits, keys=keys
        )

    def _verdict(self, proposal: Proposal) -> Verdict:
        description, data = proposal.description, ""
        try:
            own = self._data(description.preparation)
        except Exception as error:
            found = [self._refused(error, proposal.nonce)]
        else:
            found, data = self._refusals(description, own), fingerprint(own.task)
        if not found:
            try:
                self._run_of(proposal)
            except Exception as error:  # guard: no-proposal-ends-a-site
                found = [(Refusal.BAD_EXPERIMENT, f"{type(error).__name__}: {error}")]
        if not found and self._files.data(description.run) not in (None, data):  # guard: run-keeps-its-examples
            found = [(Refusal.OTHER_DATA, CHANGED)]
        if self.dry_run and not found:  # guard: dry-run-agrees-to-nothing
            found = [(Refusal.DRY_RUN, "this site only says what it would do, and would take part")]
        facts: dict[str, Any] = {"run": printable(description.run), "description": description.digest}
        if not found:
            if self.keyring is not None and self._runs[description.run].sums is not None:
                self.keyring.keep(description.keys)
                facts["keys"] = dict(fingerprints(description.keys))
            self._files.agree(proposal, data)
        told = _named(found)
        facts["config"] = description.config
        self._files.log("proposal", {**facts, "nonce": proposal.nonce, "refused": [*map(list, told)]})
        return Verdict(proposal.nonce, description.digest, told)

    def _refusals(self, description: Description, data: SiteData) -> list[RefusedExperiment]:
        found = refusals(description, data, self.limits, self.keyring)
        if found:
            return found
        plan, spent = plan_of(description.config), Spent(self.folder)
        return list(spent.refusals(plan.privacy, description.run, data.clients, self.limits))

    def _run_of(self, proposal: Proposal) -> SiteRun:
        description = proposal.description
        own, data = self._files.run(description.run), self._data(description.preparation)
        settings = plan_of(description.config).privacy
        private = SitePrivate(settings, description.run, self.folder, own, self.limits) if settings.is_on else None
        run = SiteRun.of(description, data, self.limits, own / "clients", self.device, self.keyring, private)
        self._runs = {description.run: run}
        return self._runs[description.run]

    # ---- in a round

    def _answered(self, order: Order, digest: str, size: int) -> bytes:
        """The answer to an order: the one that it was given before, if it was."""
        self._log_order(order, digest, size)
        try:
            run = self._permitted(order)
            answers = self._files.answers(order.ticket.run)
            before = next((label for label in answers.labels() if label.startswith(f"{order.nonce}-")), None)
            if before is not None and before != f"{order.nonce}-{digest}":  # guard: nonce-is-of-one-order
                raise Refused(Refusal.NONCE_USED, "another order had the same nonce")
            known = None if before is None else answers.read(before)
            if known is not None:  # guard: answers-given-again
                return known
            answer = encoded(self._done(run, order))
            if len(answer) > self.limits.bytes:  # guard: site-s-bytes
                what = f"an answer of {len(answer)} bytes, and this site sends at most {self.limits.bytes}"
                raise Refused(Refusal.TOO_MANY_BYTES, what)
        except Refused as refused:
            return encoded(_all_failed(order, Reason.REFUSED_BY_SITE, str(refused)))
        except OSError:
            raise
        except Exception as error:  # guard: no-order-ends-a-site
            return encoded(_all_failed(order, Reason.CLIENT_ERROR, f"{type(error).__name__}: {error}"))
        answers.put(f"{order.nonce}-{digest}", answer)
        return answer

    def _done(self, run: SiteRun, order: Order) -> Answer:
        """Raises Refused."""
        begin = time.monotonic()
        run.runtime.end = begin + self.limits.hours * 3600 - self._files.seconds(order.ticket.run)
        done, failed = run.done(order, begin + order.seconds)
        seconds = time.monotonic() - begin
        self._files.add_seconds(order.ticket.run, seconds)
        uploads = {one.client: hashlib.sha256(one.upload).hexdigest() for one in done}
        whys = {one.client: f"{one.reason}: {one.detail}" for one in failed}
        facts: dict[str, Any] = {"uploads": uploads, "failed": whys}
        facts["afresh"] = [one.client for one in done if one.is_afresh]
        if run.private is not None:
            facts["epsilon"] = run.private.epsilons(self.data.clients)
        self._files.log("done", {"nonce": order.nonce, "seconds": round(seconds, 3), **facts})
        return Answer(order.nonce, tuple(done), tuple(failed))

    def _permitted(self, order: Order) -> SiteRun:
        """What the order needs. Raises Refused."""
        ticket, own = order.ticket, self.data.clients
        run = self._runs.get(ticket.run) or self._agreed_before(order)
        if run is None or run.description.digest != order.digest:  # guard: only-what-was-agreed
            raise Refused(Refusal.NOT_AGREED, "this site has not agreed to this experiment")
        if any(work.client not in own for work in order.works):  # guard: only-own-clients
            raise Refused(Refusal.FOREIGN_CLIENT, "the order names a client that is not of this site")
        step = exchange_of(order.step)[1].rpartition(".")[2]
        if step and self.limits.steps and step not in self.limits.steps:  # guard: site-s-steps
            raise Refused(Refusal.STEP_NOT_ALLOWED, f"this site does not do the step {printable(step)}")
        if not 0 <= ticket.round <= run.plan.training.rounds:  # guard: only-agreed-rounds
            raise Refused(Refusal.TOO_MANY_ROUNDS, f"round {ticket.round} of {run.plan.training.rounds}")
        if self.dry_run:  # guard: dry-run-does-nothing
            raise Refused(Refusal.DRY_RUN, "this site only says what it would do, and would do this")
        return run

    def _agreed_before(self, order: Order) -> SiteRun | None:
        """What this site agreed to before it was started again."""
        try:
            description = self._files.agreed(order.ticket.run)
        except BadInput:
            return None
        if description is None:
            return None
        try:
            data = self._data(description.preparation)
        except Exception as error:
            raise Refused(*self._refused(error, order.nonce)) from error
        if fingerprint(data.task) != self._files.data(description.run):  # guard: data-as-agreed-after-restart
            raise Refused(Refusal.OTHER_DATA, CHANGED)
        if self._refusals(description, data):  # guard: limits-after-restart
            return None
        return self._run_of(Proposal(order.nonce, description))

    def _log_order(self, order: Order, digest: str, size: int) -> None:
        ticket = order.ticket
        facts = {"run": printable(ticket.run), "round": ticket.round, "phase": printable(ticket.phase)}
        facts |= {"call": ticket.call, "step": printable(order.step), "tests": order.tests}
        clients = {printable(work.client): work.receipt[:64] for work in order.works}
        facts |= {"nonce": order.nonce, "clients": clients, "sha256": digest, "bytes": size}
        self._files.log("order", facts)

    @staticmethod
    def _full(order: Order, error: OSError) -> bytes:
        """The answer of a site that cannot write: no upload leaves it."""
        what = f"the site cannot write to its disk: {opening.reason(error)}"
        return encoded(_all_failed(order, Reason.CLIENT_ERROR, what))


def _named(found: Iterable[RefusedExperiment]) -> tuple[tuple[str, str], ...]:
    return tuple((name.value, printable(text)) for name, text in found)


def _all_failed(order: Order, reason: Reason, detail: str) -> Answer:
    return Answer(order.nonce, (), tuple(Failed(work.client, reason, printable(detail)) for work in order.works))
